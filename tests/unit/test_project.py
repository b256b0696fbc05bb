"""The rules of the house, executable: what a reviewer would otherwise have to look for."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft import cli

ROOT = Path(__file__).parents[2]
README_LINES_MAX = 120

# Each is allowed only with a reason, and so far nobody had one.
FORBIDDEN = {
    "pickle": re.compile(r"\bimport pickle|\bpickle\.|\btorch\.(load|save)\("),
    "an error that is swallowed": re.compile(r"except( Exception| BaseException)?:\s*\n\s*pass\b"),
    "a note to self": re.compile(r"\b(TODO|FIXME|XXX)\b"),
    "something left out": re.compile(r"\bNotImplementedError\b"),
}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb" not in path.parts]


def run(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=600, check=False
    )


def imported_by(statement: str) -> set[str]:
    """Top-level packages that are there after it."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_torch_comes_with_the_session_only() -> None:
    there = imported_by("import swift_ft; swift_ft.Session")
    assert "torch" in there
    assert "prometheus_client" not in there, "metrics cost nothing where nobody asked for them"


TORCH, KEYS, METRICS = {"torch", "numpy"}, {"cryptography", "jwt"}, {"prometheus_client"}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("swift_ft, swift_ft.cli", TORCH | KEYS | {"grpc", "google", "rich"}),
        ("swift_ft_services.logserver.__main__", TORCH | KEYS | METRICS),
        ("swift_ft_services.coordinator.__main__", TORCH | KEYS | METRICS),
        ("swift_ft.log.sidecar_client, swift_ft.log.reader, swift_ft.log.admin", TORCH | KEYS | METRICS),
        ("swift_ft.coordinator_client, swift_ft.planner", TORCH | KEYS),
        ("swift_ft.tools.inspect", TORCH),
        # The drill's own process: it starts everything else and must come up, and answer, at once.
        ("swift_ft.lab.drill.command, swift_ft.lab.drill.report, swift_ft.lab.drill.cluster", TORCH),
        ("swift_ft.lab.determinism.command", TORCH),
        ("swift_ft.tools.doctor", TORCH),
        ("swift_ft.lab.plan.command", TORCH),
        ("swift_ft.lab.failures.schedule, swift_ft.lab.failures.report, swift_ft.lab.failures.damage", TORCH),
    ],
)
def test_what_takes_long_is_imported_where_it_is_needed(modules: str, absent: set[str]) -> None:
    assert imported_by(f"import {modules}").isdisjoint(absent)


def test_import_contracts_hold() -> None:
    done = run(
        sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", NO_COLOR="1"
    )
    assert done.returncode == 0, done.stdout


def test_stubs_are_what_proto_generates(tmp_path: Path) -> None:
    done = run(str(ROOT / "scripts" / "gen_proto"), str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "swift_ft" / "_pb").iterdir()}
    stored = {
        path.name: path.read_text()
        for path in (ROOT / "swift" / "swift_ft" / "_pb").iterdir()
        if path.is_file() and path.name != "__init__.py"
    }
    assert made.keys() == stored.keys()
    different = [name for name in made if made[name] != stored[name]]
    assert different == [], "run scripts/gen_proto"


@pytest.mark.parametrize("path", sources("swift", "services"), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_forbidden(path: Path) -> None:
    text = path.read_text()
    for what, pattern in FORBIDDEN.items():
        assert pattern.search(text) is None or (
            what == "pickle" and path.relative_to(ROOT) in {READS_DCP, COMPARES_FORMATS}
        ), what


READS_DCP = Path("swift/swift_ft/state/export.py")
"""For a trainer that asks for it: an unpickler that finds DCP's data classes only, and torch's `weights_only`
(`tests/unit/checkpoint/test_dcp.py`)."""
COMPARES_FORMATS = Path("swift/swift_ft/lab/bench/formats.py")
"""A benchmark of the formats, these among them: it reads what it has just written, and makes tensors, arrays and plain
values of it."""

# What makes objects, or runs, out of bytes that somebody else wrote.
UNSAFE_MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle"),
    *("marshal", "shelve", "joblib", "yaml"),
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_NAMES = {
    "multiprocessing.connection",  # its send and recv pickle
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "multiprocessing.Manager",
    "torch.load",
    "torch.save",
    "numpy.load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
}


def unsafe(text: str) -> set[str]:
    """What of the above a module uses."""
    names = {name.rpartition(".")[2] for name in UNSAFE_NAMES if name.startswith("dist.")}
    found = set()
    for node in ast.walk(ast.parse(text)):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            used = [ast.unparse(node)]
        elif isinstance(node, ast.Name):
            used = [node.id]
            if node.id in UNSAFE_CALLS:
                found.add(node.id)
        for name in used:
            if name.partition(".")[0] in UNSAFE_MODULES and not isinstance(node, ast.Name):
                found.add(name)
            if any(name == bad or name.startswith(f"{bad}.") for bad in UNSAFE_NAMES):
                found.add(name)
            if name.rpartition(".")[2] in names:
                found.add(name)
    return found


@pytest.mark.parametrize("path", sources("swift", "services"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bytes_become_objects(path: Path) -> None:
    # The worker runs the user's own script, as `python SCRIPT` would.
    allowed = {"exec"} if path.relative_to(ROOT) == Path("swift/swift_ft/launch/worker.py") else set()
    if path.relative_to(ROOT) == READS_DCP:
        allowed = {"pickle", "pickle._Unpickler", "pickle._Unpickler.dispatch", "pickle.BUILD"}
        allowed |= {"pickle.UnpicklingError", "torch.load", "torch.save"}
    if path.relative_to(ROOT) == Path("swift/swift_ft/torch_private.py"):  # replaced by one that carries JSON
        allowed = {"dist.broadcast_object_list", "_c10d.broadcast_object_list"}
    if path.relative_to(ROOT) == COMPARES_FORMATS:
        allowed = {"torch.load", "torch.save"}
        assert all(told in path.read_text() for told in ("weights_only=True", "allow_pickle=False"))
    assert unsafe(path.read_text()) <= allowed


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "import yaml",
        "x = eval('1')",
        "f = exec",
        "torch.load(f)",
        "from torch import load",
        "from multiprocessing.connection import Client",
        "import multiprocessing; multiprocessing.Pipe()",
        "from multiprocessing import Queue",
        "import numpy; numpy.load(f)",
        "torch.distributed.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "import shelve",
    ],
)
def test_that_rule_sees_what_it_should(text: str) -> None:
    assert unsafe(text) != set()


@pytest.mark.parametrize("path", sources("swift", "services"), ids=lambda path: str(path.relative_to(ROOT)))
def test_connections_are_made_in_one_place(path: Path) -> None:
    """Where they get their credentials, and where a port is only opened with the protection that was asked for."""
    made = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
    }
    allowed = {
        "swift/swift_ft/credentials.py": {"insecure_channel", "secure_channel"},
        "services/swift_ft_services/program.py": {"add_insecure_port", "add_secure_port"},
        # Hundreds of members in a process, on loopback: asyncio's channels.
        "swift/swift_ft/lab/bench/coordinator.py": {"insecure_channel"},
    }
    assert made <= allowed.get(str(path.relative_to(ROOT)), set())


@pytest.mark.parametrize("path", sources("swift", "services"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "a docstring first"


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_scripts_are_short_and_run(path: Path) -> None:
    assert path.name.startswith("_") or os.access(path, os.X_OK)
    assert len(path.read_text().splitlines()) <= 40


def test_sizes_are_written_as_json(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.size", "--json", str(tmp_path / "sizes"))
    assert done.returncode == 0, done.stderr
    sizes = json.loads((tmp_path / "sizes").read_text())
    assert (
        sizes["product_lines"] > sizes["lab_lines"] > sizes["modules"] > sizes["single_importer_modules"] > 0
    )
    assert sizes["test_lines"] > 0
    assert sizes["folders"] > 0


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "logserver",
        "coordinator",
        "drill",
        "verify-determinism",
        "token",
        "inspect",
        "doctor",
        "plan",
        "failures",
    ],
)
def test_help_begins_with_what_it_does(command: str) -> None:
    done = run(sys.executable, "-m", "swift_ft.cli", command, "--help")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert not first.startswith("usage")
    assert first.endswith(".")


@pytest.mark.parametrize("command", ["", "fly", "run", "logserver", "coordinator", "token"])
def test_what_is_missing_is_said_in_one_line(command: str) -> None:
    """Of the other commands: tests/unit/launch/test_cli.py."""
    done = run(sys.executable, "-m", "swift_ft.cli", *command.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("swift_ft.tools.status.main", interrupted)
    assert cli.main(["status", "--job", "j"]) == 130


def test_every_pin_but_torch_has_its_hashes() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        return dict(
            line.removesuffix(" \\").partition(" ;")[0].split("==")
            for line in lines
            if re.match(r"[A-Za-z]\S*==", line)
        )

    hashed = pins("requirements.hashed.txt")
    expected = {name: version for name, version in pins("constraints.txt").items() if name != "torch"}
    assert expected.items() <= hashed.items()
    text = (ROOT / "requirements.hashed.txt").read_text()
    blocks = re.split(r"^(?=[A-Za-z])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(hashed)
    assert all("--hash=sha256:" in block for block in blocks)


def test_cuda_is_named_in_one_module() -> None:
    named = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "swift").rglob("*.py"))
        if "torch.cuda" in file.read_text()
    ]
    assert named == ["swift/swift_ft/device.py"]

"""What belongs to a server alone: its files' modes, its lock, and where its code comes from."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import JOB
from swift_ft.log import admin
from swift_ft.log.record import RecordKey
from tests.integration import failing_world
from tests.log_client import LogWriter
from tests.patience import served_at

TIMEOUT_S = 30.0
SWIFT = str(Path(sys.executable).with_name("swift-ft"))


@contextmanager
def served(
    tmp_path: Path, *flags: str, cwd: Path | None = None, name: str = "logserver"
) -> Iterator[tuple[str, Path]]:
    """A service as an operator starts it. (address, its stderr)"""
    address_file, said = tmp_path / "address", tmp_path / "stderr"
    address_file.unlink(missing_ok=True)
    command = [SWIFT, name, "--directory", str(tmp_path / name), "--address-file", str(address_file), *flags]
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield served_at(process, address_file, said.read_text), said
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, said.read_text()


def too_wide(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)} {mode:o}"
        for path in [root, *root.rglob("*")]
        if (mode := stat.S_IMODE(path.lstat().st_mode)) & 0o077 and not path.is_symlink()
    ]


@pytest.fixture
def _usual_umask() -> Iterator[None]:
    """What is made by it alone can be read by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_usual_umask")
def test_all_that_a_run_makes_is_its_owners_alone(tmp_path: Path) -> None:
    """Of the launcher, ranks with their sidecars, a spare, and both services, while a rank is killed; and what is
    exported of it then."""
    place, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir(mode=0o700)
    killed = "rank=1,step=7,phase=backward"
    more = ["--redirects", "3"]
    torchs = str(tmp_path / "inductor")  # torch makes it in a rank's process
    settings = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": torchs}
    failing_world.run(place, killed, flags=more, settings=settings)
    words = ["--checkpoint-dir", str(place / "checkpoints"), "--job", JOB, str(place / "exported")]
    subprocess.run([SWIFT, "export", *words], check=True, stdout=subprocess.DEVNULL)

    for address in place.glob("*.address"):  # for whoever is to connect
        assert stat.S_IMODE(address.stat().st_mode) == 0o644
        address.unlink()
    made = {path.suffix for path in place.rglob("*")}
    assert made >= {".safetensors", ".sqlite", ".jsonl", ".json", ".log", ".distcp", ".fired"}, made
    assert too_wide(place) == []
    assert too_wide(temporary) == []


@pytest.mark.usefixtures("_usual_umask")
def test_what_a_command_was_asked_to_write_is_as_wide_as_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    subprocess.run([SWIFT, "doctor", "--json", str(path)], check=False, stdout=subprocess.DEVNULL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_log_servers_files_are_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with served(tmp_path) as (address, _):
            admin.fence(address, "job", 1, TIMEOUT_S)
            writer = LogWriter([address], "job", 1)
            writer.append("s0.F", RecordKey(0, 0, 0), "uint8", (3,), b"abc")
            writer.close()
            assert too_wide(tmp_path / "logserver") == []
        assert too_wide(tmp_path / "logserver") == []
    finally:
        os.umask(before)


def test_a_coordinators_files_are_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with served(tmp_path, "--log-servers", "127.0.0.1:1", name="coordinator"):
            assert too_wide(tmp_path / "coordinator") == []
    finally:
        os.umask(before)


def test_nothing_is_imported_from_the_current_directory(tmp_path: Path) -> None:
    """Whoever can write where an operator happens to stand would be the server."""
    trap = tmp_path / "trap"
    for name in (
        "json.py",
        "grpc.py",
        "services/swift_ft_services/__init__.py",
        "services/swift_ft_services/logserver/__init__.py",
        "swift/swift_ft/__init__.py",
    ):
        path = trap / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nraise SystemExit(77)\n")
    with served(tmp_path, cwd=trap):
        pass
    with served(tmp_path, "--log-servers", "127.0.0.1:1", cwd=trap, name="coordinator"):
        pass
    for command in (["run", "--help"], ["drill", "--help"], ["inspect", "--help"]):
        subprocess.run([SWIFT, *command], cwd=trap, check=True, capture_output=True, timeout=TIMEOUT_S)
    assert not (tmp_path / "sprung").exists()


def test_the_serving_line_says_whether_there_are_tokens(tmp_path: Path) -> None:
    with served(tmp_path, "--log-format", "json") as (_, said):
        pass
    (line,) = [line for line in map(json.loads, said.read_text().splitlines()) if line["event"] == "serving"]
    assert line["fields"]["tokens"] is False

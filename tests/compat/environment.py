"""A virtual environment with one version of torch under one version of Python."""

import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import overlay

ROOT = Path(__file__).resolve().parents[2]
_INSTALL_LIMIT_S = 3600.0
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Unavailable(Exception):
    """There is no such interpreter or package here. The message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    torch: str
    python: str
    floors: bool = False
    """Everything besides torch that a trainer or a server needs is the oldest that pyproject.toml allows."""
    overlay: bool = False
    """The pipelining of this process's torch is laid over (`tests/gpu/overlay.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The interpreter of a virtual environment in which torch is installed, and swift from this checkout."""

    python: Path
    build: str
    """Of torch: CPU, or CUDA with its version. A build with CUDA runs on the CPU where there is no GPU."""

    @classmethod
    def make(cls, pair: Pair, place: Path) -> "Environment":
        """Makes it in the directory `place`. Raises Unavailable."""
        interpreter = _interpreter(pair.python)
        subprocess.run([interpreter, "-m", "venv", place], check=True)
        python = place / "bin" / "python"
        # pip prefers the CPU build of the same version, where an index or a directory that it knows has one.
        _pip(python, f"torch=={pair.torch}")
        pinned = place / "constraints.txt"
        pinned.write_text(constraints(floors=pair.floors))
        _pip(python, "-c", str(pinned), *requirements())
        # Not refused by what pyproject.toml says: whether that can be said is what is tried here.
        _pip(python, "--no-deps", "--ignore-requires-python", "-e", str(ROOT))
        if pair.overlay:
            lay = [python, "-m", "tests.gpu.overlay", str(overlay.distributed() / "pipelining")]
            subprocess.run(lay, cwd=ROOT, check=True)
        return cls(python=python, build=_build(python))


def _interpreter(version: str) -> str:
    """Of that version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}*/bin/python"))):
        if (
            found is not None
            and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return str(found)
    raise Unavailable(f"no python{version} here")


def _pip(python: Path, *arguments: str) -> None:
    # An empty file of constraints takes the place of one that this machine's configuration may name.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_INSTALL_LIMIT_S,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip: {(errors or [done.stderr.strip()])[-1].removeprefix('ERROR: ')}")


def constraints(*, floors: bool = False) -> str:
    """Those of the scripts, without torch. `floors`: with the oldest versions of what `pyproject.toml` demands."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line).lower(): line for line in lines if not line.startswith("#")}
    if floors:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        demanded = (*project["dependencies"], *project["optional-dependencies"]["train"])
        pinned |= {name_of(each).lower(): each.replace(">=", "==") for each in demanded}
    del pinned["torch"]
    return "\n".join(pinned.values()) + "\n"


def requirements() -> list[str]:
    """What tests and drills need besides torch, and what builds swift."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = said["project"]
    extras = project["optional-dependencies"]
    used = [*extras["train"], *extras["lab"], *extras["test"]]
    wanted = [*project["dependencies"], *used, *said["build-system"]["requires"]]
    return [each for each in wanted if name_of(each) not in ("torch", project["name"])]


def name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None
    return found.group()


def _build(python: Path) -> str:
    code = "import torch; print(torch.version.cuda or '')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(
            f"torch does not import: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    cuda = done.stdout.strip()
    return f"CUDA {cuda}" if cuda else "CPU"

"""What travels to a machine with a GPU and no registry: `scripts/gpu --pack FOLDER`, and there `--from FOLDER`.

    python -m tests.gpu.pack FOLDER [PYTHON]     wheels for that Python (default: 3.12), and torch's pipelining
    python -m tests.gpu.pack --unpack FOLDER VENV     (there, with its interpreter) an environment of both

Everything but torch, which is there, for CUDA; it may be 2.11, so the pipelining of the torch that is here is laid over
(`tests/gpu/overlay.py`). Of the laboratory's packages only those that drills import.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from tests.compat.environment import ROOT, constraints, name_of
from tests.gpu import overlay

LIMIT_BYTES = 64 << 20
LABORATORY = ("rich", "psutil")
TESTS = ("pytest", "pytest-timeout", "hypothesis")
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    train = [each for each in extras["train"] if name_of(each) != "torch"]
    more = [each for each in (*extras["lab"], *extras["test"]) if name_of(each) in (*LABORATORY, *TESTS)]
    return [*project["dependencies"], *train, *more]


def pack(folder: Path, python: str) -> int:
    """Returns how many bytes travel."""
    wheels = folder / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    wheels.mkdir(parents=True)
    pinned = folder / "constraints.txt"
    pinned.write_text(constraints())
    pip = [sys.executable, "-m", "pip"]
    env = os.environ | {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    platforms = [f"--platform={each}" for each in PLATFORMS]
    binary = ["--only-binary=:all:", f"--python-version={python}", *platforms]
    for command in (
        [*pip, "download", "-q", "-d", wheels, "-c", pinned, *binary, *wanted()],
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT],
    ):
        subprocess.run(command, env=env, check=True)
    shutil.copytree(
        overlay.distributed() / "pipelining",
        folder / "pipelining",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def unpack(folder: Path, place: Path) -> None:
    """An environment with the packed wheels beside what this interpreter has. What is there stays, but torch's
    pipelining."""
    # This interpreter may be an environment's own: then its packages are not those of the system's.
    venv.EnvBuilder(clear=True, symlinks=True).create(place)
    python = place / "bin" / "python"
    made = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    packages = Path(made.stdout.strip())
    (packages / "beside.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n"
    )
    wheels = sorted((folder / "wheels").glob("*.whl"))
    # The interpreter's pip: the new environment has none, and needs none.
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*install, f"--target={packages}", *wheels], check=True)
    overlay.lay(folder / "pipelining", overlay.distributed())


def main(argv: list[str]) -> int:
    if argv[0] == "--unpack":
        unpack(Path(argv[1]).resolve(), Path(argv[2]).resolve())
        return 0
    size = pack(Path(argv[0]), *(argv[1:] or [PYTHON]))
    print(f"{argv[0]}: {size / 2**20:.1f} MiB of {LIMIT_BYTES >> 20} MiB that travel")
    return int(size > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

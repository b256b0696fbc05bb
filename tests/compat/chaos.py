"""`scripts/chaos`: PyPI's ckpt-chaos against our checkpoints.

It is installed into a directory of its own, which is removed again. It kills `tests.compat.chaos_trainer` at each file
event of its saves, and so finds what is not whole (HARD_FAIL), not the same (SILENT_DIVERGENCE) or older than it need
be (LOST_WORK). It sees files that are opened by `os.open`, renamed, made and removed; it tears and rolls back only
those of `open()`, of which we have none: `tests/unit/checkpoint/crashing.py` does that.
Exit codes: 0 nothing is found, and what is careless is; 1 otherwise; 3 ckpt-chaos cannot be had.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "ckpt-chaos==0.1.8"
ROOT = Path(__file__).resolve().parents[2]
POINTS_MAX = 400
LIMIT_S = 3600.0


def install(place: Path) -> str:
    """Why it cannot be had; empty: it is there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # An empty file of constraints takes the place of one that this machine's configuration may name.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    command = [*pip, "--target", str(place), PACKAGE]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600.0
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def chaos(
    place: Path, work: Path, *trainer: str, points: int = POINTS_MAX, modes: str = "before,torn,term"
) -> int:
    """Its exit code. What it says goes to stdout."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--modes", modes]
    command += [
        "--max-points",
        str(points),
        "--fail-on",
        "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL",
    ]
    command += ["--checkpoint-glob", "{out}/job/v*", "--step-regex", r"resumed from step (\d+)"]
    command += ["--result-file", "{out}/final.txt"]
    command += ["--", sys.executable, "-m", "tests.compat.chaos_trainer", "--out", "{out}", *trainer]
    environment = os.environ | {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=LIMIT_S).returncode


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="swift-chaos-") as name:
        place = Path(name)
        if why := install(place / "package"):
            print(f"skipped: {PACKAGE} cannot be installed: {why}", file=sys.stderr)
            return 3
        found = chaos(place / "package", place / "sync")
        print("\nand where training goes on meanwhile:\n", flush=True)
        found = chaos(place / "package", place / "async", "--mode", "async", modes="before") or found
        print("\nand what is careless, which is to be found out:\n", flush=True)
        careless = chaos(place / "package", place / "careless", "--careless", points=8, modes="before")
    print(
        f"\nours: {'nothing found' if found == 0 else 'FAIL'}; careless: {'found out' if careless else 'NOT FOUND OUT'}"
    )
    return 0 if found == 0 and careless == 1 else 1


if __name__ == "__main__":
    sys.exit(main())

"""Lays the pipelining of a newer torch over this interpreter's: `python -m tests.gpu.overlay FOLDER`.

swift needs the `torch.distributed.pipelining` of torch 2.12 and newer, which is Python alone. Machines with GPUs may
have torch 2.11, and no way to bring another one. FOLDER is `torch/distributed/pipelining` of the pinned torch. The
folder that was there stays beside it.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

BEFORE = "pipelining.before"
SHIMS = {
    # torch 2.11's fork_rng knows no None
    "schedules.py": ("device_type=device_type)", 'device_type=device_type or "cuda")'),
}


def lay(source: Path, distributed: Path) -> None:
    """`distributed`: the folder `torch/distributed` that gets it. Doing it again changes nothing."""
    target, before = distributed / "pipelining", distributed / BEFORE
    if before.exists():
        shutil.rmtree(target)
    else:
        target.rename(before)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in SHIMS.items():
        text = (target / name).read_text()
        if old not in text:
            raise SystemExit(f"{source / name} has no {old!r}: another version of torch?")
        (target / name).write_text(text.replace(old, new))


def distributed() -> Path:
    """This interpreter's folder `torch/distributed`. Does not import torch, which would import what is replaced."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "no torch"
    assert found.origin is not None, "no torch"
    return Path(found.origin).parent / "distributed"


if __name__ == "__main__":
    lay(Path(sys.argv[1]), distributed())

"""Prints what is on this machine, as JSON in one line; fails if something that the other parts need lacks."""

import json
import platform

import torch

from swift_ft.device import current_accelerator, facts
from swift_ft.lab.drill import run  # noqa: F401 - whatever a drill imports is here
from swift_ft.log import ring


def main() -> None:
    torch.accelerator.synchronize()  # sets it up
    assert ring.library() is not None, "ring.cpp is not compiled here: pip install -e . with a C++ compiler"
    device, about = current_accelerator(), facts()
    name = about.get("gpu", f"the {device.torch.type} device")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    nccl = [] if device.torch.type != "cuda" else list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    machine = f"{name}, {versions}, CUDA {about['cuda']}" if "cuda" in about else f"{name}, {versions}"
    print(json.dumps({"machine": machine, "nccl": nccl, **about}))


if __name__ == "__main__":
    main()

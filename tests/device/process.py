"""Runs one test in this process, which gets the simulated device: `python -m tests.device.process MODULE TEST JSON`."""

import faulthandler
import importlib
import json
import os
import sys
import traceback

import torch

from tests.device import simulated


def main(module: str, test: str, arguments: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    simulated.load()
    getattr(importlib.import_module(module), test)(**json.loads(arguments))
    if torch.get_device_module().is_initialized():
        torch.accelerator.synchronize()  # raises if a kernel has failed and nobody has noticed


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001 - it is what the test says
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # streams that stand still are no reason to stay

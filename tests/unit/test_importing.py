"""`import swift_ft`: changes nothing in the process of whoever imports it."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, logging, os, signal, sys, threading, warnings

def of_torch():
    import torch

    calls = ("get_num_threads", "get_num_interop_threads", "get_default_dtype", "is_grad_enabled", "initial_seed")
    calls += ("are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_anomaly_enabled")
    said = {name: str(getattr(torch, name)()) for name in calls}
    for backend in (torch.backends.cudnn, torch.backends.mkldnn, torch.backends.cuda.matmul):
        names = [name for name in dir(backend) if isinstance(getattr(backend, name), bool | int | str)]
        said |= {f"{backend}.{name}": getattr(backend, name) for name in names if not name.startswith("__")}
    return said | {"state": torch.get_rng_state().tolist()}

def process():
    os.umask(umask := os.umask(0))
    return {
        "environ": dict(os.environ),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "warnings": [list(map(str, warnings.filters)), warnings.showwarning, warnings.formatwarning],
        "threads": [sorted(map(str, threading.enumerate())), len(os.listdir("/proc/self/task"))],
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "atexit": atexit._ncallbacks(),
        "place": [os.getcwd(), umask, list(sys.path), list(sys.argv), list(sys.meta_path)],
        "streams": [sys.stdin, sys.stdout, sys.stderr, sorted(os.listdir("/proc/self/fd"))],
        "logging": [list(logging.root.handlers), logging.root.level, logging.getLoggerClass()],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()],
        "torch": of_torch() if "torch" in sys.argv else {},
    }

before = process()
loaded = set(sys.modules)
import swift_ft
after = process()
assert "torch" in loaded or "torch" not in sys.modules, "torch was imported"
assert "grpc" not in sys.modules, "grpc was imported"
for what in before:
    assert after[what] == before[what], f"{what}: {before[what]} became {after[what]}"
"""


@pytest.mark.parametrize("before", [[], ["torch"]])
def test_it_changes_nothing(before: list[str]) -> None:
    imports = "".join(f"import {name}\n" for name in before)
    command = [sys.executable, "-c", imports + PROGRAM, *before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")

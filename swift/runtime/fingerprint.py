"""What must be equal on all ranks for their bits to be equal.

Measured: another thread count, CPU capability, oneDNN limit or torch build gives other bits; a fresh process
with the same values gives the same ones. The coordinator compares the values at join and names what differs.
"""

import os
import platform

import torch

from swift.optim import native


def determinism_fingerprint(undo: str) -> dict[str, str]:
    """`undo`: how half-applied updates are taken back. Only an arithmetic undo's bits depend on what computes it."""
    computed = "kernels.cpp" if native.library() is not None else "torch"
    return {
        **({"undo": computed} if undo == "arithmetic" else {}),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "machine": platform.machine(),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default_dtype": str(torch.get_default_dtype()),
    }

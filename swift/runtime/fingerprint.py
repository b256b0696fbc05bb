"""What must be equal on all ranks for their bits to be equal.

Measured: another thread count, CPU capability, oneDNN limit or torch build gives other bits; a fresh process
with the same values gives the same ones. oneDNN and MKL choose their kernels by the CPU's model besides, and the C
library its `exp` and `sin`. The coordinator compares the values at join and names what differs.
"""

import os
import platform
from pathlib import Path

import torch

from swift.optim import native

# What libraries read to choose their kernels, or how exact these are.
ENVIRONMENT = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_DYNAMIC",
    "ATEN_CPU_CAPABILITY",
    "GLIBC_TUNABLES",
)
_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping")
# ARM's.
_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")


def determinism_fingerprint(undo: str) -> dict[str, str]:
    """`undo`: how half-applied updates are taken back. Only an arithmetic undo's bits depend on what computes it."""
    computed = "kernels.cpp" if native.library() is not None else "torch"
    return {
        **({"undo": computed} if undo == "arithmetic" else {}),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": cpu_model(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "onednn": str(torch.backends.mkldnn.enabled),
        "default_dtype": str(torch.get_default_dtype()),
        **{name.lower(): os.environ.get(name, "") for name in ENVIRONMENT},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Vendor, family, model and stepping of the CPUs here; more than one if they are not all alike."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or "unknown"
    models: set[str] = set()
    for cpu in text.split("\n\n"):
        fields = {name.strip(): value.strip() for name, _, value in map(_halves, cpu.splitlines())}
        words = [fields[name] for name in (*_MODEL, *_ARM) if name in fields]
        if words:
            models.add(" ".join(words))
    return "; ".join(sorted(models)) or "unknown"


def _halves(line: str) -> tuple[str, str, str]:
    return line.partition(":")

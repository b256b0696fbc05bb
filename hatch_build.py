"""Compiles swift/optim/kernels.cpp where there is a C++ compiler; without one everything works, undo slower."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    # Bits must not depend on the loop in which a formula stands: nothing is fused or reordered.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
LEVELS = {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
"""By what torch calls the CPU's capability. Elsewhere: one library, named `default`."""


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """(hatchling) called before a wheel, also an editable one, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        compiler = shlex.split(os.environ.get("CXX", "")) or [
            shutil.which("g++") or shutil.which("clang++") or ""
        ]
        source = Path(self.root) / "swift" / "optim" / "kernels.cpp"
        # The library says what it was made from: native.py takes no other version's.
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        levels = LEVELS if platform.machine() == "x86_64" else {"default": []}
        for name, flags in levels.items():
            target = source.with_name(f"_kernels_{name}.so")
            made = target.with_suffix(".new")
            command = [*compiler, *FLAGS, *flags, f'-DSWIFT_SOURCE="{digest}"', str(source), "-o", str(made)]
            reason = _compile(command) if compiler[0] else "no C++ compiler was found"
            if reason:
                self.app.display_warning(f"swift/optim/kernels.cpp for {name} is left out: {reason}")
                made.unlink(missing_ok=True)
                target.unlink(missing_ok=True)
                continue
            made.replace(target)  # processes that have loaded the old one keep it
            build_data["artifacts"].append(f"swift/optim/{target.name}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def _compile(command: list[str]) -> str:
    """Why it failed, in one line; empty if it did not."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (
        ""
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
    )

"""Compiles swift/optim/kernels.cpp where there is a C++ compiler; without one everything works, undo slower."""

import os
import platform
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
        folder = Path(self.root) / "swift" / "optim"
        for old in folder.glob("_kernels_*.so"):
            old.unlink()
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if self.target_name != "wheel" or not sys.platform.startswith("linux") or compiler is None:
            return
        levels = LEVELS if platform.machine() == "x86_64" else {"default": []}
        for name, flags in levels.items():
            target = folder / f"_kernels_{name}.so"
            command = [compiler, *FLAGS, *flags, str(folder / "kernels.cpp"), "-o", str(target)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
                self.app.display_warning(f"swift/optim/kernels.cpp for {name} is left out: {reason}")
                target.unlink(missing_ok=True)
                continue
            build_data["artifacts"].append(f"swift/optim/{target.name}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

"""Compiles swift/swift_ft/state/kernels.cpp and swift/swift_ft/log/ring.cpp where there is a C++ compiler.

Without one everything works: undo takes copies, and the trainer's thread copies what is logged.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"]
KERNEL_FLAGS = [
    # Bits must not depend on the loop in which a formula stands: nothing is fused or reordered.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
LEVELS = {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
"""By what torch calls the CPU's capability. Elsewhere: one library, named `default`."""


class Native(BuildHookInterface):  # type: ignore[type-arg]
    """(hatchling) called before a wheel, also an editable one, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        compiler = shlex.split(os.environ.get("CXX", "")) or [
            shutil.which("g++") or shutil.which("clang++") or ""
        ]
        levels = LEVELS if platform.machine() == "x86_64" else {"default": []}
        for name, flags in levels.items():
            self._build(
                compiler,
                "swift/swift_ft/state/kernels.cpp",
                f"_kernels_{name}.so",
                KERNEL_FLAGS + flags,
                build_data,
            )
        self._build(compiler, "swift/swift_ft/log/ring.cpp", "_ring.so", [], build_data)

    def _build(
        self, compiler: list[str], path: str, name: str, flags: list[str], build_data: dict[str, Any]
    ) -> None:
        source = Path(self.root) / path
        target = source.with_name(name)
        made = target.with_suffix(".new")
        # The library says what it was made from: who loads it takes no other version's.
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        command = [*compiler, *FLAGS, *flags, f'-DSWIFT_SOURCE="{digest}"', str(source), "-o", str(made)]
        reason = _compile(command) if compiler[0] else "no C++ compiler was found"
        if reason:
            self.app.display_warning(f"{path} for {name} is left out: {reason}")
            made.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            return
        made.replace(target)  # processes that have loaded the old one keep it
        build_data["artifacts"].append(str(target.relative_to(self.root)))
        build_data["pure_python"] = False
        # They are loaded by ctypes: one wheel is for every Python.
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"


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

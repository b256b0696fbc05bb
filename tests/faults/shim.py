"""The test's side of shim.c: builds it, and sets its rules while the process runs that it is loaded into."""

import ctypes
import errno
import mmap
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import eventually

SOURCE = Path(__file__).with_name("shim.c")
TIMEOUT_S = 20.0

WRITE, SYNC, OPEN, ALLOCATE, RENAME, RANGE, TRUNCATE, THREAD = (1 << bit for bit in range(8))
OFF, FAIL, STOP, STOP_AFTER, SHORT, TORN, HOLD, COUNT = range(8)

RULES = 8
RECORDS = ".seg"
"""Words in the paths of the files that hold records."""


class _Rule(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("skip", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("hits", ctypes.c_int32),
        ("amount", ctypes.c_int64),
        ("path", ctypes.c_char * 96),
    )


class _Control(ctypes.Structure):
    _fields_ = (
        ("clock_offset_s", ctypes.c_int64),
        ("unused", ctypes.c_char * 120),
        ("rules", _Rule * RULES),
    )


def build(directory: Path) -> Path:
    """The library. Skips the test where no C compiler is."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: gcc makes the library that injects the fault")
    library = directory / "shim.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return library


class Rule:
    """One rule that is in force."""

    def __init__(self, raw: _Rule) -> None:
        self._raw = raw

    @property
    def hits(self) -> int:
        """How many calls it was applied to."""
        return int(self._raw.hits)

    def wait(self, hits: int = 1) -> None:
        eventually(lambda: self.hits >= hits, f"{hits} calls under the rule")

    def clear(self) -> None:
        self._raw.action = OFF


class Faults:
    """The rules and the clock of every process that is started with ``env``."""

    def __init__(self, library: Path, path: Path) -> None:
        path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._map)
        self._used = 0
        self.env = {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(path)}

    def rule(
        self,
        calls: int,
        path: str,
        action: int,
        *,
        error: int = errno.EIO,
        skip: int = 0,
        limit: int = 0,
        amount: int = 0,
    ) -> Rule:
        """From now on. An earlier rule comes before a later one."""
        assert self._used < RULES, "all rules are taken"
        raw = self._control.rules[self._used]
        self._used += 1
        raw.calls, raw.error, raw.skip, raw.limit, raw.amount = calls, error, skip, limit, amount
        raw.path = path.encode()
        raw.action = action  # last: the rule is in force with it
        return Rule(raw)

    def set_clock_offset(self, seconds: int) -> None:
        self._control.clock_offset_s = seconds

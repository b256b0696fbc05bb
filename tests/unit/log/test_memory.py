"""Memory that is kept while messages of megabytes come, and given back afterwards."""

import subprocess
import sys

CODE = """
import ctypes
from swift_ft.log.memory import freed_memory_kept

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info

def mapped() -> int:
    before = info().hblks
    body = bytes(40 << 20)
    return info().hblks - before

found = [mapped()]
with freed_memory_kept():
    found.append(mapped())
    bytes(40 << 20)
    kept = info().arena
found += [mapped(), kept >= 40 << 20, info().arena < 40 << 20]
print(found)
"""


def test_freed_memory_is_kept_for_a_while() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[1, 0, 1, True, True]"

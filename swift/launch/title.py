"""What `ps` and `top` call a process: a rank that was forked would else have the fork server's command line."""

import contextlib
import ctypes
from pathlib import Path

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 48 - 3, 49 - 3
"""Fields of /proc/self/stat (proc(5) counts from 1), in what follows the name in brackets."""


def set_title(short: str, title: str) -> None:
    """(main thread) `short`: at most 15 characters, for `top`, or empty: as it is; `title`: in the place of the command
    line, as much of it as fits. Nothing where the system has no such thing: nobody depends on it."""
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        if short:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode()[:15], 0, 0, 0)
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if 0 < begin < end:  # the words this process was started with, which nobody reads any more
            words = title.encode()[: end - begin - 1]
            ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)

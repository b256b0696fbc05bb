"""Writing to files: much at once, and so that the disk works while memory is copied."""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from swift.log.frame import Bytes

_IOV_MAX = 512
_PIECE_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, parts: Sequence[Bytes], offset: int) -> int:
    """Writes all parts at ``offset``; gives the offset behind them."""
    views = [
        memoryview(part)[i : i + _PIECE_BYTES] for part in parts for i in range(0, len(part), _PIECE_BYTES)
    ]
    at = 0
    while at < len(views):
        written = os.pwritev(fd, views[at : at + _run_of(views, at)], offset)
        if written >= _PIECE_BYTES:
            _start_writing_back(fd, offset, written)
        offset += written
        while at < len(views) and written >= len(views[at]):
            written -= len(views[at])
            at += 1
        if written:
            views[at] = views[at][written:]
    return offset


def _run_of(views: Sequence[memoryview], at: int) -> int:
    """How many of these, from the first on, are written at once."""
    size = count = 0
    while at + count < len(views) and count < _IOV_MAX and size < _PIECE_BYTES:
        size += len(views[at + count])
        count += 1
    return count


def _start_writing_back(fd: int, offset: int, size: int) -> None:
    """The disk works on this while the next piece is copied to the kernel. Promises nothing; fdatasync does."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)

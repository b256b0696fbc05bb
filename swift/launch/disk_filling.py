"""A file system that is full, without harm: only a small one that stands for itself is ever filled.

``fill=DIR``: DIR lies on a file system of its own, mounted there or above it, of at most `BYTES_MAX`: a tmpfs, or a
loop device. Everything else is refused before anything is started, the machine's own disk first of all.
"""

import contextlib
import errno
import os
from pathlib import Path

from swift.errors import UsageError

BYTES_MAX = 1 << 30
FILE = "swift-ft-failures.fill"
_CHUNK_BYTES = 1 << 20
_NOT_THERE = ("/", "/home", "/tmp", "/var", "/var/tmp", "/root", "/usr")


def check(directory: str, flag: str) -> None:
    """Raises UsageError, in one line, if it must not be filled."""
    path = Path(directory)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(f"{flag} fill={directory}: name a directory that is there and can be written")
    device = path.stat().st_dev
    theirs = {os.stat(place).st_dev for place in _NOT_THERE if os.path.isdir(place)}
    space = os.statvfs(path)
    size = space.f_blocks * space.f_frsize
    if device in theirs or not 0 < size <= BYTES_MAX:
        raise UsageError(
            f"{flag} fill={directory}: it is not on a file system of its own of at most {BYTES_MAX >> 20} MiB, and no "
            f"other one is filled: mount one there (mount -t tmpfs -o size=64m tmpfs {directory})"
        )


def fill(directory: str) -> int:
    """Takes all space that is left; how many bytes. OSError: for another reason than that there is none left."""
    taken, chunk = 0, _CHUNK_BYTES
    descriptor = os.open(Path(directory, FILE), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        while chunk:
            try:
                os.posix_fallocate(descriptor, taken, chunk)
                taken += chunk
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                chunk //= 2
    except BaseException:
        free(directory)
        raise
    finally:
        os.close(descriptor)
    return taken


def free(directory: str) -> None:
    """Gives the space back."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(Path(directory, FILE))

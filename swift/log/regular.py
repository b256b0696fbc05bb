"""Opening files of a directory in which somebody else may have put something: only regular files, never by a link."""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor. Never waits, as opening a pipe or a device would. OSError: ELOOP for a link, EISDIR for a
    directory, ENXIO for whatever else is no regular file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "Not a regular file", str(path))


def read_regular(path: Path, size_max: int) -> bytes:
    """What is in it; one byte more than that if it is larger. OSError."""
    fd = open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(size_max + 1)

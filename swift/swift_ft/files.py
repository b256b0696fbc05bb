"""Opening files that somebody else may have put there, and making files that are nobody else's business.

What swift makes has mode 0600, in directories of mode 0700, whatever the umask is: logs, checkpoints, traces, evidence,
output of ranks. Two kinds of files are for others too. What a command was asked to write as its result (``--json``,
``--svg``, a trace in CSV) has the mode that the umask gives. Addresses, certificates and public keys have 0644.
"""

import errno
import os
import stat
from pathlib import Path

from swift_ft.errors import UsageError

GIVEN_BYTES_MAX = 16 << 20
"""Of a file that a user names. As objects its content takes up to twenty times as much."""


def open_regular(path: str | Path, flags: int, mode: int = 0o600, inside: int | None = None) -> int:
    """A descriptor. Never waits, as opening a pipe or a device would. OSError: ELOOP for a link, EISDIR for a
    directory, ENXIO for whatever else is no regular file. `inside`: the directory (a descriptor) of a relative path."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=inside)
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


def read_given(path: Path, where: str) -> bytes:
    """What is in a file that the user has named; a link is followed. UsageError, which begins with `where`."""
    try:
        content = read_regular(Path(os.path.realpath(path)), GIVEN_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; name a file that can be read") from None
    except ValueError:  # a NUL in its name
        raise UsageError(f"{where}: no file can have this name") from None
    if len(content) > GIVEN_BYTES_MAX:
        raise UsageError(f"{where}: has more than {GIVEN_BYTES_MAX >> 20} MiB; give a smaller file")
    return content


def private(path: str, flags: int) -> int:
    """The `opener` of a file that is its owner's alone: ``open(path, "w", opener=private)``."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_directory(path: Path) -> list[Path]:
    """Unless it is there, with what is missing above it. All that was made is its owner's alone; gives it, the lowest
    first. OSError."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return missing


def write_whole(
    path: Path, data: str | bytes, mode: int | None = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """The file appears whole or not at all, and is never wider than `mode` (None: as the umask says) nor of another
    owner. A link is replaced, not followed. OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # of a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(aside, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)
            file.write(data.encode() if isinstance(data, str) else data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise

"""Safe opening of files that others may have replaced, and creation of files that only their owner can read.

Files of swift have mode 0600, in directories of mode 0700, whatever the umask is: logs, checkpoints, traces, evidence,
output of ranks. There are two exceptions. A command's requested result (``--json``, a page, a trace in CSV) has the
mode that the umask gives. Addresses, certificates and public keys have 0644.
"""

import errno
import os
import stat
from pathlib import Path

from swift_ft.errors import UsageError

GIVEN_BYTES_MAX = 16 << 20
"""Maximum size of a file that a user names. Parsed into objects its content takes up to twenty times as much."""


def open_regular(path: str | Path, flags: int, mode: int = 0o600, inside: int | None = None) -> int:
    """Opens a regular file and returns a descriptor. Never blocks, as opening a pipe or a device would. Raises OSError:
    ELOOP for a link, EISDIR for a directory, ENXIO for other kinds. `inside`: the directory (a descriptor) of a
    relative path."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=inside)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "Not a regular file", str(path))


def read_regular(path: Path, size_max: int) -> bytes:
    """Returns the content, or its first `size_max` + 1 bytes if it is larger. Raises OSError."""
    fd = open_regular(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(size_max + 1)


def read_given(path: Path, where: str) -> bytes:
    """Returns the content of a file that the user has named; links are followed. Raises UsageError, which begins with
    `where`."""
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
    """Opens a file with mode 0600; an `opener` for ``open(path, "w", opener=private)``."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def make_directory(path: Path, *, durable: bool = False) -> None:
    """Creates a directory and its missing parents with mode 0700. `durable`: they outlast a power cut. Raises
    OSError."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        if durable:
            sync_directory(directory.parent)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(
    path: Path,
    data: str | bytes,
    mode: int | None = 0o600,
    owner: tuple[int, int] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Writes a file atomically. Its mode is never wider than `mode` (None: as the umask says), its owner never another
    one. A link is replaced, not followed. `durable`: a power cut leaves the file as it was, or whole. Raises
    OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # left by a killed process
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(aside, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(fd)
        aside.replace(path)
        if durable:
            sync_directory(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise

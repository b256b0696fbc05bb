"""Secrets in files: made for their owner alone, and refused if others can read them."""

import os
import stat
from pathlib import Path

from swift.errors import UsageError

_BYTES_MAX = 1 << 20


def read_file(path: Path, flag: str) -> bytes:
    """What is in a file that need not be secret. UsageError names the flag or variable it came from."""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def read_secret(path: Path, flag: str) -> bytes:
    """What is in a file that only its owner may read. UsageError if others may."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise UsageError(f"{flag} {path}: others than its owner have access to it: chmod 600 {path}")
            return file.read(_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def write_file(path: Path, data: bytes, *, secret: bool) -> None:
    """Whole or not at all; a secret one is never there with a wider mode than 0600."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    mode = 0o600 if secret else 0o644
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)
    aside.replace(path)


Signature = tuple[tuple[str, int, int, int], ...]


def signature(paths: "list[Path]") -> Signature:
    """Changes whenever one of the files is written, replaced or removed."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path), status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)

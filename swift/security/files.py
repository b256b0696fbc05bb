"""Secrets in files: made for their owner alone, and refused if others can read them."""

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
                raise UsageError(f"{flag} {path}: users other than its owner can access it: chmod 600 {path}")
            return file.read(_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a file is to be."""

    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """Of USER or USER:GROUP, names or numbers; without a group the user's own. UsageError: there is no such user
        or group, or this process may not give files away."""
        user, colon, group = text.partition(":")
        try:
            account = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
            gid = account.pw_gid
            if colon:
                gid = (grp.getgrgid(int(group)) if group.isdecimal() else grp.getgrnam(group)).gr_gid
        except (KeyError, OverflowError):
            raise UsageError(f"{flag} {text}: there is no such user or group here") from None
        if os.geteuid() != 0 and (
            account.pw_uid != os.geteuid() or gid not in {os.getegid(), *os.getgroups()}
        ):
            raise UsageError(
                f"{flag} {text}: only root can give files to others; run it as root, or leave it out"
            )
        return cls(account.pw_uid, gid)


def write_file(path: Path, data: bytes, *, secret: bool, owner: Owner | None = None) -> None:
    """Whole or not at all; a secret one is never there with a wider mode than 0600, nor of another owner. A link is
    replaced, not followed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    mode = 0o600 if secret else 0o644
    aside.unlink(missing_ok=True)  # of a process that was killed
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        if owner is not None:
            os.fchown(fd, owner.uid, owner.gid)
        file.write(data)
    aside.replace(path)


Signature = tuple[tuple[str, int, int, int], ...]


def signature(paths: "list[Path]") -> Signature:
    """Changes whenever one of the files is written, replaced or removed."""
    parts = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        parts.append((str(path), status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(parts)

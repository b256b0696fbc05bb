"""A log server's directory, for the server and for other processes: its lock, its jobs, and tombstones.

::

    DIRECTORY/.lock               held by the one server of this directory
    DIRECTORY/.reserve            space released when the disk is full, so that a trim can be recorded
    DIRECTORY/.dropped-<job>-…    tombstone: a dropped job, until its files and objects are removed
    DIRECTORY/.granted-<job>      uid of the job of that name, and its last generation
    DIRECTORY/.acked              acknowledged sequence of each stream
    DIRECTORY/<job>/.manifest     generation, trim, and the minimum that each stream must hold
    DIRECTORY/<job>/<stream>/<first sequence>.seg, or .cold: stub of a segment that was moved to an object store
    DIRECTORY/.cold               URL of that store
"""

import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import crc32c

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import open_regular, read_regular, sync_directory
from swift_ft.log.manifest import (
    GRANTED,
    GRANTED_BYTES_MAX,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    UID_BYTES,
    Granted,
    JobMeta,
    ManifestDamaged,
    decode_granted,
    decode_manifest,
    problem_of,
)
from swift_ft.log.record import NAME_PATTERN, check_name
from swift_ft.log.segment import COLD_SUFFIX, SEQUENCE_MAX, SUFFIX, URL_BYTES_MAX

# Format of `.acked`, the acknowledged sequence of each stream (docs/format.md). Only the server writes the file.
#
# One place of 64 bytes per stream::
#
#      0 16  uid of the job       24  8  records of lower sequences were acknowledged
#     16  8  stream tag           32  4  crc32c of 0..32            36 28  zero

NAME = ".acked"
_PLACE = struct.Struct("<16sQQI28s")
_HEAD = struct.Struct("<16sQQ")
PLACE_BYTES = _PLACE.size
_BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 20
FREE = bytes(PLACE_BYTES)
NOTHING: Mapping["Of", int] = MappingProxyType({})

assert _HEAD.size == UID_BYTES + 16

Of = tuple[bytes, int]
"""A job's uid and a stream's tag."""


def encode_place(of: Of, sequence: int) -> bytes:
    head = _HEAD.pack(*of, sequence)
    return (head + struct.pack("<I", crc32c.crc32c(head))).ljust(PLACE_BYTES, b"\0")


def places(size: int, read: Callable[[int, int], bytes]) -> Iterator[tuple[int, Of, int]]:
    """Yields (number, of, sequence) of the valid places. ``read(offset, size)`` reads from a file of that size."""
    size = min(size, _BYTES_MAX) // PLACE_BYTES * PLACE_BYTES
    for offset in range(0, size, _CHUNK_BYTES):
        chunk = read(offset, min(_CHUNK_BYTES, size - offset))
        if chunk.count(0) == len(chunk):
            continue  # fast path: a file may be large and mostly zeros
        for at in range(0, len(chunk) - PLACE_BYTES + 1, PLACE_BYTES):
            place = chunk[at : at + PLACE_BYTES]
            if place == FREE:
                continue
            uid, tag, sequence, crc, _ = _PLACE.unpack(place)
            if crc32c.crc32c(place[: _HEAD.size]) == crc and sequence <= SEQUENCE_MAX:
                yield (offset + at) // PLACE_BYTES, (uid, tag), sequence


def read_acked(directory: Path) -> Mapping[Of, int]:
    """Returns the acknowledged sequences of a server's directory; empty without the file. Raises OSError if it is not
    a regular file."""
    try:
        fd = open_regular(directory / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return NOTHING
    try:
        size = os.fstat(fd).st_size
        return {of: sequence for _, of, sequence in places(size, lambda at, count: os.pread(fd, count, at))}
    finally:
        os.close(fd)


LIVES_S = 60.0
"""Seconds since its last use within which a job counts as alive: it is dropped only by force."""
LOCK = ".lock"
RESERVE = ".reserve"
DROPPED = ".dropped-"
_GRAVE = re.compile(rf"{re.escape(DROPPED)}{NAME_PATTERN.pattern}-[0-9a-f]{{12}}")
_FIRST = "[0-9]" * 20
SEGMENTS = f"{_FIRST}{SUFFIX}"
"""Glob pattern of a stream's segment files."""


def sub_directories(path: Path) -> list[str]:
    """Returns the names of a directory's jobs, or of a job's streams, sorted."""
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def in_the_way(path: Path) -> list[str]:
    """Returns the names, sorted, of entries that are named like a job or stream but are not directories."""
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if NAME_PATTERN.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
        )


def check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise UsageError(f"directory {directory} cannot be read; be its owner, or give another")
    if not (directory / LOCK).exists():
        raise UsageError(f"{directory} is not the directory of a log server: it has no {LOCK}")


def check_job(directory: Path, job: str) -> None:
    """Raises UsageError if the directory has no such job; the message lists its jobs."""
    check_name("job", job)
    jobs = sub_directories(directory)
    if job not in jobs:
        raise UsageError(f"there is no job {job} in {directory}; there are: {', '.join(jobs) or 'none'}")


def segment_paths(directory: Path, job: str, stream: str) -> list[Path]:
    """Returns the segments and, of those that were moved, the stubs, in order."""
    folder = directory / job / stream
    # A kill may leave a stub beside its segment, which counts.
    found = {path.stem: path for suffix in (COLD_SUFFIX, SUFFIX) for path in folder.glob(f"{_FIRST}{suffix}")}
    return [found[first] for first in sorted(found)]


def cold_url(directory: Path) -> str:
    """Returns the URL of the store that has moved segments; empty if there is none. Raises OSError."""
    try:
        return read_regular(directory / COLD_SUFFIX, URL_BYTES_MAX).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def load_manifest(directory: Path, job: str) -> JobMeta:
    """Returns the job's manifest; an empty one if the job has neither manifest nor segments. Raises ServiceError if it
    is damaged, not the job's own, or missing although there are segments."""
    path = directory / job / MANIFEST
    try:
        meta = decode_manifest(read_regular(path, MANIFEST_BYTES_MAX))
        problem = problem_of(job, meta, _granted(directory, job))
    except FileNotFoundError:
        if any((directory / job).glob(f"*/{_FIRST}.*")):
            raise ServiceError(
                f"{path} is missing: the granted generation of job {job} is unknown; "
                "restore it, or drop the job (--drop-job)"
            ) from None
        return JobMeta()
    except (ManifestDamaged, OSError) as error:
        raise ServiceError(f"{path} is damaged ({error}); restore it, or drop the job (--drop-job)") from None
    if problem:
        raise ServiceError(
            f"{path} is not to be believed ({problem}); restore it, or drop the job (--drop-job)"
        )
    return meta


def _granted(directory: Path, job: str) -> Granted | None:
    try:
        return decode_granted(read_regular(directory / f"{GRANTED}{job}", GRANTED_BYTES_MAX))
    except FileNotFoundError:
        return None


def free_bytes(directory: Path) -> int | None:
    """Returns the bytes that a server of this user may still write there; None if unknown."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return None
    return there.f_bavail * there.f_frsize


def age_s(directory: Path, job: str) -> float | None:
    """Returns the seconds since the last write to the job's files, by the wall clock. None if the job is missing."""
    newest = 0.0
    folder = directory / job
    try:
        paths = [folder, *folder.glob("*"), *folder.glob("*/*"), folder / MANIFEST]
    except FileNotFoundError:  # the job was dropped meanwhile
        return None
    for path in paths:
        try:
            newest = max(newest, path.lstat().st_mtime)
        except FileNotFoundError:
            continue  # removed meanwhile
    return time.time() - newest if newest else None


def grave_of(directory: Path, job: str) -> Path:
    """Returns a new tombstone path for a dropped job. No job can have its name."""
    return directory / f"{DROPPED}{job}-{os.urandom(6).hex()}"


def is_grave(name: str) -> bool:
    return _GRAVE.fullmatch(name) is not None


def forget_job(directory: Path, job: str) -> Path:
    """(the directory's owner) Renames the job to a tombstone, durably. Returns the tombstone, to be removed."""
    grave = grave_of(directory, job)
    os.rename(directory / job, grave)
    (directory / f"{GRANTED}{job}").unlink(missing_ok=True)
    sync_directory(directory)
    return grave


def remove_forgotten(directory: Path) -> None:
    """(the directory's owner) Removes all tombstones and releases their space. If there is an object store, manifests
    stay: by them the next server removes the objects."""
    for grave in directory.glob(f"{DROPPED}*"):
        if is_grave(grave.name) and grave.is_dir() and not grave.is_symlink():
            for stream in sub_directories(grave):
                shutil.rmtree(grave / stream)
            if not (directory / COLD_SUFFIX).exists():
                shutil.rmtree(grave)


def server_runs(directory: Path) -> bool | None:
    """Returns whether a log server runs on the directory; None if the system does not show locks. Reads /proc/locks,
    because trying the lock could prevent a server from starting."""
    try:
        lock = os.stat(directory / LOCK)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    here = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    return any(words[1] == "FLOCK" for words in map(str.split, locks) if len(words) > 5 and here in words)


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Holds the directory's lock, as a server would. Raises ServiceError if a server holds it."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ServiceError(
            f"a log server runs on {directory}: ask it (--server HOST:PORT), or stop it first"
        ) from None
    finally:
        os.close(fd)

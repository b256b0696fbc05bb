"""Where records rest. `Storage` is the seam; `DirectoryStorage` keeps segment files in one directory.

::

    DIRECTORY/.lock               held by the one server of this directory
    DIRECTORY/.reserve            space given back when the disk is full, so that a trim can be recorded
    DIRECTORY/<job>/.manifest     generation, trim, and the least that each stream must hold
    DIRECTORY/<job>/<stream>/<first sequence>.seg

Order of effects, so that a kill at any point loses nothing acknowledged: a segment is sealed before its
successor is made; a new file's directory entry is synced before the first record in it is acknowledged; the
manifest says what is dropped before files are unlinked; a manifest is written aside, synced, renamed, and its
directory synced.
"""

import errno
import fcntl
import json
import os
import threading
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import crc32c

from services.logserver.core import STEP_UNKNOWN, Entry, Hole
from services.logserver.disk import sync_directory, write_all
from swift.errors import ServiceError, UsageError
from swift.log.frame import Bytes
from swift.log.record import NAME_PATTERN
from swift.log.segment import (
    SEGMENT_HEADER_BYTES,
    SUFFIX,
    Ending,
    SegmentHeader,
    SegmentScan,
    encode_footer,
    encode_segment_header,
    segment_name,
    walk,
)

MANIFEST = ".manifest"
LOCK = ".lock"
RESERVE = ".reserve"
RESERVE_BYTES = 1 << 20
_MANIFEST_MAGIC = "swift-log-manifest 1"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StorageFull(ServiceError):
    """No space. Everything is back on the last record boundary; reads and trims still work."""


class StorageFailed(ServiceError):
    """A write or a sync failed for another reason. It is not tried again: what was written is unknown."""


@dataclass(frozen=True, slots=True)
class Write:
    """One accepted frame on its way to the disk."""

    job: str
    stream: str
    sequence: int
    frame: Bytes


@dataclass(slots=True)
class StreamMeta:
    """What the manifest knows of a stream."""

    first: int = 0
    """Sequences below are dropped."""
    next_at_least: int = 0
    """So many sequences were durable when this was written; fewer on disk means that some are gone."""
    quarantined: str = ""


@dataclass(slots=True)
class JobMeta:
    """What must survive with a job besides its records."""

    generation: int = 0
    trimmed_below_step: int = 0
    streams: dict[str, StreamMeta] = field(default_factory=dict)


@dataclass(slots=True)
class RecoveredStream:
    name: str
    first: int
    next_sequence: int
    entries: list[Entry]
    holes: list[Hole]
    quarantined: str = ""
    torn_bytes: int = 0


@dataclass(slots=True)
class RecoveredJob:
    name: str
    meta: JobMeta
    streams: list[RecoveredStream]


class Storage(Protocol):
    """Keeps frames and manifests. Raises StorageFull or StorageFailed. One caller writes; any may read."""

    def commit(self, writes: Sequence[Write], sync: bool) -> None:
        """Writes frames, in order; with ``sync`` all that was ever committed is durable after it."""

    def read(self, job: str, stream: str, sequence: int, frame_bytes: int) -> bytes:
        """The frame as it was written. FileNotFoundError if it was removed."""

    def save(self, job: str, meta: JobMeta) -> None:
        """Makes this the job's manifest, durably."""

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Gives back space of sequences below; the manifest says already that they are dropped."""

    def close(self) -> None:
        """Seals and closes everything."""


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    size: int
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))  # 0: damaged
    fd: int = -1  # open for writing if it is the last one and not sealed
    dirty: bool = False

    @property
    def next_sequence(self) -> int:
        return self.first + len(self.offsets)


class DirectoryStorage:
    """Segment files under one directory, which it holds alone."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """Takes the directory. UsageError: it cannot be used; ServiceError: another server holds it."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._streams: dict[tuple[str, str], list[_Segment]] = {}
        self._maps = threading.Lock()  # guards the lists; held for moments
        self._writing = threading.RLock()  # one commit, roll or removal at a time
        self._lock_fd = self._take(directory)

    @staticmethod
    def _take(directory: Path) -> int:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            os.listdir(directory)
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot use directory {directory}: {error.strerror}; give one that can be read and written"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ServiceError(
                f"directory {directory} is in use by another log server; stop it or give another directory"
            ) from None
        return fd

    # -- start ----------------------------------------------------------------------------------------

    def recover(self) -> list[RecoveredJob]:
        """Once, at the start: what is there. Cuts torn tails, finishes removals that were interrupted."""
        try:
            self._reserve()
            jobs = [
                self._recover_job(entry.name)
                for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name)
                if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
        except OSError as error:
            raise UsageError(f"cannot read directory {self.directory}: {error}") from None
        return jobs

    def _reserve(self) -> None:
        path = self.directory / RESERVE
        try:
            with open(path, "r+b" if path.exists() else "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            path.unlink(missing_ok=True)

    def _recover_job(self, job: str) -> RecoveredJob:
        meta = self._load_manifest(job)
        found = {
            entry.name
            for entry in os.scandir(self.directory / job)
            if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        }
        names = sorted(found | set(meta.streams))
        streams = [
            self._recover_stream(job, name, meta.streams.get(name, StreamMeta()), meta.trimmed_below_step)
            for name in names
        ]
        return RecoveredJob(job, meta, streams)

    def _load_manifest(self, job: str) -> JobMeta:
        path = self.directory / job / MANIFEST
        try:
            head, _, body = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            if any((self.directory / job).glob(f"*/*{SUFFIX}")):
                raise ServiceError(
                    f"{path} is missing: the granted generation of job {job} is unknown; "
                    "restore it, or move the job's directory away"
                ) from None
            return JobMeta()
        if head.decode(errors="replace") != f"{_MANIFEST_MAGIC} {crc32c.crc32c(body):08x}":
            raise ServiceError(f"{path} is damaged; restore it, or move the job's directory away")
        fields = json.loads(body)
        streams = {name: StreamMeta(**stream) for name, stream in fields.pop("streams").items()}
        return JobMeta(streams=streams, **fields)

    def _recover_stream(self, job: str, name: str, meta: StreamMeta, trimmed: int) -> RecoveredStream:
        folder = self.directory / job / name
        paths = sorted(folder.glob(f"{'[0-9]' * 20}{SUFFIX}"))
        out = RecoveredStream(name, meta.first, meta.first, [], [], meta.quarantined)
        segments: list[_Segment] = []
        for index, path in enumerate(paths):
            scanned = walk(path, verify_bodies=False, last=index == len(paths) - 1)
            if scanned.torn_bytes:
                out.torn_bytes += scanned.torn_bytes
            if scanned.header is None and not scanned.damage:
                path.unlink()
                sync_directory(folder)
                continue
            segments.append(self._take_segment(scanned, out, trimmed, meta.first))
        if out.next_sequence < meta.next_at_least:
            reason = f"records {out.next_sequence} to {meta.next_at_least - 1} were durable and are gone"
            self._hole(out, out.next_sequence, meta.next_at_least, reason)
        self._streams[job, name] = segments
        self.remove(job, name, meta.first)
        return out

    def _take_segment(self, scanned: SegmentScan, out: RecoveredStream, trimmed: int, first: int) -> _Segment:
        begin = int(scanned.path.name.removesuffix(SUFFIX))
        if begin > out.next_sequence:
            reason = f"records {out.next_sequence} to {begin - 1} are gone"
            self._hole(out, out.next_sequence, begin, reason)
        segment = _Segment(scanned.path, begin, scanned.end)
        for damage in scanned.damage:
            end = damage.end_sequence if damage.end_sequence is not None else damage.sequence + 1
            if end > first:
                out.holes.append(Hole(damage.sequence, end, STEP_UNKNOWN, damage.reason))
        for record in scanned.records:
            header = record.header
            segment.offsets.extend([0] * (header.sequence - segment.next_sequence))
            segment.offsets.append(record.offset)
            for index, hole in enumerate(out.holes):
                if hole.below_step == STEP_UNKNOWN and hole.sequence <= header.sequence:
                    out.holes[index] = Hole(
                        hole.sequence, hole.end_sequence, header.key.step + 1, hole.reason
                    )
            if header.sequence >= first and header.key.step >= trimmed:
                out.entries.append(
                    Entry(header.sequence, header.key, header.digest, header.generation, header.frame_bytes)
                )
        ends = [hole.end_sequence for hole in out.holes]
        out.next_sequence = max(out.next_sequence, segment.next_sequence, *ends)
        if scanned.ending is Ending.SEALED or scanned.damage:
            return segment
        segment.fd = os.open(scanned.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if scanned.torn_bytes:
            os.ftruncate(segment.fd, scanned.end)
        os.fdatasync(segment.fd)
        return segment

    @staticmethod
    def _hole(out: RecoveredStream, begin: int, end: int, reason: str) -> None:
        if end > out.first:
            out.holes.append(Hole(begin, end, STEP_UNKNOWN, reason))
        out.next_sequence = end

    # -- writing --------------------------------------------------------------------------------------

    def commit(self, writes: Sequence[Write], sync: bool) -> None:
        groups: dict[tuple[str, str], list[Write]] = {}
        for write in writes:
            groups.setdefault((write.job, write.stream), []).append(write)
        with self._writing:
            before: list[tuple[_Segment, int]] = []
            try:
                placed = []
                for stream, group in groups.items():
                    segment = self._segment_for(stream, group[0].sequence)
                    before.append((segment, segment.size))
                    placed.append((segment, group, _write_frames(segment, group)))
            except OSError as error:
                for segment, size in before:
                    segment.size = size
                    os.ftruncate(segment.fd, size)
                raise _as_storage_error(error) from None
            if sync:
                self._sync()
            with self._maps:
                for segment, _, offsets in placed:
                    segment.offsets.extend(offsets)

    def _sync(self) -> None:
        """A failed sync is never tried again: the kernel may have dropped the pages (ATC'20)."""
        try:
            for segments in list(self._streams.values()):
                if segments and segments[-1].dirty:
                    os.fdatasync(segments[-1].fd)
                    segments[-1].dirty = False
        except OSError as error:
            raise StorageFailed(
                f"a sync failed: {error.strerror}; replace the disk, then start again"
            ) from None

    def _segment_for(self, stream: tuple[str, str], sequence: int) -> _Segment:
        segments = self._streams.get(stream, [])
        if segments and segments[-1].fd >= 0:
            last = segments[-1]
            if last.next_sequence == sequence and last.size < self.segment_bytes:
                return last
            self._seal(stream, last)
        return self._new_segment(stream, sequence)

    def _seal(self, stream: tuple[str, str], segment: _Segment) -> None:
        footer = encode_footer(SegmentHeader(*stream, segment.first), len(segment.offsets), segment.size)
        try:
            write_all(segment.fd, [footer], segment.size)
            os.fdatasync(segment.fd)
        except OSError:
            os.ftruncate(segment.fd, segment.size)
            raise
        os.close(segment.fd)
        segment.fd = -1
        segment.dirty = False

    def _new_segment(self, stream: tuple[str, str], sequence: int) -> _Segment:
        job, name = stream
        folder = self.directory / job / name
        if not folder.is_dir():
            folder.mkdir()
            sync_directory(folder.parent)
        if folder.is_symlink() or folder.parent.is_symlink():
            raise OSError(errno.ELOOP, f"{folder} is a symbolic link")
        path = folder / segment_name(sequence)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o644)
        try:
            write_all(fd, [encode_segment_header(SegmentHeader(job, name, sequence))], 0)
            os.fdatasync(fd)
            sync_directory(folder)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        segment = _Segment(path, sequence, SEGMENT_HEADER_BYTES, fd=fd)
        with self._maps:
            self._streams.setdefault(stream, []).append(segment)
        return segment

    def save(self, job: str, meta: JobMeta) -> None:
        body = json.dumps(asdict(meta), sort_keys=True, indent=1).encode() + b"\n"
        data = f"{_MANIFEST_MAGIC} {crc32c.crc32c(body):08x}\n".encode() + body
        with self._writing:
            try:
                self._replace(job, data)
            except OSError as error:
                if error.errno not in _FULL:
                    raise _as_storage_error(error) from None
                (self.directory / RESERVE).unlink(missing_ok=True)
                try:
                    self._replace(job, data)
                except OSError as again:
                    raise _as_storage_error(again) from None

    def _replace(self, job: str, data: bytes) -> None:
        folder = self.directory / job
        if not folder.is_dir():
            folder.mkdir()
            sync_directory(self.directory)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder} is a symbolic link")
        aside = folder / f"{MANIFEST}.new"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            write_all(fd, [data], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, folder / MANIFEST)
        sync_directory(folder)

    # -- reading and removing -------------------------------------------------------------------------

    def read(self, job: str, stream: str, sequence: int, frame_bytes: int) -> bytes:
        with self._maps:
            for segment in reversed(self._streams.get((job, stream), [])):
                if segment.first <= sequence < segment.next_sequence:
                    path, offset = segment.path, segment.offsets[sequence - segment.first]
                    break
            else:
                raise FileNotFoundError(f"record {sequence} of {job}/{stream} is in no segment")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(fd, frame_bytes, offset)
        finally:
            os.close(fd)

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Unlinks whole segments. The manifest tells where a stream goes on that has none left."""
        with self._writing:
            segments = self._streams.get((job, stream), [])
            dead = [segment for segment in segments if segment.next_sequence <= below_sequence]
            with self._maps:
                for segment in dead:
                    segments.remove(segment)
        freed = 0
        try:
            for segment in dead:
                if segment.fd >= 0:
                    os.close(segment.fd)
                segment.path.unlink(missing_ok=True)
                freed += segment.size
            if freed:
                self._reserve()
        except OSError as error:
            raise _as_storage_error(error) from None
        return freed

    def close(self) -> None:
        with self._writing:
            for stream, segments in self._streams.items():
                last = segments[-1] if segments else None
                if last is None or last.fd < 0:
                    continue
                try:
                    if last.offsets:  # an empty one stays open for the record that it is named after
                        self._seal(stream, last)
                except OSError:  # unsealed is sound too: the next start scans it
                    pass
                if last.fd >= 0:
                    os.close(last.fd)
                    last.fd = -1
        os.close(self._lock_fd)


def _as_storage_error(error: OSError) -> ServiceError:
    if error.errno in _FULL:
        return StorageFull(f"no space left: {error.strerror}; free some, or trim the log")
    return StorageFailed(f"a write failed: {error.strerror}; see to the disk, then start again")


def _write_frames(segment: _Segment, group: Sequence[Write]) -> list[int]:
    """Appends frames; gives their offsets."""
    offsets = []
    at = segment.size
    for write in group:
        offsets.append(at)
        at += len(write.frame)
    write_all(segment.fd, [write.frame for write in group], segment.size)
    segment.size = at
    segment.dirty = True
    return offsets

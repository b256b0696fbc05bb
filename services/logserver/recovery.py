"""The start: what a job's files hold, and whether they are this job's at all.

Where a file is damaged, its records are holes and the rest is served. Where nobody can tell what the files mean
(another job's manifest, an older one, a pipe in a segment's place) the whole job is set apart: `JobDamaged`.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from services.logserver import manifests
from services.logserver.acked import Acked
from services.logserver.book import Book
from services.logserver.disk import Disk, File
from services.logserver.failures import UNREADABLE, JobDamaged
from services.logserver.recovered import RecoveredJob, RecoveredStream
from services.logserver.segments import Segment
from services.logserver.streams import STEP_UNKNOWN, Hole, IndexEntry
from swift.log.manifest import MANIFEST, Granted, JobMeta, ManifestDamaged, StreamMeta, problem_of
from swift.log.record import NAME_PATTERN, stream_tag
from swift.log.segment import (
    BLOCK_BYTES,
    FILE_BYTES_LEAST,
    SEQUENCE_MAX,
    SUFFIX,
    Ending,
    Owner,
    SegmentScan,
    walk,
)

_SEGMENT_NAME = re.compile(rf"[0-9]{{20}}{re.escape(SUFFIX)}")

Take = Callable[[str, RecoveredStream, list[Segment]], None]
"""Is given each stream as soon as it is known: its name, what it holds, its files."""


class Recovery:
    """Of one job. Raises JobDamaged; OSError."""

    def __init__(
        self, disk: Disk, directory: Path, job: str, book: Book, acked: Acked, segment_bytes: int
    ) -> None:
        self._disk = disk
        self._folder = directory / job
        self._job = job
        self._book = book
        self._acked = acked
        # One record more than is wanted, and whatever an operator has set before.
        self._file_bytes_max = max(FILE_BYTES_LEAST, 2 * segment_bytes)
        self._meta = JobMeta()

    def job(self, take: Take) -> RecoveredJob:
        """Reads all files of the job; `take` gets each stream with its segments. Raises JobDamaged; OSError."""
        with self._reading():
            granted = self._granted()
            meta = self._manifest(granted)
        # A kill may have come before its name, or a folder's, was safe: nothing is built on it before it is.
        self._disk.sync_names(self._folder)
        names = self._folders()
        if meta is None:
            if any(self._segment_names(self._folder / name) for name in names):
                raise self._damaged(f"{MANIFEST} is missing, so nobody knows which generation was granted")
            return RecoveredJob(self._job)
        assert granted is not None
        self._meta = meta
        self._book.take(self._job, meta, granted)
        streams = []
        for name in sorted({*names, *meta.streams}):
            stream, segments = self._stream(name, meta.streams.get(name, StreamMeta()))
            take(name, stream, segments)
            streams.append(stream)
        return RecoveredJob(self._job, meta, streams)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A file that cannot be read is this job's trouble. (What cannot be written is the disk's.)"""
        try:
            yield
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> JobDamaged:
        return JobDamaged(self._job, f"{self._folder}: {what}")

    def _granted(self) -> Granted | None:
        try:
            return self._book.read(self._job)
        except ManifestDamaged as error:
            raise JobDamaged(self._job, f"{self._book.path(self._job)} is damaged: {error}") from None

    def _manifest(self, granted: Granted | None) -> JobMeta | None:
        try:
            meta = manifests.load(self._disk, self._folder)
        except ManifestDamaged as error:
            raise self._damaged(f"{MANIFEST} is damaged: {error}") from None
        if meta is None:
            if granted is not None and granted.generation:
                raise self._damaged(f"{MANIFEST} is missing, and generation {granted.generation} was granted")
            return None
        problem = problem_of(self._job, meta, granted)
        if problem:
            raise self._damaged(f"{MANIFEST} is not to be believed: {problem}")
        return meta

    def _folders(self) -> list[str]:
        names = []
        for name, is_dir in self._disk.names(self._folder):
            if not NAME_PATTERN.fullmatch(name):
                continue
            if not is_dir:
                raise self._damaged(f"{name} is where a stream's directory belongs, and is none")
            names.append(name)
        return names

    def _segment_names(self, folder: Path) -> list[str]:
        names = [name for name, _ in self._disk.names(folder) if _SEGMENT_NAME.fullmatch(name)]
        for name in names:
            if int(name.removesuffix(SUFFIX)) > SEQUENCE_MAX:
                raise self._damaged(f"{folder.name}/{name} is named after a record that there cannot be")
        return names

    def _stream(self, name: str, meta: StreamMeta) -> tuple[RecoveredStream, list[Segment]]:
        folder = self._folder / name
        paths = [folder / segment for segment in self._segment_names(folder)]
        out = RecoveredStream(name, meta.first, meta.first, [], [], meta.quarantined)
        segments: list[Segment] = []
        if paths:
            self._disk.sync_names(folder)
        try:
            for index, path in enumerate(paths):
                segment = self._segment(path, out, last=index == len(paths) - 1)
                if segment is not None:
                    segments.append(segment)
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        acked = self._acked.sequences.get((bytes.fromhex(self._meta.uid), stream_tag(self._job, name)), 0)
        for at_least, what in ((meta.next_at_least, "durable"), (acked, "acknowledged")):
            if out.next_sequence < at_least:
                reason = f"records {out.next_sequence} to {at_least - 1} were {what} and are gone"
                _hole(out, out.next_sequence, at_least, reason)
        return out, segments

    def _segment(self, path: Path, out: RecoveredStream, *, last: bool) -> Segment | None:
        with self._reading():
            file = self._disk.open(path)
        try:
            if file.size > self._file_bytes_max:
                raise self._damaged(
                    f"{path.parent.name}/{path.name} has {file.size} bytes: no segment has so many"
                )
            owner = Owner(self._job, out.name, self._meta.uid)
            with self._reading():
                scanned = walk(path, verify_bodies=False, last=last, source=file, owner=owner)
            self._check_generation(scanned)
            if scanned.torn_bytes:
                out.torn_bytes += scanned.torn_bytes
            empty = scanned.header is None or (scanned.ending is Ending.SEALED and not scanned.records)
            if empty and not scanned.damage:
                file.close()
                self._disk.remove(path)
                self._disk.sync_names(path.parent)
                return None
            return self._take_segment(file, scanned, out, last)
        except BaseException:
            file.close()
            raise

    def _check_generation(self, scanned: SegmentScan) -> None:
        """No file is newer than the manifest: a generation is durable before anybody may write under it."""
        newest = max((record.header.generation for record in scanned.records), default=0)
        if scanned.header is not None:
            newest = max(newest, scanned.header.generation)
        if newest > self._meta.generation:
            raise self._damaged(
                f"{MANIFEST} is not to be believed: it is of generation {self._meta.generation}, and "
                f"{scanned.path.parent.name}/{scanned.path.name} of generation {newest}"
            )

    def _take_segment(self, file: File, scanned: SegmentScan, out: RecoveredStream, last: bool) -> Segment:
        first = out.first
        begin = int(scanned.path.name.removesuffix(SUFFIX))
        if begin > out.next_sequence:
            reason = f"records {out.next_sequence} to {begin - 1} are gone"
            _hole(out, out.next_sequence, begin, reason)
        generation = self._meta.generation if scanned.header is None else scanned.header.generation
        segment = Segment(
            scanned.path, begin, scanned.end, Owner(self._job, out.name, self._meta.uid), generation
        )
        for damage in scanned.damage:
            end = damage.end_sequence
            if end is None:  # nobody knows how far it goes: as far as the next segment, or to what is wanted
                end = (max(damage.sequence, first) if last else damage.sequence) + 1
            if end > first:
                out.holes.append(Hole(damage.sequence, end, STEP_UNKNOWN, damage.reason))
        for record in scanned.records:
            header = record.header
            segment.found(header.sequence, record.offset, header.frame_bytes)
            for index, hole in enumerate(out.holes):
                if hole.below_step == STEP_UNKNOWN and hole.sequence <= header.sequence:
                    out.holes[index] = replace(hole, below_step=header.key.step + 1)
            if header.sequence >= first and header.key.step >= self._meta.trimmed_below_step:
                out.entries.append(
                    IndexEntry(
                        header.sequence, header.key, header.digest, header.generation, header.frame_bytes
                    )
                )
        ends = [hole.end_sequence for hole in out.holes]
        out.next_sequence = max(out.next_sequence, segment.next_sequence, *ends)
        if scanned.torn_bytes:  # behind damage, too: records go on in the next file
            file.resize(scanned.end)
            file.sync()
        if scanned.ending is Ending.SEALED or scanned.damage:
            file.close()
            return segment
        segment.file = file
        file.sync()
        tail = scanned.end % BLOCK_BYTES
        segment.tail = file.read(scanned.end - tail, tail)
        return segment


def is_nobodys(disk: Disk, book: Book, path: Path) -> bool:
    """Whether this is a file that somebody has put into the server's directory, where no job was."""
    try:
        disk.open(path).close()
    except OSError:
        return False
    return not any(name == book.path(path.name).name for name, _ in disk.names(path.parent))


def _hole(out: RecoveredStream, begin: int, end: int, reason: str) -> None:
    if end > out.first:
        out.holes.append(Hole(begin, end, STEP_UNKNOWN, reason, gone=True))
    out.next_sequence = end

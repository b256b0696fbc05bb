"""Where records rest. `Storage` is the seam; `DirectoryStorage` keeps segment files in one directory.

::

    DIRECTORY/.lock               held by the one server of this directory
    DIRECTORY/.reserve            space given back when the disk is full, so that a trim can be recorded
    DIRECTORY/.dropped-<job>-…    a job that is forgotten, until its files are removed
    DIRECTORY/<job>/.manifest     generation, trim, and the least that each stream must hold
    DIRECTORY/<job>/<stream>/<first sequence>.seg

Order of effects, so that a kill at any point loses nothing acknowledged: a segment is sealed before its
successor is made; a new file's directory entry is synced before the first record in it is acknowledged; the
manifest says what is dropped before files are unlinked; a manifest is written aside, synced, renamed, and its
directory synced.

A segment takes its space when it is made, and more in steps of 32 MiB, so that appends change no metadata
and a full disk is found before anything is written.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from services.logserver import manifests
from services.logserver.core import STEP_UNKNOWN, Entry, Hole
from services.logserver.disk import NO_SPACE, Disk, File, RealDisk
from services.logserver.failures import StorageBusy, StorageFailed, StorageFull, as_storage_error
from services.logserver.recovered import RecoveredJob, RecoveredStream
from services.logserver.segments import Segment, Unsound, place_of
from swift.errors import UsageError
from swift.log.directory import DROPPED, RESERVE, grave_of
from swift.log.frame import Bytes
from swift.log.manifest import JobMeta, StreamMeta, encode_manifest
from swift.log.record import NAME_PATTERN
from swift.log.segment import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    SUFFIX,
    Ending,
    SegmentHeader,
    SegmentScan,
    encode_footer,
    encode_segment_header,
    padding,
    segment_name,
    walk,
)

RESERVE_BYTES = 1 << 20
_SEGMENT_NAME = re.compile(rf"[0-9]{{20}}{re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Write:
    """One accepted frame on its way to the disk."""

    job: str
    stream: str
    sequence: int
    frame: Sequence[Bytes]
    """Its bytes, in one or more pieces."""
    mends: bool = False
    """It goes where the same record is, damaged."""

    @property
    def size(self) -> int:
        return sum(map(len, self.frame))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame begins."""

    path: Path
    offset: int
    end_sequence: int
    """Frames of the sequences up to here follow each other in this file."""

    def behind(self, size: int) -> "Place":
        return replace(self, offset=self.offset + size)


class Storage(Protocol):
    """Keeps frames and manifests. Raises StorageError. One caller writes; any may read."""

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        """Writes frames, in order; with ``sync`` all that was ever committed is durable after it. What mends is so at
        once; gives what does not fit its place."""

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        """Where a record is. FileNotFoundError if it was removed."""

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        """So many bytes from there on, in ``buffer``: page-aligned, and two blocks larger. OSError."""

    def save(self, job: str, meta: JobMeta) -> None:
        """Makes this the job's manifest, durably."""

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Gives back space of sequences below; the manifest says already that they are dropped."""

    def drop(self, job: str) -> Callable[[], None]:
        """Forgets a job, durably. What it gives removes the files, whenever that suits. The job is not written
        meanwhile."""

    def close(self) -> None:
        """Seals and closes everything."""


class DirectoryStorage:
    """Segment files under one directory, which it holds alone."""

    def __init__(
        self, directory: Path, segment_bytes: int, disk: Disk | None = None, open_max: int = 1 << 30
    ) -> None:
        """Takes the directory. UsageError: it cannot be used; ServiceError: another server holds it.

        ``open_max``: segments that stay open; beyond it those that were not written for longest are sealed.
        """
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.open_max = open_max
        self._disk: Disk = RealDisk(directory) if disk is None else disk
        self._streams: dict[tuple[str, str], list[Segment]] = {}
        self._maps = threading.Lock()  # guards the lists; held for moments
        self._open: dict[Segment, tuple[str, str]] = {}
        """Not sealed, with their streams; what was written last is the last one."""
        self._unsynced: dict[Segment, None] = {}
        """Written since the last sync, in that order."""
        self._writing = threading.RLock()  # one commit, roll or removal at a time
        self._failed = ""  # what the files hold is unknown: no record is written any more, and none sealed

    # -- start ----------------------------------------------------------------------------------------

    def recover(self) -> list[RecoveredJob]:
        """Once, at the start: what is there. Cuts torn tails, finishes removals that were interrupted."""
        try:
            self._disk.sync_names(self.directory)
            self._remove_forgotten()
            jobs = [self._recover_job(name) for name in self._folders(self.directory)]
        except OSError as error:
            raise UsageError(f"cannot read directory {self.directory}: {error}") from None
        return jobs

    def _folders(self, path: Path) -> list[str]:
        return [name for name, is_dir in self._disk.names(path) if is_dir and NAME_PATTERN.fullmatch(name)]

    def _reserve(self) -> None:
        path = self.directory / RESERVE
        there = any(name == RESERVE for name, _ in self._disk.names(self.directory))
        try:
            file = self._disk.open(path) if there else self._disk.create(path)
            try:
                file.reserve(RESERVE_BYTES)
            finally:
                file.close()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._disk.remove(path)

    def _recover_job(self, job: str) -> RecoveredJob:
        meta = manifests.load(self._disk, self.directory / job)
        if meta is None:
            if any(
                self._segment_names(self.directory / job / name)
                for name in self._folders(self.directory / job)
            ):
                raise manifests.missing(self.directory / job)
            meta = JobMeta()
        # A kill may have come before its name, or a folder's, was safe: nothing is built on it before it is.
        self._disk.sync_names(self.directory / job)
        names = sorted({*self._folders(self.directory / job), *meta.streams})
        streams = [
            self._recover_stream(job, name, meta.streams.get(name, StreamMeta()), meta.trimmed_below_step)
            for name in names
        ]
        return RecoveredJob(job, meta, streams)

    def _segment_names(self, folder: Path) -> list[str]:
        return [name for name, _ in self._disk.names(folder) if _SEGMENT_NAME.fullmatch(name)]

    def _recover_stream(self, job: str, name: str, meta: StreamMeta, trimmed: int) -> RecoveredStream:
        folder = self.directory / job / name
        paths = [folder / found for found in self._segment_names(folder)]
        out = RecoveredStream(name, meta.first, meta.first, [], [], meta.quarantined)
        segments: list[Segment] = []
        if paths:
            self._disk.sync_names(folder)
        for index, path in enumerate(paths):
            file = self._disk.open(path)
            last = index == len(paths) - 1
            scanned = walk(path, verify_bodies=False, last=last, source=file, owner=(job, name))
            if scanned.torn_bytes:
                out.torn_bytes += scanned.torn_bytes
            empty = scanned.header is None or (scanned.ending is Ending.SEALED and not scanned.records)
            if empty and not scanned.damage:
                file.close()
                self._disk.remove(path)
                self._disk.sync_names(folder)
                continue
            segments.append(self._take_segment(file, scanned, out, trimmed, meta.first, last))
        if out.next_sequence < meta.next_at_least:
            reason = f"records {out.next_sequence} to {meta.next_at_least - 1} were durable and are gone"
            self._hole(out, out.next_sequence, meta.next_at_least, reason)
        self._streams[job, name] = segments
        self.remove(job, name, meta.first)
        try:
            self._seal_idle({(job, name)})
        except OSError as error:  # on a full disk they stay open
            if error.errno not in NO_SPACE or isinstance(error, Unsound):
                raise
        return out

    def _take_segment(
        self, file: File, scanned: SegmentScan, out: RecoveredStream, trimmed: int, first: int, last: bool
    ) -> Segment:
        begin = int(scanned.path.name.removesuffix(SUFFIX))
        if begin > out.next_sequence:
            reason = f"records {out.next_sequence} to {begin - 1} are gone"
            self._hole(out, out.next_sequence, begin, reason)
        segment = Segment(scanned.path, begin, scanned.end)
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
            if header.sequence >= first and header.key.step >= trimmed:
                out.entries.append(
                    Entry(header.sequence, header.key, header.digest, header.generation, header.frame_bytes)
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
        self._open[segment] = (scanned.path.parent.parent.name, scanned.path.parent.name)
        file.sync()
        tail = scanned.end % BLOCK_BYTES
        segment.tail = file.read(scanned.end - tail, tail)
        return segment

    @staticmethod
    def _hole(out: RecoveredStream, begin: int, end: int, reason: str) -> None:
        if end > out.first:
            out.holes.append(Hole(begin, end, STEP_UNKNOWN, reason, gone=True))
        out.next_sequence = end

    # -- writing --------------------------------------------------------------------------------------

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        groups: dict[tuple[str, str], list[Write]] = {}
        for write in writes:
            if not write.mends:
                groups.setdefault((write.job, write.stream), []).append(write)
        with self._writing:
            if self._failed:
                raise StorageFailed(self._failed)
            try:
                unmended = [write for write in writes if write.mends and not self._mend(write)]
                placed = self._write(groups)
                if sync:
                    self._sync()
            except (StorageFull, StorageBusy):
                raise
            except Exception as error:  # whatever it was
                self._failed = self._failed or str(error) or repr(error)
                raise
            with self._maps:
                for segment, offsets in placed:
                    segment.offsets.extend(offsets)
        return unmended

    def _mend(self, write: Write) -> bool:
        stream = (write.job, write.stream)
        segment = place_of(self._streams.get(stream, []), write.sequence)
        if segment is None:
            return False
        try:
            if segment.file is not None:  # its last block is in memory, too
                self._seal(stream, segment)
            file = self._disk.open(segment.path)
            try:
                done = segment.mend(file, write.sequence, write.frame)
                self._sync_file(file)
            finally:
                file.close()
        except OSError as error:
            raise as_storage_error(error) from None
        return done

    def _write(self, groups: Mapping[tuple[str, str], list[Write]]) -> list[tuple[Segment, list[int]]]:
        """Where the frames are now."""
        before: list[tuple[Segment, int, bytes]] = []
        placed = []
        try:
            self._seal_idle(groups.keys())
            for stream, group in groups.items():
                segment = self._segment_for(stream, group[0].sequence)
                before.append((segment, segment.size, segment.tail))
                placed.append((segment, segment.offsets_of(write.size for write in group)))
                segment.write([part for write in group for part in write.frame])
                self._unsynced[segment] = None
                self._open[segment] = self._open.pop(segment)
        except OSError as error:
            try:
                for segment, size, tail in before:
                    segment.go_back(size, tail)
            except Unsound as unsound:
                error = error if isinstance(error, Unsound) else unsound
            raise as_storage_error(error) from None
        return placed

    def _sync(self) -> None:
        for segment in self._unsynced:
            assert segment.file is not None
            self._sync_file(segment.file)
        self._unsynced.clear()

    def _sync_file(self, file: File) -> None:
        """A failed sync is never tried again: the kernel may have dropped the pages (ATC'20)."""
        try:
            file.sync()
        except OSError as error:
            self._failed = f"a sync failed: {error.strerror}; replace the disk, then start again"
            raise StorageFailed(self._failed) from None

    def _segment_for(self, stream: tuple[str, str], sequence: int) -> Segment:
        segments = self._streams.get(stream, [])
        if segments and segments[-1].file is not None:
            last = segments[-1]
            if last.next_sequence == sequence and last.size < self.segment_bytes:
                return last
            if last.offsets:
                self._seal(stream, last)
            else:  # empty, it would be in the way of the record that it is named after, or of those before
                self._disk.remove(last.path)
                self._close(last)
                with self._maps:
                    segments.pop()
        return self._new_segment(stream, sequence)

    def _seal_idle(self, wanted: Set[tuple[str, str]]) -> None:
        """Before these streams are written: a job that is over, or waits, keeps no descriptors that others need."""
        if len(self._open) + len(wanted) <= self.open_max:
            return
        excess = len({*wanted, *self._open.values()}) - self.open_max
        # An empty one stays open for the record that it is named after.
        idle = [segment for segment, stream in self._open.items() if segment.offsets and stream not in wanted]
        for segment in idle[: max(0, excess)]:
            self._seal(self._open[segment], segment)

    def _close(self, segment: Segment) -> None:
        segment.close()
        self._unsynced.pop(segment, None)
        self._open.pop(segment, None)

    def _seal(self, stream: tuple[str, str], segment: Segment) -> None:
        assert segment.file is not None
        size, tail = segment.size, segment.tail
        footer = encode_footer(SegmentHeader(*stream, segment.first), len(segment.offsets), size)
        try:
            segment.write([padding(size, FOOTER_BYTES), footer])
            segment.file.resize(segment.size)  # gives back what was reserved
            self._sync_file(segment.file)
        except OSError:
            segment.go_back(size, tail)
            raise
        segment.size = size
        self._close(segment)

    def _new_segment(self, stream: tuple[str, str], sequence: int) -> Segment:
        job, name = stream
        folder = self.directory / job / name
        self._disk.make_directory(folder.parent)
        self._disk.make_directory(folder)
        path = folder / segment_name(sequence)
        segment = Segment(path, sequence, 0, file=self._disk.create(path))
        assert segment.file is not None
        try:
            segment.write([encode_segment_header(SegmentHeader(job, name, sequence))])
            self._sync_file(segment.file)
            self._disk.sync_names(folder)
        except (OSError, StorageFailed) as error:
            segment.file.close()
            try:
                self._disk.remove(path)
            except OSError:  # the next one could not be made
                raise Unsound(
                    getattr(error, "errno", None), f"{error}, and {path} cannot be removed"
                ) from None
            raise
        with self._maps:
            self._streams.setdefault(stream, []).append(segment)
        self._open[segment] = stream
        return segment

    def save(self, job: str, meta: JobMeta) -> None:
        data = encode_manifest(meta)
        with self._writing:
            try:
                manifests.replace(self._disk, self.directory / job, data)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise as_storage_error(error) from None
                try:
                    self._disk.remove(self.directory / RESERVE)
                    manifests.replace(self._disk, self.directory / job, data)
                except OSError as again:
                    raise as_storage_error(again) from None

    # -- reading and removing -------------------------------------------------------------------------

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        with self._maps:
            for segment in reversed(self._streams.get((job, stream), [])):
                if segment.first <= sequence < segment.next_sequence:
                    offset = segment.offsets[sequence - segment.first]
                    return Place(segment.path, offset, segment.next_sequence)
        raise FileNotFoundError(f"record {sequence} of {job}/{stream} is in no segment")

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        begin = place.offset // BLOCK_BYTES * BLOCK_BYTES
        skip = place.offset - begin
        file = self._disk.open(place.path)
        try:
            read = file.read_into(begin, buffer[: -(-(skip + size) // BLOCK_BYTES) * BLOCK_BYTES])
        finally:
            file.close()
        return buffer[skip : min(skip + size, read)]

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Unlinks whole segments. The manifest tells where a stream goes on that has none left."""
        with self._writing:
            segments = self._streams.get((job, stream), [])
            # An empty one at the end stays: the next record's file has its name.
            dead = [
                segment
                for segment in segments
                if segment.next_sequence <= below_sequence
                and (segment.offsets or segment is not segments[-1])
            ]
            with self._maps:
                for segment in dead:
                    segments.remove(segment)
                    self._unsynced.pop(segment, None)
                    self._open.pop(segment, None)
        freed = 0
        try:
            while dead:
                dead[0].close()
                self._disk.remove(dead[0].path)
                freed += dead.pop(0).size
            if freed:
                self._reserve()
        except OSError as error:
            with self._maps:
                segments[:0] = dead  # the next removal tries again
            raise as_storage_error(error) from None
        return freed

    def drop(self, job: str) -> Callable[[], None]:
        with self._writing:
            there = self._bury(job)
            with self._maps:
                gone = [self._streams.pop(stream) for stream in list(self._streams) if stream[0] == job]
            for segment in (segment for segments in gone for segment in segments):
                self._close(segment)
        return self._remove_forgotten if there else lambda: None

    def _bury(self, job: str) -> bool:
        """Puts its files where no job's are, durably; False: there are none."""
        folder, grave = self.directory / job, grave_of(self.directory, job)
        try:
            self._disk.rename(folder, grave)
        except FileNotFoundError:  # nothing of it was ever written
            return False
        except OSError as error:
            raise as_storage_error(error) from None
        try:
            self._disk.sync_names(self.directory)
        except OSError as error:
            self._failed = f"a sync failed: {error.strerror}; replace the disk, then start again"
            with suppress(OSError):
                self._disk.rename(grave, folder)
            raise StorageFailed(self._failed) from None
        return True

    def _remove_forgotten(self) -> None:
        for name, is_dir in self._disk.names(self.directory):
            if is_dir and name.startswith(DROPPED):
                self._disk.remove_tree(self.directory / name)
        self._reserve()

    def close(self) -> None:
        with self._writing:
            for segment, stream in list(self._open.items()):
                # Unsealed is sound too: the next start scans it. An empty one waits for the record it is named after.
                with suppress(OSError, StorageFailed):
                    if segment.offsets and not self._failed:
                        self._seal(stream, segment)
                self._close(segment)
        self._disk.close()

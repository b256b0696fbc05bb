"""`DirectoryStorage`: implements `Storage` with segment files in one directory. Its layout: `swift_ft.log.directory`.

Order of effects, so that a kill at any point loses no acknowledged record: a segment is sealed before its successor is
created; a new file's directory entry is synced before the first record in it is acknowledged; the manifest records what
is dropped before files are unlinked; a manifest is written to a temporary file, synced, renamed, and its directory
synced.

A segment reserves its space when it is created, and whenever that is used up as much again as it holds (32 MiB at
most). So few appends change metadata, and a full disk is found before anything is written.
"""

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from swift_ft.errors import RecordCorrupt, RecordInvalid, UsageError
from swift_ft.log.directory import RESERVE, grave_of, is_grave
from swift_ft.log.manifest import (
    MANIFEST,
    UID_BYTES,
    Granted,
    JobMeta,
    ManifestDamaged,
    StreamMeta,
    problem_of,
)
from swift_ft.log.record import NAME_PATTERN, stream_tag
from swift_ft.log.segment import (
    BLOCK_BYTES,
    COLD_SUFFIX,
    FILE_BYTES_LEAST,
    FOOTER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEQUENCE_MAX,
    SUFFIX,
    Ending,
    Owner,
    SegmentScan,
    Stub,
    decode_segment_header,
    encode_footer,
    encode_segment_header,
    padding,
    segment_name,
    stub_path,
    walk,
)
from swift_ft_services.logserver import manifests
from swift_ft_services.logserver.cold import ColdTier, folder_of, key_of, known_url, read_stub, reset_of
from swift_ft_services.logserver.core import NUMBER_MAX, STEP_UNKNOWN, Hole, IndexEntry, JobState, StreamState
from swift_ft_services.logserver.disk import NO_SPACE, Disk, File, RealDisk
from swift_ft_services.logserver.manifests import Acked, Book, replace_small_file
from swift_ft_services.logserver.segments import (
    IN_THE_WAY,
    UNREADABLE,
    JobDamaged,
    Segment,
    StorageBusy,
    StorageError,
    StorageFailed,
    StorageFull,
    Unsound,
    as_storage_error,
    place_of,
)
from swift_ft_services.logserver.shared_memory import BodyChanged
from swift_ft_services.logserver.storage_interface import Place, RecoveredJob, Write

# Directories of dropped jobs are renamed to tombstone names, which no job can have, until there is time to unlink them.


def bury(disk: Disk, directory: Path, job: str) -> bool:
    """Renames the job's directory for deletion and syncs the parent. Returns False if there is none.

    If it raises OSError or StorageFailed, nothing has moved.
    """
    folder, grave = directory / job, grave_of(directory, job)
    try:
        disk.rename(folder, grave)
    except FileNotFoundError:
        return False
    try:
        disk.sync_names(directory)
    except OSError as error:
        with suppress(OSError):
            disk.rename(grave, folder)
        raise StorageFailed(f"a sync failed: {error.strerror}; replace the disk, then start again") from None
    return True


# Recovery at the start: reads a job's files and checks that they belong to this job.
#
# Damaged records of a file become holes, and the rest is served. Where the files cannot be interpreted (another job's
# manifest, an older one, a pipe in a segment's place) the whole job is quarantined: `JobDamaged`.

_SEGMENT_NAME = re.compile(rf"[0-9]{{20}}({re.escape(SUFFIX)}|{re.escape(COLD_SUFFIX)})")

Take = Callable[[StreamState, list[Segment]], None]
"""Callback that receives each stream as soon as it is recovered, with its segments."""


class Recovery:
    """Reads the files of one job at the start. Raises JobDamaged or OSError."""

    def __init__(
        self, disk: Disk, directory: Path, job: str, book: Book, acked: Acked, segment_bytes: int
    ) -> None:
        self._disk = disk
        self._folder = directory / job
        self._job = job
        self._state = JobState(job)
        self._torn_bytes: Counter[str] = Counter()
        self._book = book
        self._acked = acked
        # Twice the configured size, for the last record; not less than any limit that an operator may have set before.
        self._file_bytes_max = max(FILE_BYTES_LEAST, 2 * segment_bytes)
        self._meta = JobMeta()
        self._cold_folder = ""
        """Where the job's moved segments are."""
        self._since = 0
        """(moved) Generation of the reset before them: no older record counts."""

    def job(self, take: Take) -> RecoveredJob:
        """Reads all files of the job; ``take`` gets each stream with its segments. Raises JobDamaged or OSError."""
        with self._reading():
            granted = self._granted()
            meta = self._manifest(granted)
        # After a kill, a directory entry may not be durable yet. It is synced before anything relies on it.
        self._disk.sync_names(self._folder)
        names = self._folders()
        if meta is None:
            if any(self._segment_names(self._folder / name) for name in names):
                raise self._damaged(f"{MANIFEST} is missing, so nobody knows which generation was granted")
            return RecoveredJob(self._state)
        assert granted is not None
        self._meta, self._cold_folder = meta, folder_of(meta)
        self._book.load(self._job, meta, granted)
        for name in sorted({*names, *meta.streams}):
            take(*self._stream(name, meta.streams.get(name, StreamMeta())))
        return RecoveredJob(self._state, meta, self._torn_bytes)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns a read error of a file into JobDamaged. (A write error concerns the disk and is passed on.)"""
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
            meta = manifests.load_manifest(self._disk, self._folder)
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
        """Returns the names of segments and stubs. A stub beside its segment is removed: a kill has left it."""
        names = [name for name, _ in self._disk.names(folder) if _SEGMENT_NAME.fullmatch(name)]
        for name in names:
            if int(name.partition(".")[0]) > SEQUENCE_MAX:
                raise self._damaged(f"{folder.name}/{name} is named after a record that there cannot be")
        both = {
            name
            for name in names
            if Path(name).suffix == COLD_SUFFIX and f"{Path(name).stem}{SUFFIX}" in names
        }
        for name in both:
            self._disk.remove(folder / name)
        return [name for name in names if name not in both]

    def _stream(self, name: str, meta: StreamMeta) -> tuple[StreamState, list[Segment]]:
        folder = self._folder / name
        paths = [folder / segment for segment in self._segment_names(folder)]
        out = self._new(name, meta.first)
        out.quarantined = meta.quarantined
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
            if out.appended < at_least:
                reason = f"records {out.appended} to {at_least - 1} were {what} and are gone"
                _hole(out, out.appended, at_least, reason)
        return out, segments

    def _new(self, name: str, first: int) -> StreamState:
        stream = self._state.stream(name)
        stream.first = stream.durable = stream.appended = first
        return stream

    def _segment(self, path: Path, out: StreamState, *, last: bool) -> Segment | None:
        cold = path.suffix == COLD_SUFFIX
        with self._reading():
            file = cast(File, self._stub(path)) if cold else self._disk.open(path)
        return self._scanned(file, path.with_suffix(SUFFIX), out, last=last, cold=cold)

    def moved(
        self, name: str, cold: str, stubs: Mapping[str, Mapping[int, Stub]], take: Take
    ) -> RecoveredJob:
        """As `job`, of what a lost server has moved there: a job of this name. Nothing of it is in the directory, and
        none is written."""
        self._state = JobState(name)
        self._meta = JobMeta(generation=NUMBER_MAX, uid=cold.partition("/")[0])
        self._cold_folder, self._since = cold, reset_of(cold)
        for stream, found in sorted(stubs.items()):
            out = self._new(stream, min(found))
            paths = {first: self._folder / stream / segment_name(first) for first in sorted(found)}
            segments = [
                self._scanned(cast(File, found[first]), path, out, last=False, cold=True)
                for first, path in paths.items()
            ]
            take(out, [segment for segment in segments if segment is not None])
        return RecoveredJob(self._state)

    def _scanned(self, file: File, path: Path, out: StreamState, *, last: bool, cold: bool) -> Segment | None:
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
                self._torn_bytes[out.name] += scanned.torn_bytes
            empty = scanned.header is None or (scanned.ending is Ending.SEALED and not scanned.records)
            if empty and not scanned.damage:
                file.close()
                self._disk.remove(path)
                self._disk.sync_names(path.parent)
                return None
            segment = self._take_segment(file, scanned, out, last and not cold)
            if cold:
                segment.key = key_of(self._cold_folder, out.name, path)
                if not scanned.damage:
                    out.moved(segment.next_sequence)
            return segment
        except BaseException:
            file.close()
            raise

    def _stub(self, path: Path) -> Stub:
        try:
            return read_stub(self._disk, path)
        except ManifestDamaged as error:
            raise self._damaged(f"{path.parent.name}/{path.name} is damaged: {error}") from None

    def _check_generation(self, scanned: SegmentScan) -> None:
        """Raises JobDamaged if a file is newer than the manifest: a generation is durable before its first write."""
        newest = max((record.header.generation for record in scanned.records), default=0)
        if scanned.header is not None:
            newest = max(newest, scanned.header.generation)
        if newest > self._meta.generation:
            raise self._damaged(
                f"{MANIFEST} is not to be believed: it is of generation {self._meta.generation}, and "
                f"{scanned.path.parent.name}/{scanned.path.name} of generation {newest}"
            )

    def _take_segment(self, file: File, scanned: SegmentScan, out: StreamState, last: bool) -> Segment:
        first = out.first
        begin = int(scanned.path.name.removesuffix(SUFFIX))
        if begin > out.appended:
            _hole(out, out.appended, begin, f"records {out.appended} to {begin - 1} are gone")
        generation = self._meta.generation if scanned.header is None else scanned.header.generation
        segment = Segment(
            scanned.path, begin, scanned.end, Owner(self._job, out.name, self._meta.uid), generation
        )
        for damage in scanned.damage:
            end = damage.end_sequence
            if end is None:  # extent unknown: up to the next segment, or to the first wanted record
                end = (max(damage.sequence, first) if last else damage.sequence) + 1
            if end > first:
                out.holes.append(Hole(damage.sequence, end, STEP_UNKNOWN, damage.reason))
        for record in scanned.records:
            header = record.header
            segment.found(header.sequence, record.offset, header.frame_bytes)
            if header.generation < self._since:
                out.first = header.sequence + 1
                continue
            for index, hole in enumerate(out.holes):
                if hole.below_step == STEP_UNKNOWN and hole.sequence <= header.sequence:
                    out.holes[index] = replace(hole, below_step=header.key.step + 1)
            if header.sequence >= first and header.key.step >= self._meta.trimmed_below_step:
                out.add(
                    IndexEntry(
                        header.sequence, header.key, header.digest, header.generation, header.frame_bytes
                    )
                )
        ends = [hole.end_sequence for hole in out.holes]
        out.durable = out.appended = max(out.appended, segment.next_sequence, *ends)
        if scanned.torn_bytes:  # also after damage: records continue in the next file
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
    """Returns whether this is an unrelated file that somebody put into the server's directory, where no job was."""
    try:
        disk.open(path).close()
    except OSError:
        return False
    return not any(name == book.path(path.name).name for name, _ in disk.names(path.parent))


def _hole(out: StreamState, begin: int, end: int, reason: str) -> None:
    if end > out.first:
        out.holes.append(Hole(begin, end, STEP_UNKNOWN, reason, gone=True))
    out.durable = out.appended = end


RESERVE_BYTES = 1 << 20
_SEALED_BYTES_LEAST = 1 << 20
"""Size from which an open segment is sealed to be moved, if there is no sealed one."""


class DirectoryStorage:
    """Segment files under one directory, locked by this process."""

    def __init__(
        self,
        directory: Path,
        segment_bytes: int,
        disk: Disk | None = None,
        open_max: int = 1 << 30,
        new_uid: Callable[[], bytes] = lambda: os.urandom(UID_BYTES),
        cold: ColdTier | None = None,
    ) -> None:
        """Locks the directory. Raises UsageError if it cannot be used, ServiceError if another server holds it.

        ``open_max``: segments that stay open; beyond it the least recently written ones are sealed. ``new_uid``:
        returns a unique id for a new job. ``cold``: where sealed segments may be moved to.
        """
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.open_max = open_max
        self._disk: Disk = RealDisk(directory) if disk is None else disk
        self._new_uid = new_uid
        self._cold = cold
        self._moved: dict[Path, str] = {}
        """File that was moved to the cold tier -> its object: a read may have located it before."""
        self._objects_of_trimmed: list[Segment] = []
        """Moved segments that were removed; their objects and stubs are still there."""
        self._objects_of_dropped: dict[Path, str] = {}
        """Tombstone of a dropped job, which stays until its objects are gone -> the job's uid."""
        self._objects_of_lost: dict[str, str] = {}
        """Folder of a lost server that nobody needs any more -> the job of which it is said to be."""
        self._book = Book(self._disk, directory)
        self._acked = Acked(self._disk, directory)
        self._metas: dict[str, JobMeta] = {}
        """Job -> manifest as it was saved last."""
        self._streams: dict[tuple[str, str], list[Segment]] = {}
        self._maps = threading.Lock()  # guards the lists; held for moments
        self._open: dict[Segment, tuple[str, str]] = {}
        """Segments that are not sealed, with their streams, in the order of their last writes."""
        self._unsynced: dict[Segment, None] = {}
        """Segments written since the last sync, in that order."""
        self._begun: dict[str, dict[str, int]] = {}
        """Job -> stream -> first sequence of a new file that the job's manifest does not record yet."""
        self._making = (
            threading.Lock()
        )  # (taken before `_writing`) one file is created ahead; no job is dropped meanwhile
        self._writing = threading.RLock()  # one commit, roll or removal at a time
        self._saving: dict[str, threading.Lock] = {}
        """Lock per job: it saves one manifest at a time, and no other job's commit waits for that."""
        # set once the files' contents are unknown: no record is written and no segment sealed any more
        self._failed = ""

    # -- start ----------------------------------------------------------------------------------------

    def recover(self) -> list[RecoveredJob]:
        """Called once at the start. Returns the recovered jobs. Cuts torn tails and finishes interrupted removals. A
        job whose files cannot be interpreted is quarantined. Raises UsageError if the directory cannot be read."""
        try:
            self._disk.sync_names(self.directory)
            if self._cold is not None:
                self._cold.claim(self._disk, self.directory)
            elif url := known_url(self._disk, self.directory):
                raise UsageError(f"segments of {self.directory} are in an object store: add --cold {url}")
            self._remove_forgotten()
            self._acked.open()
            return [
                self._recover_job(name, is_dir)
                for name, is_dir in self._disk.names(self.directory)
                if NAME_PATTERN.fullmatch(name)
                and (is_dir or not is_nobodys(self._disk, self._book, self.directory / name))
            ]
        except OSError as error:
            raise UsageError(f"cannot read directory {self.directory}: {error}") from None

    def _recover_job(self, name: str, is_dir: bool) -> RecoveredJob:
        of = Recovery(self._disk, self.directory, name, self._book, self._acked, self.segment_bytes)
        try:
            if not is_dir:
                raise JobDamaged(name, f"{self.directory / name} is not a directory")
            recovered = of.job(self._adopt)
            self._metas[name] = recovered.meta
            return recovered
        except JobDamaged as damaged:
            reason = str(damaged)
        except OSError as error:
            if error.errno not in IN_THE_WAY:
                raise
            reason = str(JobDamaged(name, str(error)))
        self._close_all(name)
        return RecoveredJob(JobState(name), apart=reason)

    def _adopt(self, stream: StreamState, segments: list[Segment]) -> None:
        """(at the start) Takes over a recovered stream with its segments."""
        of = (stream.job, stream.name)
        self._streams[of] = segments
        for segment in segments:
            if segment.file is not None:
                self._open[segment] = of
        self.remove(*of, stream.first)
        try:
            self._seal_idle({of})
        except OSError as error:  # on a full disk they stay open
            if error.errno not in NO_SPACE or isinstance(error, Unsound):
                raise

    def give_back(self, job: str) -> None:
        with self._writing:
            for segment, (whose, _) in self._open.items():
                if whose == job:
                    segment.give_back()

    def _close_all(self, job: str) -> None:
        with self._maps:
            gone = [self._streams.pop(stream) for stream in list(self._streams) if stream[0] == job]
        for segment in (segment for segments in gone for segment in segments):
            self._close(segment)

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

    def _in_reserve(self, write: Callable[[], None]) -> None:
        """Writes a small file, on a full disk in the reserve file's room."""
        try:
            write()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._disk.remove(self.directory / RESERVE)
            write()

    # -- writing --------------------------------------------------------------------------------------

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        """Implements `Storage.commit`. Raises StorageError, BodyChanged; after StorageFailed every
        further commit is refused."""
        groups: dict[tuple[str, str], list[Write]] = {}
        for write in writes:
            if not write.mends:
                groups.setdefault((write.job, write.stream), []).append(write)
        with self._writing:
            if self._failed:
                raise StorageFailed(self._failed)
            try:
                unmended = [write for write in writes if write.mends and not self._mend(write)]
                placed = self._write(groups, sync)
                if sync:
                    self._sync()
            except (StorageFull, StorageBusy, JobDamaged, BodyChanged):
                raise
            except Exception as error:  # any other error
                self._failed = self._failed or str(error) or repr(error)
                raise
            with self._maps:
                for segment, offsets in placed:
                    segment.offsets.extend(offsets)
            for segment, _ in placed:
                self._acked.note(segment.of, segment.next_sequence)
        return unmended

    def _mend(self, write: Write) -> bool:
        stream = (write.job, write.stream)
        segment = place_of(self._streams.get(stream, []), write.sequence)
        if segment is None:
            return False
        try:
            if segment.cold:
                return False  # an object is never changed
            if segment.file is not None:  # its last block is in memory, too
                self._seal(stream, segment)
            try:
                file = self._disk.open(segment.path)
            except FileNotFoundError:
                return False  # somebody has removed it
            try:
                # A body is verified before anything is overwritten.
                done = segment.mend(file, write.sequence, [bytes(part) for part in write.frame])
                self._sync_file(file)
            finally:
                file.close()
        except OSError as error:
            raise as_storage_error(error) from None
        return done

    def _write(
        self, groups: Mapping[tuple[str, str], list[Write]], sync: bool
    ) -> list[tuple[Segment, list[int]]]:
        """Writes the frames. Returns each segment with the offsets of its new frames. ``sync``: a sync follows."""
        before: list[tuple[Segment, int, bytes]] = []
        placed = []
        job = ""
        try:
            self._seal_idle(groups.keys())
            for stream, group in groups.items():
                job = stream[0]
                sequence = group[0].sequence
                segment = self._open_for(stream, sequence) or self._new_segment(stream, sequence, sync)
                before.append((segment, segment.size, segment.tail))
                placed.append((segment, segment.offsets_of(write.size for write in group)))
                segment.write([part for write in group for part in write.frame])
                self._unsynced[segment] = None
                self._open[segment] = self._open.pop(segment)
            for job in {stream[0] for stream in groups} & self._begun.keys():
                self._note_begun(job, self._begun.pop(job))
        except (OSError, BodyChanged) as error:
            why: Exception = error
            try:
                for segment, size, tail in before:
                    segment.go_back(size, tail)
            except Unsound as unsound:
                why = error if isinstance(error, Unsound) else unsound
            raise (as_storage_error(why, job) if isinstance(why, OSError) else why) from None
        return placed

    def _note_begun(self, job: str, begun: Mapping[str, int]) -> None:
        """Notes in the manifest which files must exist, by their first sequences. Skipped on a full disk."""
        with self._saves(job):
            meta = self._metas[job]
            for name, first in begun.items():
                known = meta.streams.get(name, StreamMeta())
                meta.streams[name] = replace(known, next_at_least=max(known.next_at_least, first))
            try:
                self._book.save(job, meta, "")
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise

    def _sync(self) -> None:
        for segment in self._unsynced:
            assert segment.file is not None
            self._sync_file(segment.file)
        self._unsynced.clear()

    def _sync_file(self, file: File) -> None:
        """Syncs a file. A failed sync is never retried: the kernel may have dropped the pages (ATC'20)."""
        try:
            file.sync()
        except OSError as error:
            self._failed = f"a sync failed: {error.strerror}; replace the disk, then start again"
            raise StorageFailed(self._failed) from None

    def _open_for(self, stream: tuple[str, str], sequence: int) -> Segment | None:
        segments = self._streams.get(stream, [])
        last = segments[-1] if segments else None
        if last is None or last.file is None:
            return None
        room = last.size < self.segment_bytes
        return last if last.next_sequence == sequence and room else None

    def _leave_last(self, stream: tuple[str, str]) -> None:
        """Seals the stream's last file, or removes it if it holds no record."""
        segments = self._streams.get(stream, [])
        if not segments or segments[-1].file is None:
            return
        last = segments[-1]
        if last.offsets:
            self._seal(stream, last)
        else:  # empty, it would obstruct the file of its first record, or of earlier ones
            self._disk.remove(last.path)
            self._close(last)
            with self._maps:
                segments.pop()

    def has_file(self, job: str, stream: str, sequence: int) -> bool:
        with self._maps:
            return self._open_for((job, stream), sequence) is not None

    def make_file(self, job: str, stream: str, sequence: int) -> None:
        """Creates the segment that begins with this sequence, unless it exists. Raises as `commit` does."""
        of = (job, stream)
        with self._making:
            try:
                with self._writing:
                    known = job in self._book.lines
                    if self._failed or not known or self._open_for(of, sequence) is not None:
                        return
                    self._seal_idle({of})
                    self._leave_last(of)
                segment = self._made(of, sequence, sync=False)
                with self._writing:
                    self._add(of, segment)
                    begun = self._begun.pop(job)
                self._note_begun(job, begun)
            except OSError as error:
                failure = as_storage_error(error, job)
                if isinstance(failure, StorageFailed):
                    self._failed = self._failed or str(failure)
                raise failure from None

    def _seal_idle(self, wanted: Set[tuple[str, str]]) -> None:
        """Seals segments beyond `open_max` before these streams are written, so that idle jobs do not hold descriptors
        that others need. The least recently written ones go first."""
        if len(self._open) + len(wanted) <= self.open_max:
            return
        excess = len({*wanted, *self._open.values()}) - self.open_max
        # An empty segment stays open for the record that it is named after.
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
        footer = encode_footer(segment.header, len(segment.offsets), size)
        try:
            segment.write([padding(size, FOOTER_BYTES), footer])
            segment.file.resize(segment.size)  # gives back what was reserved
            self._sync_file(segment.file)
        except OSError:
            segment.go_back(size, tail)
            raise
        segment.size = size
        self._close(segment)

    def _new_segment(self, stream: tuple[str, str], sequence: int, sync: bool) -> Segment:
        """Starts a new segment. ``sync``: all writes are synced afterwards, before anything in it is acknowledged."""
        self._leave_last(stream)
        segment = self._made(stream, sequence, sync)
        self._add(stream, segment)
        return segment

    def _add(self, stream: tuple[str, str], segment: Segment) -> None:
        with self._maps:
            self._streams.setdefault(stream, []).append(segment)
        self._open[segment] = stream
        job, name = stream
        self._begun.setdefault(job, {})[name] = segment.first

    def _made(self, stream: tuple[str, str], sequence: int, sync: bool) -> Segment:
        job, name = stream
        line = self._book.lines.get(job)
        assert line is not None, "a generation is durable before anything is written under it"
        folder = self.directory / job / name
        self._disk.make_directory(folder)
        path = folder / segment_name(sequence)
        segment = Segment(
            path, sequence, 0, Owner(job, name, line.uid), line.generation, file=self._disk.create(path)
        )
        assert segment.file is not None
        try:
            segment.write([encode_segment_header(segment.header)])
            if not sync:
                self._sync_file(segment.file)
            self._disk.sync_names(folder)
        except (OSError, StorageFailed) as error:
            segment.file.close()
            try:
                self._disk.remove(path)
            except OSError:  # it would be in the way of a segment of the same name
                raise Unsound(
                    getattr(error, "errno", None), f"{error}, and {path} cannot be removed"
                ) from None
            raise
        return segment

    def _saves(self, job: str) -> threading.Lock:
        """Returns the job's manifest lock. (If `_writing` is needed too, it is taken first.)"""
        return self._saving.setdefault(job, threading.Lock())

    def save(self, job: str, meta: JobMeta) -> None:
        """Replaces a job's manifest, on a full disk in the reserve file's room. Raises as `commit` does."""
        meta = replace(meta, streams=dict(meta.streams))
        uid = self._new_uid().hex()
        before = self._metas.get(job, JobMeta())
        with self._saves(job):
            try:
                self._in_reserve(lambda: self._book.save(job, meta, uid))
            except OSError as error:
                raise as_storage_error(error, job) from None
            self._metas[job] = meta
        if (meta.reset_generation, meta.reset_number) != (before.reset_generation, before.reset_number):
            self._leave_dropped(job, meta)

    def _leave_dropped(self, job: str, meta: JobMeta) -> None:
        """Removes the files that a reset has dropped and that would be written on: no segment has records from before
        and after it. The segments stay for `remove`."""
        with self._maps:
            streams = [stream for stream in self._streams if stream[0] == job]
        for stream in streams:
            first = meta.streams.get(stream[1], StreamMeta()).first
            with self._writing:  # one at a time: other jobs are written between them
                last = next(reversed(self._streams.get(stream, [])), None)
                if last is None or last.file is None or not last.offsets or last.next_sequence > first:
                    continue
                self._close(last)
                try:
                    self._disk.remove(last.path)
                except OSError as error:
                    raise as_storage_error(error, job) from None

    # -- reading and removing -------------------------------------------------------------------------

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        with self._maps:
            for segment in reversed(self._streams.get((job, stream), [])):
                if segment.first <= sequence < segment.next_sequence:
                    offset = segment.offsets[sequence - segment.first]
                    return Place(segment.path, offset, segment.next_sequence, segment.key)
        raise FileNotFoundError(f"record {sequence} of {job}/{stream} is in no segment")

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        begin = place.offset // BLOCK_BYTES * BLOCK_BYTES
        skip = place.offset - begin
        if place.key:
            return self._read_cold(place.key, place.offset, size, buffer)
        try:
            file = self._disk.open(place.path)
        except FileNotFoundError:
            key = self._moved.get(place.path)
            if key is None:
                raise
            return self._read_cold(key, place.offset, size, buffer)
        try:
            read = file.read_into(begin, buffer[: -(-(skip + size) // BLOCK_BYTES) * BLOCK_BYTES])
        finally:
            file.close()
        return buffer[skip : min(skip + size, read)]

    def descriptor(self, place: Place) -> int:
        return self._disk.descriptor(place.path)

    def _read_cold(self, key: str, offset: int, size: int, buffer: memoryview) -> memoryview:
        assert self._cold is not None, "a server with stubs has a store"
        buffer[:size] = self._cold.read(key, offset, size)
        return buffer[:size]

    # -- the cold tier --------------------------------------------------------------------------------

    def move_oldest(self, job: str) -> tuple[str, int] | None:
        """(one thread) Moves a segment of the job to the cold tier: of each stream the oldest may go, of these the
        largest goes. Returns the stream, and the sequence below which all of it is cold; None if there is nothing to
        move. Raises OSError, StorageError."""
        assert self._cold is not None
        stream = self._next_to_move(job)
        if stream is None:
            return None
        with self._maps:
            segment = self._first_hot(stream)
        # After the segment: none is older than a reset that is unknown here.
        meta = self._metas.get(job)
        if (
            segment is None
            or meta is None
            or segment.next_sequence <= meta.streams.get(stream[1], StreamMeta()).first
        ):
            return None  # it is about to be removed: it must not be found behind a reset that has dropped it
        key = key_of(folder_of(meta), stream[1], segment.path)
        try:
            file = self._disk.open(segment.path)
        except FileNotFoundError:
            segment.stays = True  # else it is tried again and again, if it was not we who removed it
            return None
        try:
            scanned = walk(segment.path, source=file, last=False, owner=segment.owner)
            if scanned.damage or scanned.ending is not Ending.SEALED:
                segment.stays = True
                return None
            stub = Stub.of(scanned, file).encode()
            self._cold.move(key, file, stub)
        finally:
            file.close()
        with self._making:  # no job is dropped meanwhile
            with self._maps:
                is_there = segment in self._streams.get(stream, [])
            if not is_there:
                self._cold.remove(key)
                return None
            self._in_reserve(lambda: replace_small_file(self._disk, stub_path(segment.path), stub))
            self._moved[segment.path] = key
            with self._writing:
                with self._maps:
                    segment.key = key
                    is_there = segment in self._streams.get(stream, [])
                self._disk.remove(segment.path)
        if not is_there:
            with self._maps:
                self._objects_of_trimmed.append(segment)
        self._reserve()
        return stream[1], segment.next_sequence

    def _first_hot(self, stream: tuple[str, str]) -> Segment | None:
        """Returns the stream's oldest segment on disk; None if it cannot be moved."""
        for segment in self._streams.get(stream, []):
            if not segment.cold:
                return None if segment.stays or segment.file is not None or not segment.offsets else segment
        return None

    def _next_to_move(self, job: str) -> tuple[str, str] | None:
        """Returns the stream whose oldest segment is the largest. If no sealed one can be moved, seals the largest."""
        with self._maps:
            streams = [stream for stream in self._streams if stream[0] == job]
            sealed = [(found.size, stream) for stream in streams if (found := self._first_hot(stream))]
            if sealed:
                return max(sealed)[1]
            open_ones = [
                (segments[-1].size, stream)
                for stream in streams
                if (segments := self._streams[stream])
                and segments[-1].file is not None
                and segments[-1].offsets
                and all(segment.cold for segment in segments[:-1])
            ]
        if not open_ones or max(open_ones)[0] < min(_SEALED_BYTES_LEAST, self.segment_bytes // 2):
            return None
        stream = max(open_ones)[1]
        with self._writing:
            if not self._failed:
                self._leave_last(stream)
        return stream

    def clean_cold(self) -> None:
        """(the same thread) Removes objects of what was trimmed or dropped. Raises OSError."""
        assert self._cold is not None
        while True:
            with self._maps:
                segment = next(iter(self._objects_of_trimmed), None)
            if segment is None:
                break
            self._cold.remove(segment.key)
            with self._making:  # a later job of that name may have a stub there
                with self._maps:
                    owed = segment in self._objects_of_trimmed
                if owed:
                    self._disk.remove(stub_path(segment.path))
                    self._moved.pop(segment.path, None)
                    with self._maps:
                        self._objects_of_trimmed.remove(segment)
        for cold, job in list(self._objects_of_lost.items()):
            try:
                self.check_lost(job, cold)
                self._remove_all(cold)
            except StorageError:
                del self._objects_of_lost[cold]
                raise
            del self._objects_of_lost[cold]
        for grave, uid in list(self._objects_of_dropped.items()):
            self._remove_all(uid)
            self._disk.remove_tree(grave)
            del self._objects_of_dropped[grave]

    def _remove_all(self, folder: str) -> None:
        assert self._cold is not None
        for key in self._cold.keys(folder):
            self._cold.remove(key)

    def cold_folder(self, job: str) -> str:
        meta = self._metas.get(job)
        return folder_of(meta) if self._cold is not None and meta is not None else ""

    def read_lost(self, job: str, cold: str) -> RecoveredJob:
        """Reads what a lost server has moved of a job. From then on `locate` and `read` know it by the name that the
        answer has. Raises OSError, StorageError."""

        def take(stream: StreamState, segments: list[Segment]) -> None:
            with self._maps:
                self._streams[stream.job, stream.name] = segments

        of = Recovery(self._disk, self.directory, job, self._book, self._acked, self.segment_bytes)
        return of.moved(f"{job}@{cold}", cold, self._stubs(cold), take)

    def drop_lost(self, job: str, cold: str) -> None:
        """Forgets that. Its objects are removed once the store answers, if they are the job's."""
        self._close_all(f"{job}@{cold}")
        self._objects_of_lost[cold] = job

    def check_lost(self, job: str, cold: str) -> None:
        """Raises StorageError if what is there is not the job's, or of this server; OSError."""
        assert self._cold is not None
        stubs = self._stubs(cold)
        headers = [stub.read(0, SEGMENT_HEADER_BYTES) for found in stubs.values() for stub in found.values()]
        known = {f"{cold}/{stream}/{segment_name(first)}" for stream in stubs for first in stubs[stream]}
        for key in set(self._cold.keys(cold)) - known:
            with suppress(FileNotFoundError):  # there is a stub, and no segment
                headers.append(bytes(self._cold.read(key, 0, SEGMENT_HEADER_BYTES)))
        try:
            owners = {decode_segment_header(header).job for header in headers}
        except (RecordCorrupt, RecordInvalid) as error:
            raise StorageError(f"a segment in {cold} is damaged: {error}") from None
        uids = {meta.uid for meta in list(self._metas.values())}  # jobs come meanwhile
        if owners - {job} or cold.partition("/")[0] in uids:
            raise StorageError(f"what is in {cold} is not a lost server's of job {job}")

    def _stubs(self, cold: str) -> dict[str, dict[int, Stub]]:
        assert self._cold is not None
        try:
            return self._cold.stubs(cold)
        except ManifestDamaged as error:
            raise StorageError(f"a stub in {self._cold.url}/{cold} is damaged: {error}") from None

    def clean_left(self) -> None:
        """(the same thread, once) Removes objects that a kill has left without a stub. Raises OSError."""
        assert self._cold is not None
        for job, meta in list(self._metas.items()):  # those of a quarantined job stay
            found = self._cold.keys(meta.uid)
            with self._maps:
                mine = [segment for of, some in self._streams.items() if of[0] == job for segment in some]
                known = {segment.key for segment in (*mine, *self._objects_of_trimmed)}
            for key in found:
                if key not in known:
                    self._cold.remove(key)

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Unlinks whole segments. Returns the freed bytes. The manifest records where the stream continues."""
        with self._writing:
            segments = self._streams.get((job, stream), [])
            # An empty segment at the end stays: the next record's file has its name.
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
                self._objects_of_trimmed += [segment for segment in dead if segment.cold]
        dead = [segment for segment in dead if not segment.cold]
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
        """Renames a job's directory for deletion. Returns a function that removes its files, which may take long."""
        with self._making, self._writing, self._saves(job):
            try:
                there = bury(self._disk, self.directory, job)
            except StorageFailed as failed:
                self._failed = str(failed)
                raise
            except OSError as error:
                raise as_storage_error(error) from None
            self._close_all(job)
            self._forget(job)
        return self._remove_forgotten if there else lambda: None

    def _forget(self, job: str) -> None:
        """Forgets what is kept of the job outside its directory. A leftover is harmless: it has no directory."""
        line = self._book.lines.get(job)
        if line is not None and self._cold is not None:
            with self._maps:
                self._objects_of_trimmed = [
                    dead for dead in self._objects_of_trimmed if dead.owner.uid != line.uid
                ]
            self._moved = {path: key for path, key in self._moved.items() if not key.startswith(line.uid)}
        if line is not None:
            self._acked.forget(bytes.fromhex(line.uid))
        self._metas.pop(job, None)
        self._saving.pop(job, None)
        self._begun.pop(job, None)
        with suppress(OSError):
            self._book.forget(job)

    def _remove_forgotten(self) -> None:
        """Removes dropped jobs. Of those that may have objects, the manifest stays, which has the job's uid."""
        graves = [name for name, is_dir in self._disk.names(self.directory) if is_dir and is_grave(name)]
        for grave in map(self.directory.joinpath, graves):
            meta = None
            if self._cold is not None:
                with suppress(OSError, ManifestDamaged):
                    meta = manifests.load_manifest(self._disk, grave)
            if meta is None:
                self._disk.remove_tree(grave)
                continue
            self._objects_of_dropped[grave] = meta.uid
            for name, is_dir in self._disk.names(grave):
                if is_dir:
                    self._disk.remove_tree(grave / name)
        self._reserve()

    def close(self) -> None:
        """Seals what can be sealed and closes all files. The next start recovers from what fails here."""
        with self._writing:
            for segment, stream in list(self._open.items()):
                # An unsealed segment is valid: the next start scans it. An empty one waits for the record that it is
                # named after.
                with suppress(OSError, StorageFailed):
                    if segment.offsets and not self._failed:
                        self._seal(stream, segment)
                self._close(segment)
            self._acked.close()
        self._disk.close()

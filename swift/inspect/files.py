"""A log from its files. Reads only, so a server may run beside it: what is shown is what a server would find if it
started now, but for records that are being written.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift.errors import LogError, RecordCorrupt, ServiceError
from swift.inspect.facts import JobFacts, LogFacts, SegmentFacts, StreamFacts, Verified
from swift.log.acked import NAME as ACKED
from swift.log.acked import NOTHING, Of, read_acked
from swift.log.directory import (
    age_s,
    check_directory,
    check_job,
    free_bytes,
    in_the_way,
    load_manifest,
    segment_paths,
    server_runs,
    sub_directories,
)
from swift.log.frame import FrameHeader, decode_record
from swift.log.manifest import GRANTED, NO_UID, JobMeta, StreamMeta
from swift.log.record import Record, stream_tag
from swift.log.segment import (
    FILE_BYTES_LEAST,
    SEQUENCE_MAX,
    Ending,
    Owner,
    ScannedRecord,
    SegmentScan,
    walk,
)
from swift.log.unlogged import declared

_LOOKS = 5
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Stored:
    """A record in a file."""

    path: Path
    scanned: ScannedRecord

    @property
    def header(self) -> FrameHeader:
        return self.scanned.header

    def read(self) -> Record:
        """Checked down to the digest. Raises RecordCorrupt; FileNotFoundError if it was dropped meanwhile."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.pread(fd, self.header.frame_bytes, self.scanned.offset)
        finally:
            os.close(fd)
        if len(data) != self.header.frame_bytes:
            raise RecordCorrupt(f"{self.header.key}: the file ends within it")
        return decode_record(self.header, memoryview(data)[self.header.header_bytes :])


class Apart(ServiceError):
    """A log server that starts now serves nothing of this job."""

    exit_code = 1

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}; put it right, or drop the job (--drop-job)")


class DirectoryLog:
    """The log in a server's directory. UsageError: it is none."""

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        self.directory = directory
        self.server_runs = server_runs(directory)
        self._acked: Mapping[Of, int] = NOTHING

    def facts(self, job: str = "", stream: str = "", verify: bool = False) -> LogFacts:
        """Of one job, one stream, or all. UsageError: there is none of that name."""
        if job:
            check_job(self.directory, job)
        facts = LogFacts(source=str(self.directory), server_runs=self.server_runs)
        facts.verified = Verified() if verify else None
        try:  # before the files: a server that runs beside goes on
            self._acked = read_acked(self.directory)
        except OSError as error:
            why = f"cannot be read ({error.strerror}): what was acknowledged is unknown"
            facts.alarm = f"{self.directory / ACKED} {why}"
        for name in [job] if job else sub_directories(self.directory):
            facts.jobs.append(self._job(name, stream, facts.verified))
        if not job:
            facts.jobs += self._in_the_way()
        facts.used_bytes = sum(job_facts.bytes for job_facts in facts.jobs)
        free = free_bytes(self.directory)
        facts.limit_bytes = facts.used_bytes + free if free is not None else 0
        if facts.verified is not None:
            facts.verified.damage += facts.problems()
        return facts

    def _job(self, name: str, only: str, verified: Verified | None) -> JobFacts:
        facts = JobFacts(job=name, idle_seconds=age_s(self.directory, name) or 0.0)
        try:
            meta = load_manifest(self.directory, name)
        except ServiceError as error:
            facts.problem = str(error)
            meta = JobMeta()
        facts.generation, facts.trimmed_below_step = meta.generation, meta.trimmed_below_step
        folder = self.directory / name
        for stream in sorted({*meta.streams, *sub_directories(folder)}):
            if only in ("", stream):
                try:
                    facts.streams.append(self._stream(name, stream, meta, verified))
                except Apart as apart:
                    facts.problem = facts.problem or str(apart)
        for stream in in_the_way(folder):
            facts.problem = facts.problem or str(Apart(folder / stream, "it is not a directory"))
        facts.records = sum(stream.records for stream in facts.streams)
        facts.bytes = sum(stream.bytes for stream in facts.streams)
        return facts

    def _in_the_way(self) -> list[JobFacts]:
        """(A file that somebody has put here is nobody's, unless a job of that name was here.)"""
        paths = [self.directory / name for name in in_the_way(self.directory)]
        return [
            JobFacts(job=path.name, problem=str(Apart(path, "it is not a directory")))
            for path in paths
            if not path.is_file() or path.is_symlink() or path.with_name(f"{GRANTED}{path.name}").exists()
        ]

    def _stream(self, job: str, name: str, meta: JobMeta, verified: Verified | None) -> StreamFacts:
        scans = self._scans(job, name, meta, verify_bodies=verified is not None)
        meta = self._meta_now(job, meta)
        self._check_generation(scans, meta)
        stream_meta, trimmed = meta.streams.get(name, StreamMeta()), meta.trimmed_below_step
        first = stream_meta.first
        facts = StreamFacts(
            stream=name, first_sequence=first, durable_sequence=first, appended_sequence=first, segments=[]
        )
        if stream_meta.quarantined:
            facts.problems.append(f"quarantined: {stream_meta.quarantined}")
        expected = first
        for scan in scans:
            expected = self._segment(scan, facts, expected, trimmed, verified)
        acked = self._acked.get((bytes.fromhex(meta.uid), stream_tag(job, name)), 0)
        for at_least, what in ((stream_meta.next_at_least, "durable"), (acked, "acknowledged")):
            if expected < at_least:
                facts.problems.append(f"records {expected} to {at_least - 1} were {what} and are gone")
                expected = at_least
        facts.durable_sequence = facts.appended_sequence = expected
        return facts

    def _meta_now(self, job: str, before: JobMeta) -> JobMeta:
        """Beside a server the manifest is read again after the files: a trim or a fence may have come between."""
        if self.server_runs:
            try:
                return load_manifest(self.directory, job)
            except ServiceError:
                pass  # it was told already
        return before

    @staticmethod
    def _check_generation(scans: Sequence[SegmentScan], meta: JobMeta) -> None:
        for scan in scans if meta.uid != NO_UID else ():
            headers = [scan.header, *(record.header for record in scan.records)]
            newest = max((header.generation for header in headers if header is not None), default=0)
            if newest > meta.generation:
                raise Apart(scan.path, f"it is of generation {newest}, the manifest of {meta.generation}")

    def _scans(self, job: str, name: str, meta: JobMeta, *, verify_bodies: bool) -> list[SegmentScan]:
        paths = segment_paths(self.directory, job, name)
        owner = Owner(job, name, meta.uid) if meta.uid != NO_UID else None
        scans = []
        for index, path in enumerate(paths):
            last = index == len(paths) - 1
            try:
                self._check_file(path)
                scan = walk(path, verify_bodies=verify_bodies, last=last, owner=owner)
                for _ in range(_LOOKS if last and self.server_runs else 0):
                    if not scan.damage:
                        break
                    time.sleep(_LOOK_AGAIN_S)  # a record that is being written looks damaged for a moment
                    scan = walk(path, verify_bodies=verify_bodies, last=last, owner=owner)
            except FileNotFoundError:
                continue  # trimmed meanwhile
            except OSError as error:
                raise Apart(path, error.strerror or str(error)) from None
            scans.append(scan)
        return scans

    @staticmethod
    def _check_file(path: Path) -> None:
        if int(path.stem) > SEQUENCE_MAX:
            raise Apart(path, "it is named after a record that there cannot be")
        size = path.lstat().st_size
        if size > FILE_BYTES_LEAST:
            raise Apart(path, f"it has {size} bytes: no segment has so many")

    def _segment(
        self, scan: SegmentScan, facts: StreamFacts, expected: int, trimmed: int, verified: Verified | None
    ) -> int:
        """Adds a file's facts; gives the sequence that the next one begins with."""
        begin = int(scan.path.stem)
        if begin > expected:
            facts.problems.append(f"records {expected} to {begin - 1} are gone")
        steps = {record.header.sequence: record.header.key.step for record in scan.records}
        told: set[int] = set()
        for damage in scan.damage:
            end = damage.end_sequence if damage.end_sequence is not None else damage.sequence + 1
            counts = end > facts.first_sequence and steps.get(damage.sequence, trimmed) >= trimmed
            if counts and damage.sequence not in told:
                told.add(damage.sequence)  # a footer may say the same once more
                facts.problems.append(f"{scan.path.name}: {damage.reason}")
            expected = max(expected, end)
        for record in scan.records:
            if _kept(record, facts.first_sequence, trimmed):
                _count(record, facts)
                if verified is not None and not record.damaged:
                    _verify(Stored(scan.path, record), facts, verified)
            expected = max(expected, record.header.sequence + 1)
        assert facts.segments is not None
        ending = "damaged" if scan.damage else str(scan.ending)
        facts.segments.append(
            SegmentFacts(
                name=scan.path.name,
                first_sequence=begin,
                records=len(scan.records),
                bytes=scan.size,
                ending="open" if ending == Ending.CLEAN else ending,
                torn_bytes=scan.torn_bytes,
            )
        )
        return max(expected, begin)

    def records(self, job: str, stream: str, wanted: Callable[[int], bool]) -> Iterator[tuple[str, Record]]:
        """(stream, record) of the steps that are wanted. RecordCorrupt: one of them is damaged."""
        check_job(self.directory, job)
        meta = load_manifest(self.directory, job)
        for name in sorted({*meta.streams, *sub_directories(self.directory / job)}):
            if stream not in ("", name):
                continue
            first = meta.streams.get(name, StreamMeta()).first
            for scan in self._scans(job, name, meta, verify_bodies=False):
                there = {record.header.sequence for record in scan.records}
                unknown = [
                    damage
                    for damage in scan.damage
                    if damage.sequence not in there and (damage.end_sequence or damage.sequence + 1) > first
                ]
                for record in scan.records:
                    if _kept(record, first, meta.trimmed_below_step) and wanted(record.header.key.step):
                        yield name, _read(name, Stored(scan.path, record))
                if unknown:
                    raise RecordCorrupt(f"{name}: {unknown[0].reason}; nobody knows of which steps it was")


def _read(stream: str, stored: Stored) -> Record:
    try:
        return stored.read()
    except LogError as error:
        raise RecordCorrupt(f"{stream} record {stored.header.sequence}: {error}") from None


def _kept(record: ScannedRecord, first: int, trimmed: int) -> bool:
    return record.header.sequence >= first and record.header.key.step >= trimmed


def _count(record: ScannedRecord, facts: StreamFacts) -> None:
    step = record.header.key.step
    facts.records += 1
    facts.bytes += record.header.frame_bytes
    facts.first_step = step if facts.first_step is None else min(facts.first_step, step)
    facts.last_step = step if facts.last_step is None else max(facts.last_step, step)
    steps = declared(record.header.key)
    if steps is not None:
        begin, end = facts.unlogged or steps
        facts.unlogged = (min(begin, steps.first), max(end, steps.last))


def _verify(stored: Stored, facts: StreamFacts, verified: Verified) -> None:
    try:
        stored.read()
    except FileNotFoundError:
        return  # trimmed meanwhile
    except LogError as error:
        where = f"record {stored.header.sequence} at offset {stored.scanned.offset}"
        facts.problems.append(f"{stored.path.name}: {where}: {error}")
        return
    verified.records += 1
    verified.bytes += stored.header.frame_bytes

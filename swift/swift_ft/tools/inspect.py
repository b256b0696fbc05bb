"""`swift-ft inspect`: shows the contents of a log, of a running server or of a directory."""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# gRPC reads this at import: otherwise its own messages about an absent server would appear next to ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from swift_ft._pb import log_pb2
from swift_ft.cli_parser import Parser, add_json, argument, check_file, command, local_directory, write_json
from swift_ft.credentials import advised
from swift_ft.errors import LogError, LogUnavailable, RecordCorrupt, ServiceError, UsageError
from swift_ft.files import open_regular, read_regular
from swift_ft.log import admin
from swift_ft.log.directory import (
    LIVES_S,
    NOTHING,
    Of,
    age_s,
    check_directory,
    check_job,
    cold_url,
    forget_job,
    free_bytes,
    in_the_way,
    load_manifest,
    owned,
    read_acked,
    remove_forgotten,
    segment_paths,
    server_runs,
    sub_directories,
)
from swift_ft.log.directory import NAME as ACKED
from swift_ft.log.frame import decode_record
from swift_ft.log.manifest import GRANTED, NO_UID, JobMeta, ManifestDamaged, StreamMeta
from swift_ft.log.record import Record, Steps, declared, spanned, stream_tag
from swift_ft.log.segment import (
    COLD_SUFFIX,
    FILE_BYTES_LEAST,
    SEQUENCE_MAX,
    STUB_BYTES_MAX,
    SUFFIX,
    Ending,
    Owner,
    ScannedRecord,
    SegmentScan,
    Stub,
    walk,
)
from swift_ft.text import job_called, show, size_words, table, tell, time_words

# Facts about a log, from a server over gRPC or from the files of a directory.


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentFacts:
    name: str
    first_sequence: int
    records: int
    bytes: int
    ending: str
    torn_bytes: int


@dataclass(kw_only=True, slots=True)
class StreamFacts:
    """One stream. first <= durable <= appended; durable and appended are exclusive ends."""

    stream: str
    first_sequence: int
    durable_sequence: int
    appended_sequence: int
    records: int = 0
    bytes: int = 0
    moved_bytes: int = 0
    """Of these, bytes in an object store (a directory)."""
    first_step: int | None = None
    last_step: int | None = None
    unlogged: Steps | None = None
    """From the first to the last step that the writer has declared unlogged."""
    segments: list[SegmentFacts] | None = None
    """None: not reported by a server."""
    problems: list[str] = field(default_factory=list)
    """Reasons of holes and of the quarantine."""


@dataclass(kw_only=True, slots=True)
class JobFacts:
    job: str
    generation: int = 0
    trimmed_below_step: int = 0
    records: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    """0: no quota."""
    alarm: str = ""
    idle_seconds: float = 0.0
    """Seconds since the job was last written, read or queried (a server), or since a file changed (a directory)."""
    writers: int | None = None
    """Streams open for appending. None: unknown for a directory."""
    problem: str = ""
    """Reason why the other fields are empty."""
    streams: list[StreamFacts] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Verified:
    records: int = 0
    bytes: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class LogFacts:
    source: str
    used_bytes: int = 0
    limit_bytes: int = 0
    """Maximum of kept bytes, by quota or by the disk's space; 0: unknown."""
    alarm: str = ""
    """Reason of an alarm; empty: none."""
    cold: str = ""
    """URL of the object store to which segments of a directory are moved; empty: none."""
    server_runs: bool | None = None
    jobs: list[JobFacts] = field(default_factory=list)
    verified: Verified | None = None

    def problems(self) -> list[str]:
        lines = [f"{job.job}: {job.problem}" for job in self.jobs if job.problem]
        return lines + [
            f"{job.job}/{stream.stream}: {problem}"
            for job in self.jobs
            for stream in job.streams
            for problem in stream.problems
        ]


# Log from files. It only reads, so a server may run at the same time. It shows what a server would recover if it
# started now, except for records that are being written.

MOVED = "moved"
"""How a segment ends that is in an object store."""
_LOOKS = 5
_LOOK_AGAIN_S = 0.1


def _stored(path: Path, scanned: ScannedRecord) -> Record:
    """Reads a record and verifies its checksums and digest. Raises RecordCorrupt, or FileNotFoundError if it was
    dropped."""
    header = scanned.header
    fd = open_regular(path, os.O_RDONLY)
    try:
        data = os.pread(fd, header.frame_bytes, scanned.offset)
    finally:
        os.close(fd)
    if len(data) != header.frame_bytes:
        raise RecordCorrupt(f"{header.key}: the file ends within it")
    return decode_record(header, memoryview(data)[header.header_bytes :])


class Apart(ServiceError):
    """The job is quarantined by a log server that starts now."""

    exit_code = 1

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}; put it right, or drop the job (--drop-job)")


class DirectoryLog:
    """The log in a server's directory. Raises UsageError if it is none."""

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        self.directory = directory
        self.server_runs = server_runs(directory)
        self._acked: Mapping[Of, int] = NOTHING

    def facts(self, job: str = "", verify: bool = False) -> LogFacts:
        """Returns the facts of one job, or all. Raises UsageError if there is no job of that name."""
        if job:
            check_job(self.directory, job)
        facts = LogFacts(source=str(self.directory), server_runs=self.server_runs)
        facts.verified = Verified() if verify else None
        try:  # read before the files: a running server may append meanwhile
            self._acked = read_acked(self.directory)
        except OSError as error:
            why = f"cannot be read ({error.strerror}): what was acknowledged is unknown"
            facts.alarm = f"{self.directory / ACKED} {why}"
        facts.cold = cold_url(self.directory)
        for name in [job] if job else sub_directories(self.directory):
            facts.jobs.append(self._job(name, facts.verified))
        if not job:
            facts.jobs += self._in_the_way()
        moved = sum(of.moved_bytes for job_facts in facts.jobs for of in job_facts.streams)
        facts.used_bytes = sum(job_facts.bytes for job_facts in facts.jobs) - moved
        free = free_bytes(self.directory)
        facts.limit_bytes = facts.used_bytes + free if free is not None else 0
        if facts.verified is not None:
            facts.verified.damage += facts.problems()
        return facts

    def _job(self, name: str, verified: Verified | None) -> JobFacts:
        facts = JobFacts(job=name, idle_seconds=age_s(self.directory, name) or 0.0)
        try:
            meta = load_manifest(self.directory, name)
        except ServiceError as error:
            facts.problem = str(error)
            meta = JobMeta()
        facts.generation, facts.trimmed_below_step = meta.generation, meta.trimmed_below_step
        folder = self.directory / name
        for stream in sorted({*meta.streams, *sub_directories(folder)}):
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
        """Returns jobs in whose place there is no directory. (An unrelated file is ignored, unless a job of that name
        existed.)"""
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
        """Reads the manifest again if a server runs: a trim or a fence may have come after the first read."""
        if self.server_runs:
            try:
                return load_manifest(self.directory, job)
            except ServiceError:
                pass  # it was reported already
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
                if path.suffix == COLD_SUFFIX:
                    scans.append(self._moved(path, owner))
                    continue
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
    def _moved(path: Path, owner: Owner | None) -> SegmentScan:
        """Scans a segment by its stub: bodies are verified when the server reads them."""
        try:
            stub = Stub.decode(read_regular(path, STUB_BYTES_MAX))
        except ManifestDamaged as error:
            raise Apart(path, f"it is damaged: {error}") from None
        scan = walk(path.with_suffix(SUFFIX), verify_bodies=False, last=False, source=stub, owner=owner)
        scan.path = path
        return scan

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
        """Adds a file's facts. Returns the first sequence expected in the next file."""
        begin = int(scan.path.stem)
        if begin > expected:
            facts.problems.append(f"records {expected} to {begin - 1} are gone")
        moved = scan.path.suffix == COLD_SUFFIX
        steps = {record.header.sequence: record.header.key.step for record in scan.records}
        told: set[int] = set()
        for damage in scan.damage:
            end = damage.end_sequence if damage.end_sequence is not None else damage.sequence + 1
            counts = end > facts.first_sequence and steps.get(damage.sequence, trimmed) >= trimmed
            if counts and damage.sequence not in told:
                told.add(damage.sequence)  # a footer may report the same damage again
                facts.problems.append(f"{scan.path.name}: {damage.reason}")
            expected = max(expected, end)
        for record in scan.records:
            if _kept(record, facts.first_sequence, trimmed):
                _count(record, facts)
                if moved:
                    facts.moved_bytes += record.header.frame_bytes
                elif verified is not None and not record.damaged:
                    _verify(scan.path, record, facts, verified)
            expected = max(expected, record.header.sequence + 1)
        assert facts.segments is not None
        ending = "damaged" if scan.damage else MOVED if moved else str(scan.ending)
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


def _kept(record: ScannedRecord, first: int, trimmed: int) -> bool:
    return record.header.sequence >= first and record.header.key.step >= trimmed


def _count(record: ScannedRecord, facts: StreamFacts) -> None:
    step = record.header.key.step
    facts.records += 1
    facts.bytes += record.header.frame_bytes
    facts.first_step = min(step, facts.first_step if facts.first_step is not None else step)
    facts.last_step = max(step, facts.last_step or 0)
    facts.unlogged = spanned((facts.unlogged, declared(record.header.key)))


def _verify(path: Path, scanned: ScannedRecord, facts: StreamFacts, verified: Verified) -> None:
    try:
        _stored(path, scanned)
    except FileNotFoundError:
        return  # trimmed meanwhile
    except LogError as error:
        where = f"record {scanned.header.sequence} at offset {scanned.offset}"
        facts.problems.append(f"{path.name}: {where}: {error}")
        return
    verified.records += 1
    verified.bytes += scanned.header.frame_bytes


def served_facts(address: str, timeout_s: float, job: str = "") -> LogFacts:
    """Returns the facts of a running server, of one job, or all. Raises UsageError if there is no such job,
    or LogUnavailable."""
    status = admin.status(address, timeout_s, at_once=True)
    known = [held.job for held in status.jobs]
    if job and job not in known:
        raise UsageError(f"there is no job {job} on {address}; there are: {', '.join(known) or 'none'}")
    return LogFacts(
        source=address,
        used_bytes=status.space.used_bytes,
        limit_bytes=status.space.limit_bytes,
        alarm=status.closed_reason or status.space.reason,
        server_runs=True,
        jobs=[_served_job(address, timeout_s, held) for held in status.jobs if job in ("", held.job)],
    )


def _served_job(address: str, timeout_s: float, status: log_pb2.JobStatus) -> JobFacts:
    inventory = admin.inventory(address, status.job, timeout_s)
    return JobFacts(
        job=status.job,
        generation=status.generation,
        trimmed_below_step=status.trimmed_below_step,
        records=status.records,
        bytes=status.space.used_bytes,
        limit_bytes=status.space.limit_bytes,
        alarm=status.space.reason,
        idle_seconds=status.idle_seconds,
        writers=status.writers,
        streams=[
            StreamFacts(
                stream=held.stream,
                first_sequence=held.first_sequence,
                durable_sequence=held.durable_sequence,
                appended_sequence=held.next_sequence,
                records=held.records,
                bytes=held.bytes,
                first_step=held.first_step if held.has_records else None,
                last_step=held.last_step if held.has_records else None,
                unlogged=admin.unlogged(held),
                problems=[*([f"quarantined: {held.quarantined}"] if held.quarantined else []), *held.holes],
            )
            for held in inventory
        ],
    )


# The same as text for people.


def _steps_of(stream: StreamFacts) -> str:
    steps = "-" if stream.first_step is None else f"{stream.first_step} to {stream.last_step}"
    return steps if stream.unlogged is None else steps + " but {} to {}".format(*stream.unlogged)


def _state_of(stream: StreamFacts) -> str:
    problems = len(stream.problems)
    return f"{problems} problem{'s' if problems > 1 else ''}" if problems else "ok"


# Title of a column -> its cell. Texts are on the left of their column, numbers on the right.
_OF_JOB: Mapping[str, Callable[[JobFacts], str]] = {
    "job": lambda job: job.job,
    "generation": lambda job: str(job.generation),
    "trimmed below step": lambda job: str(job.trimmed_below_step),
    "streams": lambda job: str(len(job.streams)),
    "records": lambda job: str(job.records),
    "size": lambda job: size_words(job.bytes),
    "of": lambda job: size_words(job.limit_bytes) if job.limit_bytes else "-",
    "writers": lambda job: "-" if job.writers is None else str(job.writers),
    "idle": lambda job: time_words(job.idle_seconds),
}
_OF_STREAM: Mapping[str, Callable[[StreamFacts], str]] = {
    "stream": lambda stream: stream.stream,
    "first": lambda stream: str(stream.first_sequence),
    "durable": lambda stream: str(stream.durable_sequence),
    "appended": lambda stream: str(stream.appended_sequence),
    "records": lambda stream: str(stream.records),
    "size": lambda stream: size_words(stream.bytes),
    "steps": _steps_of,
    "segments": lambda stream: "-" if stream.segments is None else str(len(stream.segments)),
    "state": _state_of,
}
_LEFT = {"job", "stream", "state", "steps"}


def lines(facts: LogFacts) -> list[str]:
    streams = [(job.job, stream) for job in facts.jobs for stream in job.streams]
    moved = sum(each.ending == MOVED for _, stream in streams for each in stream.segments or [])
    moved_bytes = sum(stream.moved_bytes for _, stream in streams)
    alarms = [alarm for alarm in (facts.alarm, *(job.alarm for job in facts.jobs)) if alarm]
    return [
        _head(facts),
        *_table(_OF_JOB, [_cells(_OF_JOB, job) for job in facts.jobs]),
        *_table(("job", *_OF_STREAM), [[job, *_cells(_OF_STREAM, stream)] for job, stream in streams]),
        *([f"in {facts.cold}: {moved} segments, {size_words(moved_bytes)}"] if facts.cold else []),
        *(f"alarm: {alarm}" for alarm in alarms),
        *(f"problem: {problem}" for problem in facts.problems() if facts.verified is None),
    ]


def _cells(columns: Mapping[str, Callable[[Any], str]], row: object) -> list[str]:
    return [cell(row) for cell in columns.values()]


def _head(facts: LogFacts) -> str:
    of = f" of {size_words(facts.limit_bytes)} that it may" if facts.limit_bytes else ""
    words = {True: "a log server runs on it", False: "no log server runs on it", None: ""}
    runs = f"; {words[facts.server_runs]}" if words[facts.server_runs] and ":" not in facts.source else ""
    return f"{facts.source} keeps {size_words(facts.used_bytes)}{of}{runs}"


def _table(columns: Iterable[str], rows: Sequence[Sequence[str]]) -> list[str]:
    names = list(columns)
    left = [at for at, name in enumerate(names) if name in _LEFT]
    return ["", *table([names, *rows], left)] if rows else []


# The command.

EXIT_DAMAGE = 1
TIMEOUT_S_MAX = 3600.0


def _check(given: argparse.Namespace) -> None:
    if (given.directory is None) == (not given.server):
        raise UsageError("give --directory DIR or --server HOST:PORT, one of them")
    if given.verify and given.directory is None:
        raise UsageError("--verify reads files: give --directory; a server may be running there")
    if given.drop_job and given.verify:
        raise UsageError("--drop-job goes alone")
    if given.force and not given.drop_job:
        raise UsageError("--force is for --drop-job")
    check_file("--json", given.json)
    if not 0 < given.timeout_s <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout-s must be positive, at most {TIMEOUT_S_MAX:g}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="swift-ft inspect",
        description="Shows what is in the log, verifies it, drops the log of a job.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 1 something is damaged, 2 usage, 3 the server or the disk does not allow it",
    )
    parser.add_argument(
        "--directory",
        type=argument(local_directory),
        metavar="DIR",
        help="a log server's directory; the server may be running",
    )
    parser.add_argument("--server", default="", metavar="HOST:PORT", help="ask a running log server")
    parser.add_argument("--job", type=argument(job_called), help="only this job")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every record, down to its digest; print a line for each damage",
    )
    parser.add_argument(
        "--drop-job",
        type=argument(job_called),
        metavar="JOB",
        help="delete a job's log: its records, its generation, its trim",
    )
    parser.add_argument("--force", action="store_true", help="drop the job even if it may live")
    add_json(parser)
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=10.0,
        help="how long to wait for a server's answer; default %(default)s",
    )
    given = parser.parse_args(argv)
    _check(given)
    given.job = given.job or ""
    return given


def run(config: argparse.Namespace) -> int:
    if config.drop_job:
        return _drop(config)
    if config.directory is not None:
        facts = DirectoryLog(config.directory).facts(config.job, config.verify)
    else:
        facts = served_facts(config.server, config.timeout_s, config.job)
    write_json(config.json, asdict(facts))
    show(lines(facts))
    return _verdict(facts)


def _verdict(facts: LogFacts) -> int:
    if facts.verified is not None:
        count = len(facts.verified.damage)
        words = f"{count} damaged" if count else "all is well"
        checked = f"{facts.verified.records} records, {size_words(facts.verified.bytes)}"
        show([*(f"damaged: {line}" for line in facts.verified.damage), "", f"verified {checked}: {words}"])
        return EXIT_DAMAGE if count else 0
    problems = [job.problem for job in facts.jobs if job.problem]
    for problem in problems:
        tell(problem, "inspect")
    return EXIT_DAMAGE if problems else 0


def _drop(config: argparse.Namespace) -> int:
    job = config.drop_job
    if config.directory is None:
        records, size = admin.drop(config.server, job, config.timeout_s, force=config.force)
    else:
        records, size = _drop_offline(config.directory, job, config.force)
    write_json(config.json, {"dropped": job, "records": records, "bytes": size})
    print(f"job {job} is dropped: {records} records, {size_words(size)}")
    return 0


def _drop_offline(directory: Path, job: str, force: bool) -> tuple[int, int]:
    check_directory(directory)
    with owned(directory):
        check_job(directory, job)
        touched_s = age_s(directory, job) or 0.0
        if touched_s < LIVES_S and not force:
            raise ServiceError(
                f"job {job} was written {touched_s:.0f} s ago, and its coordinator may come back to it: end it, "
                f"wait {LIVES_S - touched_s:.0f} s, then drop it; or add --force"
            )
        (facts,) = DirectoryLog(directory).facts(job).jobs
        forget_job(directory, job)
        remove_forgotten(directory)
    return facts.records, facts.bytes


@command
def main(argv: Sequence[str]) -> int:
    config = parse(argv)
    try:
        return run(config)
    except LogUnavailable as error:
        raise LogUnavailable(advised(config.server, str(error))) from None

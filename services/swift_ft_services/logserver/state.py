"""What the parts of the server share: the core behind its one lock, the storage, who is connected.

``changed`` guards the core and everything in `ServerState`; no record is written or read, and nothing is synced, while
it is held. Nothing here knows of threads: the server gives a condition variable, a simulation nothing of the kind.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from swift_ft._pb import log_pb2
from swift_ft.errors import UsageError
from swift_ft.log.frame import HEADER_BYTES_MAX, Assembler
from swift_ft.log.protocol import Fsync, Reason
from swift_ft.log.record import check_name
from swift_ft_services.logserver.core import JobState, LogCore, Refusal, StreamState
from swift_ft_services.logserver.quotas import Notice, Space, SpaceConfig
from swift_ft_services.logserver.storage_interface import Storage

CONDITIONS = ("serving", "full", "failed", "draining")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of a server: how it syncs, and its bounds."""

    fsync: Fsync = Fsync.ALWAYS
    """Of streams whose writers do not say."""
    fsync_interval_s: float = 0.1
    credit_bytes: int = 64 << 20
    """Bytes that one writer may have under way."""
    body_bytes_max: int = 256 << 20
    """Largest body that is accepted."""
    jobs_max: int = 1024
    job_streams_max: int = 8192
    job_readers_max: int = 1024
    """Read calls of a job under way."""
    job_records_max: int = 4_000_000
    """Records that are kept of a job: each takes about 450 bytes of memory, however small it is."""
    job_bytes_max: int = 32 << 30
    """Bytes that all writers of a job may have under way: each counts with all that it may."""

    space: SpaceConfig = field(default_factory=SpaceConfig)
    keep_s: float = 0.0
    """Jobs that nobody has touched for so long are dropped; 0: never."""

    @property
    def writer_bytes_max(self) -> int:
        return self.credit_bytes + self.body_bytes_max + HEADER_BYTES_MAX


class Refused(Exception):
    """Ends a call with the refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Outbox(Protocol):
    """What goes back to a writer. None: nothing comes any more."""

    def put(self, item: log_pb2.AppendReply | None, /) -> None: ...


class Changed(AbstractContextManager[bool | None], Protocol):
    """The server's lock, and how its parts wait for each other: a `threading.Condition`."""

    def notify_all(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object: ...


@dataclass(slots=True, eq=False)
class AppendCall:
    """One Append call: the streams it opened, and what goes back to it."""

    outbox: Outbox
    assembler: Assembler
    streams: dict[int, tuple[StreamState, int]] = field(default_factory=dict)
    """Stream tag -> the stream and the generation it was opened under."""
    fsync: dict[int, Fsync] = field(default_factory=dict)
    """Stream tag -> when its records are acknowledged."""
    acked: dict[int, int] = field(default_factory=dict)
    """Stream tag -> where this call began to send, or what it was told last that is durable."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Job -> the lowest generation that a stream of it was opened under."""
    underway_bytes: int = 0
    queued_records: int = 0
    """On their way to the storage."""
    refusal: Refusal | None = None
    ended: bool = False

    def end(self, refusal: Refusal | None = None) -> None:
        """After what is in the outbox already, the call ends."""
        if not self.ended:
            self.ended = True
            self.refusal = refusal
            self.outbox.put(None)

    def acknowledge(self, stream: StreamState) -> None:
        """Says what is durable; not beyond a record that is damaged, and that this call will send again."""
        begin = self.acked.get(stream.tag)
        if begin is None and stream.holes:  # nobody knows yet what it will send again
            return
        durable = stream.durable if begin is None else stream.sound_from(begin)
        if begin is not None:
            self.acked[stream.tag] = durable
        acked = log_pb2.Acked(stream=stream.name, durable_sequence=durable)
        self.outbox.put(log_pb2.AppendReply(acked=[acked]))

    def writes(self, job: str) -> bool:
        return job in self.oldest


class ServerState:
    """Held by all parts. Everything but ``config`` and ``storage`` only while holding ``changed``."""

    def __init__(self, storage: Storage, config: EngineConfig, changed: Changed) -> None:
        self.config = config
        self.storage = storage
        self.core = LogCore()
        self.changed = changed
        self.sessions: dict[AppendCall, None] = {}
        """In the order in which they came."""
        self.holders: dict[int, AppendCall] = {}
        """Stream tag -> the session that writes it."""
        self.cut_off: dict[str, Refusal] = {}
        """Job -> why nobody may write it for the moment."""
        self.apart: dict[str, str] = {}
        """Job -> why nothing is done for it: its files are damaged. It is in no other list."""
        self.failed = ""
        """Why nothing is written any more, until a person has seen to it."""
        self.draining = False
        self.space = Space(config.space)
        self.touched: dict[str, float] = {}
        """Job -> when it was written, read, fenced or asked for by its coordinator; at a start, then."""
        self.writers: dict[str, dict[AppendCall, None]] = {}
        """Job -> the sessions that have opened a stream of it, in the order in which they came."""
        self.on_health: Callable[[bool], None] = lambda serving: None
        self._shown = True
        """What ``on_health`` was told last."""
        self.new_condition: Callable[[], Changed] = lambda: self.changed
        self._readers: dict[str, Changed] = {}

    def check_open(self) -> None:
        """Raises Refused if the server takes nothing."""
        if self.failed:
            raise Refused(Refusal(Reason.CLOSED, self.failed))
        if self.draining:
            raise Refused(Refusal(Reason.DRAINING, "the log server is shutting down"))

    def news(self, job: str) -> Changed:
        """What readers of the job wait for: who appends to others does not wake them. As `changed`, with its lock."""
        waited_for = self._readers.get(job)
        if waited_for is None:
            if len(self._readers) >= 2 * self.config.jobs_max:  # of jobs that are gone, or never were
                self.wake_readers(list(self._readers))
                self._readers.clear()
            waited_for = self._readers[job] = self.new_condition()
        return waited_for

    def wake_readers(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            if job in self._readers:
                self._readers[job].notify_all()

    def show_health(self) -> None:
        """Tells of it if it is another one than before."""
        serves = self.serves
        if serves is not self._shown:
            self._shown = serves
            self.on_health(serves)

    def check_records(self, job: JobState) -> None:
        """Raises Refused if the job would have a record too many."""
        most = self.config.job_records_max
        if job.tally.records >= most:
            message = (
                f"job {job.name} keeps {job.tally.records} records of the {most} that it may (--job-records-max); "
                "a checkpoint lets it be trimmed"
            )
            raise Refused(Refusal(Reason.OVER_QUOTA, message))

    def wants_checkpoint(self, job: JobState) -> str:
        """Why a trim of this job would help now; empty: there is no need."""
        records, most = job.tally.records, self.config.job_records_max
        if records >= self.config.space.high_water * most:
            return f"job {job.name} keeps {records} records of the {most} that it may"
        return self.space.wants_checkpoint(job.name)

    def check_not_cut_off(self, job: str) -> None:
        """Raises Refused while its writers are kept out."""
        refusal = self.cut_off.get(job)
        if refusal is not None:
            raise Refused(refusal)

    def check_apart(self, job: str) -> None:
        """Raises Refused if nothing is done for it."""
        reason = self.apart.get(job)
        if reason is not None:
            raise Refused(Refusal(Reason.APART, reason))

    def set_apart(self, job: str, reason: str) -> Notice:
        """Its files make no sense: from now on it is not there, until it is dropped or the server starts again."""
        self.apart[job] = reason
        for session in self.sessions:
            if session.writes(job):
                session.end(Refusal(Reason.APART, reason))
        self.core.jobs.pop(job, None)
        self.touched.pop(job, None)
        self.space.recount(self.core, trimmed=False)
        return Notice("job_set_apart", {"job": job, "reason": reason})

    def check_space(self, job: str) -> None:
        """Raises Refused while there is none for this job."""
        self.check_room(job, 0)

    def check_room(self, job: str, frame_bytes: int) -> None:
        """Raises Refused if a new record of this size has no room."""
        refusal = self.space.refuses(job, frame_bytes)
        if refusal is not None:
            self.show_health()  # it may be the server's quota that has just become full
            raise Refused(refusal)

    def condition(self) -> str:
        """One of `CONDITIONS`: what keeps it from taking records, if anything."""
        if self.failed:
            return "failed"
        if self.draining:
            return "draining"
        return "serving" if self.space.takes_appends else "full"

    def check_job(self, job: str) -> None:
        """Raises Refused if it would be one job too many."""
        if job not in self.core.jobs and len(self.core.jobs) >= self.config.jobs_max:
            raise Refused(
                Refusal(Reason.LIMIT, f"the server keeps {len(self.core.jobs)} jobs: no more (--jobs-max)")
            )

    def check_writer(self, session: AppendCall, job: str, stream: str) -> None:
        """Raises Refused if the job would have a stream, or writers, too many."""
        config = self.config
        self.check_job(job)
        known = self.core.jobs.get(job)
        if known is not None and stream not in known.streams and len(known.streams) >= config.job_streams_max:
            message = f"the job has {len(known.streams)} streams: no more (--job-streams-max)"
            raise Refused(Refusal(Reason.LIMIT, message))
        writers = {session, *(other for other in self.writers.get(job, ()) if not other.ended)}
        if len(writers) * config.writer_bytes_max > config.job_bytes_max:
            message = (
                f"{len(writers)} writers of the job may have {len(writers) * config.writer_bytes_max} bytes under "
                f"way, {config.job_bytes_max} are allowed (--job-bytes-max, --credit-bytes)"
            )
            raise Refused(Refusal(Reason.LIMIT, message))

    @property
    def serves(self) -> bool:
        """Appends are taken."""
        return not self.failed and not self.draining and self.space.takes_appends

    def look_at_disk(self, free_bytes: int | None, now: float) -> list[Notice]:
        """Every so often: alarms begin and end by what the disk has left. What is to be told."""
        news = self.space.observe(free_bytes, now)
        self.show_health()
        return news

    def touch(self, job: str, now: float) -> None:
        """(only jobs that are there)"""
        if job in self.core.jobs:
            self.touched[job] = now

    def idle_s(self, name: str, now: float) -> float | None:
        """For how long nobody has wanted the job; None: there is none. 0 while a stream of it is open."""
        job = self.core.jobs.get(name)
        if job is None:
            return None
        if job.readers or self.writers_of(job):
            return 0.0
        return now - self.touched.get(name, now)

    def writers_of(self, job: JobState) -> int:
        return sum(stream.tag in self.holders for stream in job.streams.values())

    def send_again(self, stream: StreamState, sequence: int, refusal: Refusal) -> None:
        """This record is damaged: ends the call that may have sent it and was not told yet that it is durable. Its
        writer comes back and sends it again."""
        holder = self.holders.get(stream.tag)
        if holder is not None and holder.acked.get(stream.tag, sequence + 1) <= sequence:
            holder.end(refusal)

    def end_sessions(self, refusal: Refusal) -> None:
        for session in self.sessions:
            session.end(refusal)


def check_names(job: str, stream: str = "x") -> None:
    """Raises Refused for a name that the grammar does not allow."""
    try:
        check_name("job", job)
        check_name("stream", stream)
    except UsageError as error:
        raise Refused(Refusal(Reason.INVALID, str(error))) from None

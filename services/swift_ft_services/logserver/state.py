"""State shared by the parts of the server: the core with its one lock, the storage, the connected calls.

``changed`` guards the core and everything in `ServerState`. No record is read or written, and nothing is synced, while
it is held. This module starts no threads: the server passes in a condition variable, a simulation a stand-in.
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
from swift_ft_services.logserver.core import JobState, LogCore, Refusal, Refused, StreamState
from swift_ft_services.logserver.quotas import Notice, Space, SpaceConfig
from swift_ft_services.logserver.shared_memory import SharedMemory
from swift_ft_services.logserver.storage_interface import Storage

CONDITIONS = ("serving", "full", "failed", "draining")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of a server: sync policy and limits."""

    fsync: Fsync = Fsync.ALWAYS
    """Sync policy of streams whose writers do not set one."""
    fsync_interval_s: float = 0.1
    credit_bytes: int = 64 << 20
    """Bytes that one writer may have in flight."""
    body_bytes_max: int = 256 << 20
    """Largest body that is accepted."""
    jobs_max: int = 1024
    job_streams_max: int = 8192
    job_records_max: int = 4_000_000
    """Records that are kept of a job. Each takes about 450 bytes of memory, however small it is."""
    job_bytes_max: int = 32 << 30
    """Bytes that all writers of a job may have in flight. Each writer counts with its full allowance."""

    space: SpaceConfig = field(default_factory=SpaceConfig)
    keep_s: float = 0.0
    """Seconds after which an unused job is dropped; 0: never."""

    @property
    def writer_bytes_max(self) -> int:
        return self.credit_bytes + self.body_bytes_max + HEADER_BYTES_MAX


class Outbox(Protocol):
    """Channel for the replies to a writer. None ends it."""

    def put(self, item: log_pb2.AppendReply | None, /) -> None: ...


class Changed(AbstractContextManager[bool | None], Protocol):
    """The server's lock and condition variable: a `threading.Condition`."""

    def notify_all(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object: ...


@dataclass(slots=True, eq=False)
class AppendCall:
    """One Append call: the streams it opened, and its replies."""

    outbox: Outbox
    assembler: Assembler
    streams: dict[int, tuple[StreamState, int]] = field(default_factory=dict)
    """Stream tag -> the stream and the generation that it was opened under."""
    fsync: dict[int, Fsync] = field(default_factory=dict)
    """Stream tag -> when its records are acknowledged."""
    acked: dict[int, int] = field(default_factory=dict)
    """Stream tag -> first sequence that this call sent, or the durable watermark last reported to it."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Job -> lowest generation that the call opened one of its streams under."""
    underway_bytes: int = 0
    queued_records: int = 0
    """Records on their way to the storage."""
    memory_key: bytes = b""
    memory: SharedMemory | None = None
    """The writer's memory, once it was handed over with that key."""
    refusal: Refusal | None = None
    ended: bool = False

    def end(self, refusal: Refusal | None = None) -> None:
        """Ends the call after the replies that are in the outbox already."""
        if not self.ended:
            self.ended = True
            self.refusal = refusal
            self.outbox.put(None)

    def acknowledge(self, stream: StreamState) -> None:
        """Reports the durable watermark; not beyond a damaged record that this call will send again."""
        begin = self.acked.get(stream.tag)
        if begin is None and stream.holes:  # unknown yet what it will send again
            return
        durable = stream.durable if begin is None else stream.sound_from(begin)
        if begin is not None:
            self.acked[stream.tag] = durable
        acked = log_pb2.Acked(stream=stream.name, durable_sequence=durable)
        self.outbox.put(log_pb2.AppendReply(acked=[acked]))

    def writes(self, job: str) -> bool:
        return job in self.oldest


class ServerState:
    """State shared by all parts; all but ``config`` and ``storage`` only while holding ``changed``."""

    def __init__(self, storage: Storage, config: EngineConfig, changed: Changed) -> None:
        self.config = config
        self.storage = storage
        self.core = LogCore()
        self.changed = changed
        self.sessions: dict[AppendCall, None] = {}
        """Connected calls, in the order in which they came."""
        self.holders: dict[int, AppendCall] = {}
        """Stream tag -> session that writes it."""
        self.cut_off: dict[str, Refusal] = {}
        """Job -> refusal for its writers while they are temporarily excluded."""
        self.apart: dict[str, str] = {}
        """Job -> reason why it is quarantined: its files are damaged. A quarantined job is in no other map."""
        self.failed = ""
        """Reason why nothing is written any more, until an operator intervenes."""
        self.draining = False
        self.space = Space(config.space)
        self.touched: dict[str, float] = {}
        """Job -> time when it was last written, read, fenced, or queried by its coordinator; initially the start."""
        self.writers: dict[str, dict[AppendCall, None]] = {}
        """Job -> sessions that have opened a stream of it, in the order in which they came."""
        self.memory_socket = ""
        """Name of the socket that takes the memory of writers on this machine."""
        self.on_health: Callable[[bool], None] = lambda serving: None
        self._shown = True
        """State last reported to ``on_health``."""
        self.new_condition: Callable[[], Changed] = lambda: self.changed
        self._readers: dict[str, Changed] = {}

    def check_open(self) -> None:
        if self.failed:
            raise Refused(Reason.CLOSED, self.failed)
        if self.draining:
            raise Refused(Reason.DRAINING, "the log server is shutting down")

    def news(self, job: str) -> Changed:
        """Returns the condition that readers of the job wait on, so that appends to other jobs do not wake them. It
        shares the lock of `changed`."""
        waited_for = self._readers.get(job)
        if waited_for is None:
            if len(self._readers) >= 2 * self.config.jobs_max:  # of jobs that are gone or never existed
                self.wake_readers(list(self._readers))
                self._readers.clear()
            waited_for = self._readers[job] = self.new_condition()
        return waited_for

    def wake_readers(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            if job in self._readers:
                self._readers[job].notify_all()

    def show_health(self) -> None:
        serves = self.serves
        if serves is not self._shown:
            self._shown = serves
            self.on_health(serves)

    def check_records(self, job: JobState) -> None:
        most = self.config.job_records_max
        if job.tally.records >= most:
            message = (
                f"job {job.name} keeps {job.tally.records} records of the {most} that it may (--job-records-max); "
                "a checkpoint lets it be trimmed"
            )
            raise Refused(Reason.OVER_QUOTA, message)

    def wants_checkpoint(self, job: JobState) -> str:
        """Returns why a trim of this job would help now; empty if there is no need."""
        records, most = job.tally.records, self.config.job_records_max
        if records >= self.config.space.high_water * most:
            return f"job {job.name} keeps {records} records of the {most} that it may"
        return self.space.wants_checkpoint(job.name)

    def check_not_cut_off(self, job: str) -> None:
        refusal = self.cut_off.get(job)
        if refusal is not None:
            raise Refused(*refusal)

    def check_apart(self, job: str) -> None:
        reason = self.apart.get(job)
        if reason is not None:
            raise Refused(Reason.APART, reason)

    def set_apart(self, job: str, reason: str) -> Notice:
        """Quarantines a job whose files cannot be interpreted, until it is dropped or the server restarts."""
        self.apart[job] = reason
        for session in self.sessions:
            if session.writes(job):
                session.end(Refusal(Reason.APART, reason))
        self.core.jobs.pop(job, None)
        self.touched.pop(job, None)
        self.space.recount(self.core)
        return Notice("job_set_apart", {"job": job, "reason": reason})

    def check_room(self, job: str, frame_bytes: int) -> None:
        refusal = self.space.refuses(job, frame_bytes)
        if refusal is not None:
            self.show_health()  # the server's quota may just have become full
            raise Refused(*refusal)

    def condition(self) -> str:
        """Returns one of `CONDITIONS`: whether records are accepted, or why not."""
        if self.failed:
            return "failed"
        if self.draining:
            return "draining"
        return "serving" if self.space.takes_appends else "full"

    def check_job(self, job: str) -> None:
        if job not in self.core.jobs and len(self.core.jobs) >= self.config.jobs_max:
            raise Refused(Reason.LIMIT, f"the server keeps {len(self.core.jobs)} jobs: no more (--jobs-max)")

    def check_writer(self, session: AppendCall, job: str, stream: str) -> None:
        config = self.config
        self.check_job(job)
        known = self.core.jobs.get(job)
        if known is not None and stream not in known.streams and len(known.streams) >= config.job_streams_max:
            message = f"the job has {len(known.streams)} streams: no more (--job-streams-max)"
            raise Refused(Reason.LIMIT, message)
        writers = {session, *(other for other in self.writers.get(job, ()) if not other.ended)}
        if len(writers) * config.writer_bytes_max > config.job_bytes_max:
            message = (
                f"{len(writers)} writers of the job may have {len(writers) * config.writer_bytes_max} bytes under "
                f"way, {config.job_bytes_max} are allowed (--job-bytes-max, --credit-bytes)"
            )
            raise Refused(Reason.LIMIT, message)

    @property
    def serves(self) -> bool:
        return self.condition() == "serving"

    def look_at_disk(self, free_bytes: int | None, now: float) -> list[Notice]:
        news = self.space.observe(free_bytes, now)
        self.show_health()
        return news

    def touch(self, job: str, now: float) -> None:
        if job in self.core.jobs:
            self.touched[job] = now

    def idle_s(self, name: str, now: float) -> float | None:
        """Returns the seconds since the job was last used; 0: a stream is open; None: there is no such job."""
        job = self.core.jobs.get(name)
        if job is None:
            return None
        if job.readers or self.writers_of(job):
            return 0.0
        return now - self.touched.get(name, now)

    def writers_of(self, job: JobState) -> int:
        return sum(stream.tag in self.holders for stream in job.streams.values())

    def send_again(self, stream: StreamState, sequence: int, refusal: Refusal) -> None:
        """Ends the call that sent this damaged record and has no acknowledgement for it: its writer sends it again."""
        holder = self.holders.get(stream.tag)
        if holder is not None and holder.acked.get(stream.tag, sequence + 1) <= sequence:
            holder.end(refusal)

    def end_sessions(self, refusal: Refusal, only: str | None = None) -> None:
        """``only``: those that write this job."""
        for session in self.sessions:
            if only is None or session.writes(only):
                session.end(refusal)


def check_names(job: str, stream: str = "x") -> None:
    try:
        check_name("job", job)
        check_name("stream", stream)
    except UsageError as error:
        raise Refused(Reason.INVALID, str(error)) from None

"""State machine of a writer's link to one log server: messages to send, and replies. No I/O, no clock, no threads.

A record stays in ``unsent`` or ``sent`` until the server reports that it is durable. It gets its sequence when it is
first sent, and keeps it, so that the server recognizes a record that is sent again. A *call* is one connection's
Append; replies and failures of an older call are ignored.

Call sequence (`swift_ft.log.sender` is the shell, and holds a lock around each)::

    resume(stream, ...)                   position of a writer that was killed
    enqueue(record)                       records from the writer
    number = begin_call(now)              while may_connect
    next_message(number)                  until None: messages to send now
    on_reply(number, reply)               a reply; returns the number of records that it acknowledges
    on_failure(number, reason, ...)       why the call ended; returns the pause before the next one
    end_call()                            later replies of this call are ignored
"""

from collections import deque
from dataclasses import dataclass, field

from swift_ft._pb import log_pb2
from swift_ft.errors import LogUnavailable, SequenceConflict, StaleGeneration, SwiftError, UsageError
from swift_ft.log.frame import BODY_BYTES_MAX, MESSAGE_BYTES, Bytes, FrameHeader, cut, encode_header
from swift_ft.log.protocol import Reason, frames_message
from swift_ft.log.record import RecordKey, stream_tag
from swift_ft.log.shared_memory import PLACE

BATCH_BYTES = 1 << 20
"""Message size at which no more records are added to it."""
RETRY_S = 0.05
FULL_RETRY_S = 0.5
_NO_ROOM: dict[str, str] = {
    Reason.FULL: "the disk of log server {address} is full",
    Reason.OVER_QUOTA: "log server {address} has no room for job {job}: its quota is full",
}
# Refusals of the record itself: sending it again would be refused again.
_FATAL = {Reason.CONFLICT, Reason.INVALID, Reason.OVERSIZE}


class LinkMeter:
    """Recent speed of a link: a moving average over windows of WINDOW_S, where the newest counts half."""

    WINDOW_S = 0.5
    _WEIGHT = 0.5

    def __init__(self) -> None:
        self._pace: float | None = None
        self._busy_since: float | None = None
        self._began: float | None = None
        self._busy_s = 0.0
        self._raw = 0

    def busy(self, now_s: float) -> None:
        """Starts timing: from now on a record waits for its acknowledgement."""
        if self._began is None:
            self._began = now_s
        if self._busy_since is None:
            self._busy_since = now_s

    def acked(self, raw: int, now_s: float, *, idle: bool) -> None:
        """Counts acknowledged raw bytes. ``idle``: no record waits any more."""
        if self._busy_since is None or self._began is None:
            return
        self._raw += raw
        self._busy_s += now_s - self._busy_since
        self._busy_since = None if idle else now_s
        if now_s - self._began >= self.WINDOW_S and self._busy_s > 0 and self._raw:
            new, old = self._raw / self._busy_s, self._pace
            self._pace = new if old is None else self._WEIGHT * new + (1 - self._WEIGHT) * old
            self._began, self._busy_s, self._raw = now_s, 0.0, 0

    def forget_window(self) -> None:
        """Discards the current window after a lost connection, because its time does not measure the speed."""
        self._began = self._busy_since = None
        self._busy_s, self._raw = 0.0, 0

    def pace(self) -> float | None:
        """Returns the raw bytes acknowledged per second while it was busy; None before the first window is full."""
        return self._pace


@dataclass(slots=True, eq=False)
class Outgoing:
    """One record to send, framed except for sequence and generation."""

    stream: str
    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    codec: int
    stored: Bytes
    body_crc: int
    digest: bytes
    place: int = -1
    """Where ``stored`` begins in the writer's memory; -1: it is not there."""
    sequence: int = -1

    def header(self, tag: int, generation: int) -> bytes:
        """Returns the frame's header for one call. `tag`: the stream's. `generation`: the call's."""
        return encode_header(
            FrameHeader(
                stream_tag=tag,
                sequence=self.sequence,
                generation=generation,
                key=self.key,
                dtype=self.dtype,
                shape=self.shape,
                codec=self.codec,
                raw_bytes=self.raw_bytes,
                stored_bytes=len(self.stored),
                body_crc=self.body_crc,
                digest=self.digest,
            )
        )


@dataclass(slots=True)
class _Stream:
    name: str
    tag: int
    next_sequence: int | None = None  # None until it was opened once
    acked: int = 0
    asked: bool = False  # in this call
    opened: bool = False
    unsent: deque[Outgoing] = field(default_factory=deque)
    sent: deque[Outgoing] = field(default_factory=deque)


def _message(parts: list[Bytes], size: int, shared: bool) -> bytes:
    """Returns an AppendRequest, encoded. ``size``: of the frames."""
    if shared:
        return log_pb2.AppendRequest(shared=b"".join(parts)).SerializeToString()
    return frames_message(parts, size)


class LinkCore:
    """State of one writer's streams on one server. ``now`` is monotonic seconds."""

    def __init__(self, address: str, job: str, generation: int, now: float, fsync: str) -> None:
        """``fsync``: one of `swift_ft.log.protocol.Fsync`; empty: the server's default."""
        self.address = address
        self.resent = 0
        self.pending = 0
        """Number of records that are not acknowledged."""
        self.trouble = "it cannot be reached"
        """Reason why the last call ended."""
        self.call_number = 0
        self._job = job
        self._generation = generation
        self._fsync = fsync
        self._streams: dict[str, _Stream] = {}
        self._rest: deque[Bytes] = deque()  # unsent pieces of the record begun last; sent before all else
        self._rest_of = ("", 0)  # that record's stream and sequence
        self._credit = 0
        self._shared = False  # the server has the writer's memory
        self._body_bytes_max = BODY_BYTES_MAX
        self._error: SwiftError | None = None  # until the next generation
        self._stale = ""  # the server's message, until the next generation
        self._full = ""  # what has no room, by the last failure
        self._progress_at = now
        self.meter = LinkMeter()

    # -- the writer's side ----------------------------------------------------------------------------

    def enqueue(self, record: Outgoing, now: float) -> bool:
        """Queues a record. Returns False if a killed writer has sent it and it is durable already."""
        stream = self._stream(record.stream)
        if 0 <= record.sequence < stream.acked:
            return False
        if not self.pending:
            self._progress_at = now
            self.meter.busy(now)
        self.pending += 1
        stream.unsent.append(record)
        return True

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(name, stream_tag(self._job, name))
        return stream

    def resume(self, name: str, acked: int, next_sequence: int) -> None:
        """(before any record of the stream) Continues at the position of a writer that was killed."""
        stream = self._stream(name)
        stream.acked, stream.next_sequence = acked, next_sequence

    def acked(self, name: str) -> int:
        """Returns the sequence below which all records of the stream are durable and their memory is unused."""
        stream = self._streams.get(name)
        if stream is None:
            return 0
        if self._rest and self._rest_of[0] == name:
            return min(stream.acked, self._rest_of[1])
        return stream.acked

    def error(self, patience_s: float, now: float) -> SwiftError | None:
        if self._error is not None:
            return self._error
        waited_s = now - self._progress_at
        if not self.pending or waited_s < patience_s:
            return None
        if self._stale:
            return StaleGeneration(self._stale)
        if self._full:
            return LogUnavailable(f"{self._full}; it has taken nothing for {waited_s:.0f} s: {self.trouble}")
        return LogUnavailable(
            f"log server {self.address} has acknowledged nothing for {waited_s:.0f} s: {self.trouble}"
        )

    def set_generation(self, generation: int, discard: bool, now: float) -> None:
        """Reopens all streams under the generation. ``discard``: drops all unacknowledged records."""
        self._generation = generation
        self._error = None
        self._stale = ""
        self._progress_at = now
        if discard:
            for stream in self._streams.values():
                stream.sent.clear()
                stream.unsent.clear()
                stream.next_sequence = None
                stream.acked = 0  # the server was reset and need not hold acknowledged records
            self.pending = 0
        self.end_call()

    # -- a call ---------------------------------------------------------------------------------------

    @property
    def may_connect(self) -> bool:
        return bool(self._streams) and self._error is None and not self._stale

    def begin_call(self, now: float) -> int:
        """Begins a call and returns its number. Queues unacknowledged records of older calls to be sent again."""
        self.call_number += 1
        if self.pending:
            self.meter.busy(now)
        self._credit = 0
        self._shared = False
        self._rest.clear()
        for stream in self._streams.values():
            stream.asked = stream.opened = False
            self.resent += len(stream.sent)
            stream.unsent.extendleft(reversed(stream.sent))
            stream.sent.clear()
        return self.call_number

    def share(self, number: int) -> None:
        """The server of this call has taken the writer's memory."""
        self._shared = self._shared or number == self.call_number

    def end_call(self) -> None:
        self.call_number += 1
        self.meter.forget_window()

    def next_message(self, number: int) -> bytes | None:
        """Returns the next AppendRequest, encoded, or None if no message may be sent now."""
        if number != self.call_number:
            return None
        opens = []
        for stream in self._streams.values():
            if not stream.asked:
                stream.asked = True
                opens.append(
                    log_pb2.Open(
                        job=self._job,
                        stream=stream.name,
                        generation=self._generation,
                        acked_sequence=stream.acked,
                        fsync=self._fsync,
                    )
                )
        if opens:
            return log_pb2.AppendRequest(opens=opens).SerializeToString()
        parts: list[Bytes] = []
        size = 0
        shared = False
        if self._rest and self._credit > 0:
            parts.append(self._rest.popleft())
            size += len(parts[0])
            self._credit -= len(parts[0])
        for stream in self._streams.values():
            while self._may_send(stream) and size < BATCH_BYTES:
                record = stream.unsent[0]
                if len(record.stored) > self._body_bytes_max:
                    self._refuse_size(record)
                    return None
                in_memory = self._shared and record.place >= 0
                first, *rest = (b"",) if in_memory else cut(record.stored)
                if parts and (in_memory is not shared or size + len(first) > MESSAGE_BYTES):
                    return _message(parts, size, shared)  # it begins the next message
                shared = in_memory
                header = self._send(stream)
                parts += (header, PLACE.pack(record.place) if shared else first)
                cost = len(header) + len(record.stored if shared else first)
                size += cost
                self._credit -= cost
                if rest:
                    self._rest.extend(rest)
                    self._rest_of = (stream.name, record.sequence)
        return _message(parts, size, shared) if parts else None

    def _send(self, stream: _Stream) -> bytes:
        """Moves the next record to ``sent``. Returns its header."""
        record = stream.unsent.popleft()
        if record.sequence < 0:
            assert stream.next_sequence is not None
            record.sequence = stream.next_sequence
            stream.next_sequence += 1
        stream.sent.append(record)
        return record.header(stream.tag, self._generation)

    def _may_send(self, stream: _Stream) -> bool:
        return stream.opened and bool(stream.unsent) and self._credit > 0 and not self._rest

    def _refuse_size(self, record: Outgoing) -> None:
        self._error = UsageError(
            f"{record.stream} {record.key}: {len(record.stored)} bytes are more than log server "
            f"{self.address} accepts ({self._body_bytes_max}); start it with a larger --body-bytes-max"
        )

    def on_reply(self, number: int, reply: log_pb2.AppendReply, now: float) -> int:
        """Processes a reply. Returns the number of records that it acknowledges. Raises SequenceConflict if another
        writer has written the stream."""
        if number != self.call_number:
            return 0
        self._credit += reply.credit_bytes
        if reply.HasField("welcome"):
            self._body_bytes_max = reply.welcome.body_bytes_max
        for opened in reply.opened:
            self._on_opened(self._streams[opened.stream], opened.next_sequence)
        records = sum(
            self._on_acked(self._streams[acked.stream], acked.durable_sequence, now) for acked in reply.acked
        )
        if records:
            self._progress_at = now
        return records

    def _on_opened(self, stream: _Stream, next_sequence: int) -> None:
        if stream.next_sequence is None:
            stream.next_sequence = stream.acked = next_sequence
        elif next_sequence > stream.next_sequence:
            raise SequenceConflict(
                f"somebody else has written {stream.name}: it is at record {next_sequence}, "
                f"this writer at {stream.next_sequence}"
            )
        stream.opened = True

    def _on_acked(self, stream: _Stream, durable: int, now: float) -> int:
        records = raw = 0
        for waiting in (stream.sent, stream.unsent):
            while waiting and 0 <= waiting[0].sequence < durable:
                record = waiting.popleft()
                records += 1
                raw += record.raw_bytes
                self.pending -= 1
        if records:
            self.meter.acked(raw, now, idle=not self.pending)
        stream.acked = max(stream.acked, durable)
        return records

    def on_failure(self, number: int, reason: str, message: str, error: SwiftError) -> float:
        """Classifies why a call ended. Returns the seconds to wait before the next one."""
        if number != self.call_number:
            return 0.0
        self.trouble = message
        self._full = _NO_ROOM.get(reason, "").format(job=self._job, address=self.address)
        if reason == Reason.STALE_GENERATION:
            self._stale = message
        elif reason in _FATAL:
            self._error = error
        return FULL_RETRY_S if reason in _NO_ROOM or reason == Reason.CORRUPT else RETRY_S

    def on_error(self, error: SwiftError) -> None:
        """Records a fatal error found in a reply. Stops sending until the next generation."""
        self._error = error

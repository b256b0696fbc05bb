"""A writer's call: what it may open, which frames are taken, what is answered at once. No I/O, no clock, no threads."""

from collections.abc import Iterator
from itertools import islice

from services.logserver.commits import Commits
from services.logserver.recovered import RecoveredJob
from services.logserver.seam import Write
from services.logserver.state import AppendCall, Refused, ServerState, check_names
from services.logserver.streams import Refusal, StreamState
from swift._pb import log_pb2
from swift.errors import LogError, RecordCorrupt
from swift.log.frame import FrameHeader, FrameOversize
from swift.log.wire import Fsync, Reason

Frame = tuple[FrameHeader, list[memoryview]]
"""A header, and the bytes of the frame in pieces."""


class Gathered:
    """Replies that go out together. Of each stream the newest word counts: a writer that does not read its
    acknowledgements costs no more memory than one that does."""

    def __init__(self) -> None:
        self.empty = True
        self._welcome: log_pb2.Welcome | None = None
        self._opened: dict[str, int] = {}
        self._acked: dict[str, int] = {}
        self._credit_bytes = 0

    def add(self, reply: log_pb2.AppendReply) -> None:
        self.empty = False
        self._credit_bytes += reply.credit_bytes
        for opened in reply.opened:
            self._opened[opened.stream] = opened.next_sequence
        for acked in reply.acked:
            self._acked[acked.stream] = acked.durable_sequence
        if reply.HasField("welcome"):
            self._welcome = reply.welcome

    def take(self) -> log_pb2.AppendReply:
        """The reply with all that was gathered, which is empty from then on."""
        reply = log_pb2.AppendReply(credit_bytes=self._credit_bytes, welcome=self._welcome)
        for stream, next_sequence in self._opened.items():
            reply.opened.add(stream=stream, next_sequence=next_sequence)
        for stream, durable_sequence in self._acked.items():
            reply.acked.add(stream=stream, durable_sequence=durable_sequence)
        self.empty, self._welcome, self._credit_bytes = True, None, 0
        self._opened.clear()
        self._acked.clear()
        return reply


def join(reply: log_pb2.AppendReply, more: log_pb2.AppendReply) -> None:
    """Makes one message of two that go out together: ``reply``, with what ``more`` says."""
    gathered = Gathered()
    gathered.add(reply)
    gathered.add(more)
    reply.CopyFrom(gathered.take())


class Quarantined(Refused):
    """The stream takes nothing any more; its manifest is to say so."""

    def __init__(self, refusal: Refusal, stream: StreamState) -> None:
        super().__init__(refusal)
        self.stream = stream


class Appends:
    """Who writes which stream. (All but `parse` while holding the server's lock.)"""

    def __init__(self, state: ServerState, commits: Commits) -> None:
        self._state = state
        self._commits = commits

    def take_over(self, recovered: RecoveredJob, now: float) -> None:
        """What the storage has found at the start."""
        job = self._state.core.job(recovered.name)
        job.generation = recovered.meta.generation
        job.reset_generation = recovered.meta.reset_generation
        job.reset_number = recovered.meta.reset_number
        job.trimmed_below_step = job.trim_wanted = job.trim_recorded = recovered.meta.trimmed_below_step
        for recovered_stream in recovered.streams:
            stream = job.stream(recovered_stream.name)
            stream.first = recovered_stream.first
            stream.durable = stream.appended = recovered_stream.next_sequence
            stream.quarantined = recovered_stream.quarantined
            for entry in recovered_stream.entries:
                stream.add(entry)
            stream.holes = [
                hole for hole in recovered_stream.holes if hole.below_step > job.trimmed_below_step
            ]
            stream.check()
            self._state.space.added(job.name, stream.bytes)
        self._state.touch(job.name, now)

    def attach(self, session: AppendCall) -> None:
        """A writer has connected: welcome and the first credit."""
        config = self._state.config
        self._state.check_open()
        self._state.sessions[session] = None
        session.outbox.put(
            log_pb2.AppendReply(
                welcome=log_pb2.Welcome(body_bytes_max=config.body_bytes_max),
                credit_bytes=config.credit_bytes,
            )
        )

    def detach(self, session: AppendCall) -> None:
        """A call is over: its streams may be opened by another one."""
        session.end()
        self._state.sessions.pop(session, None)
        for job in session.oldest:
            writers = self._state.writers.get(job, {})
            writers.pop(session, None)
            if not writers:
                self._state.writers.pop(job, None)
        for tag in session.streams:
            if self._state.holders.get(tag) is session:
                del self._state.holders[tag]

    def open(self, session: AppendCall, request: log_pb2.Open, now: float) -> None:
        """A call opens a stream to write it. Raises Refused, with nothing changed."""
        check_names(request.job, request.stream)
        self._state.check_apart(request.job)
        try:
            fsync = Fsync(request.fsync or self._state.config.fsync)
        except ValueError:
            message = f"fsync {request.fsync!r} is not known; there are {', '.join(Fsync)}"
            raise Refused(Refusal(Reason.INVALID, message)) from None
        self._state.check_open()
        self._state.check_not_cut_off(request.job)
        self._state.check_space(request.job)
        _check_session(session)
        self._state.check_writer(session, request.job, request.stream)
        self._state.touch(request.job, now)
        stream = self._state.core.open(
            request.job, request.stream, request.generation, request.acked_sequence
        )
        if isinstance(stream, Refusal):
            raise Refused(stream)
        self._state.space.job(request.job)  # an account of its own, from now on
        session.streams[stream.tag] = (stream, request.generation)
        oldest = session.oldest.get(request.job, request.generation)
        session.oldest[request.job] = min(oldest, request.generation)
        self._state.writers.setdefault(request.job, {})[session] = None
        session.fsync[stream.tag] = fsync
        self._state.holders[stream.tag] = session
        # No acknowledgement yet: what the writer is not sure of it sends again, and it is compared.
        opened = log_pb2.Opened(stream=stream.name, next_sequence=stream.appended)
        session.outbox.put(log_pb2.AppendReply(opened=[opened]))

    @classmethod
    def parse(cls, session: AppendCall, frames: memoryview | None) -> list[Frame]:
        """The frames that a message ends, verified; None: no more will come. Raises Refused."""
        return [frame for some in cls.parse_some(session, frames, 1 << 30) for frame in some]

    @staticmethod
    def parse_some(session: AppendCall, frames: memoryview | None, count: int) -> Iterator[list[Frame]]:
        """The same, so many at a time. Raises Refused for a damaged, too large or unexpected one."""
        if frames is not None and not session.streams:  # a frame that is begun takes memory until it is whole
            raise Refused(Refusal(Reason.NOT_OPEN, "frames before any stream is open in this call"))
        try:
            if frames is not None:
                fed = session.assembler.feed(frames)
                while some := list(islice(fed, count)):
                    yield some
                return
            session.assembler.finish()
        except RecordCorrupt as error:
            raise Refused(Refusal(Reason.CORRUPT, f"damaged on the way here: {error}")) from None
        except FrameOversize as error:
            raise Refused(Refusal(Reason.OVERSIZE, str(error))) from None
        except LogError as error:
            raise Refused(Refusal(Reason.INVALID, str(error))) from None

    def accept(self, session: AppendCall, parsed: list[Frame]) -> None:
        """Frames of streams that the session has opened. Raises Refused; what came before is kept."""
        given_back = 0
        try:
            for header, frame in parsed:
                given_back += self._accept(session, header, frame)
        finally:
            if given_back:
                session.outbox.put(log_pb2.AppendReply(credit_bytes=given_back))

    def _accept(self, session: AppendCall, header: FrameHeader, frame: list[memoryview]) -> int:
        """Queues a frame; gives the credit to return at once."""
        self._state.check_open()
        _check_session(session)
        opened = session.streams.get(header.stream_tag)
        if opened is None or self._state.holders.get(header.stream_tag) is not session:
            raise Refused(Refusal(Reason.NOT_OPEN, f"{header.key}: its stream is not open in this call"))
        stream, generation = opened
        if session.underway_bytes + header.frame_bytes > self._state.config.writer_bytes_max:
            raise Refused(Refusal(Reason.INVALID, "more bytes under way than were granted"))
        session.acked.setdefault(stream.tag, header.sequence)
        if header.sequence == stream.appended:
            self._state.check_room(stream.job, header.frame_bytes)
            self._state.check_records(self._state.core.known(stream.job))
        entry = self._state.core.append(stream, generation, header)
        if isinstance(entry, Refusal):
            raise Quarantined(entry, stream) if stream.quarantined else Refused(entry)
        if entry is None:
            self._commits.acknowledge_again(session, stream, session.fsync[stream.tag])
            return header.frame_bytes
        mends = stream.mending.get(header.sequence) is entry
        if not mends:
            self._state.space.added(stream.job, header.frame_bytes)
        session.underway_bytes += header.frame_bytes
        session.queued_records += 1
        write = Write(stream.job, stream.name, header.sequence, frame, mends)
        self._commits.put(session, stream, write, session.fsync[stream.tag])
        return 0


def _check_session(session: AppendCall) -> None:
    if session.ended:
        raise Refused(session.refusal or Refusal(Reason.CLOSED, "the call has ended"))

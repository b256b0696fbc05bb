"""The log server without gRPC: a writer's call, and the start and the end of it all.

Call sequence of an append::

    (pump of a session)  handle(): parse, check, core.append -> queue of the committer
    (committer)          takes what waits: storage.commit (group commit), core.made_durable
    (committer)          acknowledgements and credit into the sessions' outboxes, readers are woken
    (handler)            session.replies(): what is in the outbox, merged into one message

Memory is bounded by the credit: a session's frames that are not durable yet take at most ``credit_bytes``
plus one frame.
"""

from services.logserver.administration import Administration
from services.logserver.committer import Committer
from services.logserver.core import Refusal
from services.logserver.reading import Reading
from services.logserver.state import EngineConfig, Refused, ServerState, Session, check_names
from services.logserver.storage import RecoveredJob, Storage, Write
from swift import events
from swift._pb import log_pb2
from swift.errors import LogError, RecordCorrupt
from swift.log.assembly import Assembler
from swift.log.frame import (
    HEADER_BYTES_MAX,
    FrameHeader,
    FrameOversize,
)
from swift.log.wire import Reason


class LogEngine:
    """All that the gRPC servicer calls. Every public method may be called from any thread."""

    def __init__(self, storage: Storage, config: EngineConfig) -> None:
        self.config = config
        self.state = ServerState(storage, config)
        self._committer = Committer(self.state)
        self.administration = Administration(self.state, self._committer)
        self.reading = Reading(self.state, self.administration)
        self._changed = self.state.changed

    def start(self, jobs: list[RecoveredJob]) -> None:
        """Takes over what the storage recovered, and begins to work."""
        for recovered in jobs:
            job = self.state.core.job(recovered.name)
            job.generation = recovered.meta.generation
            job.trimmed_below_step = job.trim_wanted = recovered.meta.trimmed_below_step
            for found in recovered.streams:
                stream = job.stream(found.name)
                stream.first = found.first
                stream.durable = stream.appended = found.next_sequence
                stream.quarantined = found.quarantined
                for entry in found.entries:
                    stream.add(entry)
                stream.holes = [hole for hole in found.holes if hole.below_step > job.trimmed_below_step]
                stream.check()
                if found.torn_bytes:
                    events.emit("torn_tail", job=job.name, stream=found.name, bytes=found.torn_bytes)
                if stream.corrupt_reason:
                    events.emit(
                        "stream_corrupt", job=job.name, stream=found.name, reason=stream.corrupt_reason
                    )
            events.emit(
                "recovered",
                job=job.name,
                generation=job.generation,
                streams=len(job.streams),
                records=sum(len(stream.by_sequence) for stream in job.streams.values()),
            )
        self._committer.start()
        self.administration.start()

    # -- appending ------------------------------------------------------------------------------------

    def attach(self) -> Session:
        """A writer has connected: welcome and the first credit."""
        session = Session(Assembler(self.config.body_bytes_max))
        session.outbox.put(
            log_pb2.AppendReply(
                welcome=log_pb2.Welcome(body_bytes_max=self.config.body_bytes_max),
                credit_bytes=self.config.credit_bytes,
            )
        )
        with self._changed:
            self.state.check_open()
            self.state.sessions.add(session)
        return session

    def detach(self, session: Session) -> None:
        with self._changed:
            session.end()
            self.state.sessions.discard(session)
            for tag in session.streams:
                if self.state.holders.get(tag) is session:
                    del self.state.holders[tag]

    def open(self, session: Session, request: log_pb2.Open) -> None:
        check_names(request.job, request.stream)
        with self._changed:
            self.state.check_open()
            self.state.check_space()
            self._check_session(session)
            stream = self.state.core.open(
                request.job, request.stream, request.generation, request.acked_sequence
            )
            if isinstance(stream, Refusal):
                raise Refused(stream)
            session.streams[stream.tag] = (stream, request.generation)
            self.state.holders[stream.tag] = session
            # No acknowledgement yet: what the writer is not sure of it sends again, and it is compared.
            opened = log_pb2.Opened(stream=stream.name, next_sequence=stream.appended)
            session.outbox.put(log_pb2.AppendReply(opened=[opened]))

    def handle(self, session: Session, frames: memoryview) -> None:
        """Frames of streams that the session has opened. Raises Refused; what came before is kept."""
        parsed = self._parse(session, frames)
        with self._changed:
            given_back = 0
            try:
                for header, frame in parsed:
                    given_back += self._accept(session, header, frame)
            finally:
                if given_back:
                    session.outbox.put(log_pb2.AppendReply(credit_bytes=given_back))
                self._changed.notify_all()

    def finish(self, session: Session) -> None:
        """The writer has sent its last message. Raises Refused if that ended within a frame."""
        self._parse(session, None)

    @staticmethod
    def _parse(session: Session, frames: memoryview | None) -> list[tuple[FrameHeader, list[memoryview]]]:
        """None: no more will come."""
        try:
            if frames is not None:
                return list(session.assembler.feed(frames))
            session.assembler.finish()
            return []
        except RecordCorrupt as error:
            raise Refused(Refusal(Reason.CORRUPT, f"damaged on the way here: {error}")) from None
        except FrameOversize as error:
            raise Refused(Refusal(Reason.OVERSIZE, str(error))) from None
        except LogError as error:
            raise Refused(Refusal(Reason.INVALID, str(error))) from None

    @staticmethod
    def _check_session(session: Session) -> None:
        if session.ended:
            raise Refused(session.refusal or Refusal(Reason.CLOSED, "the call has ended"))

    def _accept(self, session: Session, header: FrameHeader, frame: list[memoryview]) -> int:
        """Queues a frame; gives the credit to return at once."""
        self.state.check_open()
        self._check_session(session)
        opened = session.streams.get(header.stream_tag)
        if opened is None or self.state.holders.get(header.stream_tag) is not session:
            raise Refused(Refusal(Reason.NOT_OPEN, f"{header.key}: its stream is not open in this call"))
        stream, generation = opened
        entry = self.state.core.append(stream, generation, header)
        if isinstance(entry, Refusal):
            if stream.quarantined:
                events.emit("quarantined", job=stream.job, stream=stream.name, reason=stream.quarantined)
                self.administration.save_later(self.state.core.job(stream.job))
            raise Refused(entry)
        if entry is None:
            session.outbox.put(
                log_pb2.AppendReply(
                    acked=[log_pb2.Acked(stream=stream.name, durable_sequence=stream.durable)]
                )
            )
            return header.frame_bytes
        session.underway_bytes += header.frame_bytes
        if session.underway_bytes > self.config.credit_bytes + self.config.body_bytes_max + HEADER_BYTES_MAX:
            raise Refused(Refusal(Reason.INVALID, "more bytes under way than were granted"))
        self._committer.put(session, stream, Write(stream.job, stream.name, header.sequence, frame))
        return 0

    # -- the end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes nothing more; everything accepted becomes durable and is acknowledged; calls end."""
        with self._changed:
            self.state.draining = True
            self._committer.settle()
            self.state.end_sessions(Refusal(Reason.DRAINING, "the log server is shutting down"))
            self._changed.notify_all()

    def close(self) -> None:
        """After drain, and once no call runs any more."""
        self._committer.stop()
        self.administration.stop()
        if not self.state.failed:
            self.administration.save_all()
        self.state.storage.close()

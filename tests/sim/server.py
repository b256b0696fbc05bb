"""A simulated log server: the real core, storage and recovery on a simulated disk; this shell has the threads' part."""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext

from google.protobuf.message import DecodeError

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Fsync, Reason, split_frames
from swift_ft.log.record import stream_tag
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import Appends, Commits, Gathered, Quarantined, Queued, Target
from swift_ft_services.logserver.core import JobState, Refusal, Refused, StreamState
from swift_ft_services.logserver.procedures import Clean, Forget, Save, Settle
from swift_ft_services.logserver.reading import Reading
from swift_ft_services.logserver.segments import StorageFailed, StorageFull
from swift_ft_services.logserver.shared_memory import BodyChanged
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.sim.checkers import Checkers, Violation
from tests.sim.disk import ROOT, PowerCut, SimDisk
from tests.sim.kernel import Kernel, Network, Process
from tests.sim.memory import written

JOB = "job"
SEGMENT_BYTES = 1000
OPEN_MAX = 3
STREAMS_MAX = 6
"""Of a job of four ranks."""
WRITERS_MAX = 8
"""Of a job of four ranks, each with its call and one that broke and has not been noticed."""
LOOK_EVERY_S = 0.5
Procedure = Generator[procedures.Step, None, object]


def at(server: str, what: str) -> str:
    """A stream, or a writer, as the checkers know it: what servers have of it, they number each by itself."""
    return f"{server}/{what}"


class Unlocked(nullcontext[bool | None]):
    """The server's lock, where nobody else runs."""

    def notify_all(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        raise AssertionError("nothing waits in a simulation")

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        raise AssertionError("nothing waits in a simulation")


class Call:
    """One Append: in each direction messages keep their order, until it breaks."""

    def __init__(self, writer: str, number: int, server: "ServerProcess") -> None:
        self.writer = writer
        self.number = number
        self.server = server
        self.session: AppendCall | None = None
        self.on_reply: Callable[[Call, log_pb2.AppendReply], None] = lambda call, reply: None
        self.on_end: Callable[[Call, str, str], None] = lambda call, reason, message: None
        self.client: Process | None = None
        self.up_at = self.down_at = 0.0
        self.deaf_from = float("inf")
        """What the writer sent arrives until then: a connection that broke may have messages in its buffers."""
        self.broken = False


class Outbox:
    """Replies of a session on their way down its call."""

    def __init__(self, server: "ServerProcess", call: Call) -> None:
        self.server = server
        self.call = call
        self._last: log_pb2.AppendReply | None = None
        """Not gone out yet."""
        self._underway = self._given = self._got = 0

    def put(self, item: log_pb2.AppendReply | None, /) -> None:
        server, call = self.server, self.call
        for acked in item.acked if item is not None else ():
            tag = stream_tag(JOB, acked.stream)
            writer, stream = at(server.name, call.writer), at(server.name, acked.stream)
            server.checkers.acknowledged(server.name, writer, stream, tag, acked.durable_sequence)
        if call.broken or call.client is None:
            return
        self._given += item.credit_bytes if item is not None else 0
        if item is not None and self._last is not None and server.kernel.chance(0.5):
            server.kernel.count("replies joined")
            together = Gathered()
            together.add(self._last)
            together.add(item)
            self._last.CopyFrom(together.drain())
            return
        self._last = item
        call.down_at = max(call.down_at, server.kernel.now + server.network.delay_s())
        if item is None:
            server.later(0.0, self._end)
        else:
            self._underway += 1
            call.client.at(call.down_at, self._deliver, item)

    def _deliver(self, reply: log_pb2.AppendReply) -> None:
        if reply is self._last:
            self._last = None
        self._underway -= 1
        self._got += reply.credit_bytes
        if not self._underway and self._got != self._given:
            raise Violation("credit", f"{self.call.writer} was given {self._given} bytes and got {self._got}")
        if not self.call.broken:
            self.call.on_reply(self.call, reply)

    def _end(self) -> None:
        call, session = self.call, self.call.session
        assert session is not None
        refusal = session.refusal
        self.server.detach(call)
        if refusal is not None:
            self.server.kernel.count(f"writer refused: {refusal.reason}")
            if refusal.reason is Reason.LIMIT:
                raise Violation("limit", f"{call.writer} is one too many, it is said: {refusal.message}")
        if call.client is not None and not call.broken:
            reason, message = (refusal.reason, refusal.message) if refusal is not None else ("", "ended")
            call.client.at(max(call.down_at, self.server.kernel.now), call.on_end, call, reason, message)


class Observed(Commits):
    """Tells the checkers what is accepted."""

    def __init__(self, state: ServerState, server: "ServerProcess") -> None:
        super().__init__(state)
        self._server = server

    def put(self, session: AppendCall, stream: StreamState, write: Write, fsync: Fsync) -> None:
        outbox = session.outbox
        assert isinstance(outbox, Outbox)
        frame = b"".join(map(written, write.frame))
        self._server.checkers.accepted(self._server.name, outbox.call.writer, frame)
        super().put(session, stream, write, fsync)


class ServerProcess(Process):
    """From one start to the next crash."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        network: Network,
        disk: SimDisk,
        fsync: Fsync,
        checkers: Checkers,
        on_crash: Callable[[], None],
    ) -> None:
        super().__init__(kernel, name)
        self.network = network
        self.checkers = checkers
        self.on_crash = on_crash
        self._disk = disk
        self._committing = False
        self._settling: list[tuple[Target, Callable[[], None]]] = []
        self._procedures: deque[tuple[Callable[[], Procedure], Callable[[Refusal | None, object], None]]] = (
            deque()
        )
        self._busy = False
        self._resets = (0, 0)
        """The reset that is carried out, or was last: (generation, which of its resets)."""
        self.calls: set[Call] = set()
        """All that were begun and have not ended: their writers notice a crash."""
        storage = DirectoryStorage(ROOT, SEGMENT_BYTES, disk, OPEN_MAX, disk.new_uid)
        self.storage = storage
        config = EngineConfig(
            fsync=fsync,
            fsync_interval_s=0.1,
            credit_bytes=2000,
            body_bytes_max=8192,
            jobs_max=1,
            job_streams_max=STREAMS_MAX,
            job_bytes_max=WRITERS_MAX * EngineConfig(credit_bytes=2000, body_bytes_max=8192).writer_bytes_max,
        )
        self.state = ServerState(storage, config, Unlocked())
        self._commits = Observed(self.state, self)
        self._appends = Appends(self.state, self._commits)
        self.reading = Reading(self.state, self, lambda: kernel.now)  # type: ignore[arg-type]  # it asks for trim_later alone
        self._observe()
        for job in storage.recover():
            if job.apart:
                raise Violation("set apart", job.apart)
            self._appends.take_over(job, kernel.now)
            kernel.counts["record recovered"] += sum(len(found.by_sequence) for found in job.streams)
            kernel.counts["torn tail cut off"] += len(job.torn_bytes)
            kernel.counts["hole found at a start"] += sum(bool(found.holes) for found in job.streams)
        if fsync is Fsync.INTERVAL:
            self.later(0.1, self._interval)
        self.later(LOOK_EVERY_S, self._look_at_disk)

    def _observe(self) -> None:
        """Tells the checkers what is dropped."""
        core, checkers = self.state.core, self.checkers
        begin_trim, reset = core.begin_trim, core.reset

        def observed_trim(job: JobState, below_step: int) -> bool:
            changed = begin_trim(job, below_step)
            checkers.trim_done(self.name, job.trimmed_below_step)
            return changed

        def observed_reset(job: JobState) -> list[StreamState]:
            dropped = {at(self.name, name): stream.durable for name, stream in job.streams.items()}
            checkers.reset_done(self.name, dropped, self._resets)
            return reset(job)

        core.begin_trim = observed_trim  # type: ignore[method-assign]
        core.reset = observed_reset  # type: ignore[method-assign]

    def guarded(self, work: Callable[..., None], *args: object) -> None:
        """What touches the disk: the process may be gone in the middle of it."""
        try:
            work(*args)
        except PowerCut:
            self.kernel.count("killed between two operations of the disk")
            self.on_crash()

    # -- a writer's call ------------------------------------------------------------------------------

    def receive(self, call: Call, message: bytes | None) -> None:
        """The next message of a call; None: it begins."""
        if self.kernel.now > call.deaf_from:
            return
        if message is None:
            call.session = AppendCall(Outbox(self, call), Assembler(self.state.config.body_bytes_max))
            try:
                self._appends.attach(call.session)
            except Refused as refused:
                call.session.end(refused.refusal)
            return
        session = call.session
        if session is None or session.ended:
            return
        try:
            frames, shared = split_frames(message), b""
            if frames is None:
                request = log_pb2.AppendRequest.FromString(message)
                for opening in request.opens:
                    self._appends.open(session, opening, self.kernel.now)
                frames, shared = memoryview(request.frames), request.shared
            if frames or shared:
                self._appends.accept(session, self._appends.parse(session, frames, shared))
        except Refused as refused:
            if isinstance(refused, Quarantined):
                self.kernel.count("stream quarantined")
                job = refused.stream.job
                self.run(lambda: self._save(job), lambda refusal, result: None)
            session.end(refused.refusal)
        except DecodeError:
            session.end(Refusal(Reason.INVALID, "not an AppendRequest"))
        self._kick()

    def _save(self, job: str) -> Procedure:
        yield Save(job, procedures.meta_of(self.state.core.job(job)))

    def detach(self, call: Call) -> None:
        self.calls.discard(call)
        if call.session is not None:
            self._appends.detach(call.session)

    # -- the committer's part -------------------------------------------------------------------------

    def _kick(self) -> None:
        if not self._committing and (self._commits.work_to_do):
            self._committing = True
            self.later(self.kernel.between(0.0, 0.01), self._begin_commit)

    def _interval(self) -> None:
        self.later(0.1, self._interval)
        if not self._committing and self._commits.sync_due([], self.kernel.now) and not self.state.failed:
            self._committing = True
            self._begin_commit()

    def _begin_commit(self) -> None:
        batch = self._commits.next_batch()
        sync = self._commits.sync_due(batch, self.kernel.now)
        self.guarded(self._commit, batch, sync)

    def _commit(self, batch: list[Queued], sync: bool) -> None:
        try:
            unmended = self.storage.commit([queued.write for queued in batch], sync)
        except (StorageFull, StorageFailed, BodyChanged) as error:
            names = {StorageFull: "disk full", StorageFailed: "storage failed", BodyChanged: "body changed"}
            self.kernel.count(names[type(error)])
            self._commits.gave_up(error, batch, self.kernel.now)
            self._committing = False
            self._wake()
            self._kick()
            return
        self.later(self.kernel.between(0.0, 0.01), self._end_commit, batch, sync, unmended)

    def _end_commit(self, batch: list[Queued], sync: bool, unmended: list[Write]) -> None:
        for notice in self._commits.committed(batch, sync, self.kernel.now, unmended):
            self.kernel.count(notice.event)
        self._committing = False
        self._wake()
        self._kick()

    def _wake(self) -> None:
        waiting, self._settling = self._settling, []
        for target, go_on in waiting:
            if self._commits.is_settled(target):
                self.later(0.0, go_on)
            else:
                self._settling.append((target, go_on))

    # -- fence, trim, reset: one at a time --------------------------------------------------------------

    def run(self, make: Callable[[], Procedure], answer: Callable[[Refusal | None, object], None]) -> None:
        self._procedures.append((make, answer))
        if not self._busy:
            self._next_procedure()

    def reset(self, generation: int, number: int) -> Procedure:
        self._resets = (generation, number)
        return procedures.reset(self.state, JOB, generation, number)

    def trim_later(self, job: object) -> None:
        """A reader has gone that held up a trim (as Administration's)."""
        state = self.state.core.job(JOB)
        self.run(lambda: procedures.trim(self.state, state, 0), lambda refusal, result: None)

    def _next_procedure(self) -> None:
        self._busy = bool(self._procedures)
        if self._procedures:
            make, answer = self._procedures.popleft()
            self._advance(make(), answer)

    def _advance(self, procedure: Procedure, answer: Callable[[Refusal | None, object], None]) -> None:
        self.guarded(self._steps, procedure, answer)

    def _steps(self, procedure: Procedure, answer: Callable[[Refusal | None, object], None]) -> None:
        try:
            step = next(procedure)
            if isinstance(step, Settle):
                target = self._commits.ask_to_settle(step.job)
                self._settling.append((target, lambda: self._settled(procedure, answer)))
                self._wake()
                self._kick()
                return
            if isinstance(step, Save):
                self.storage.save(step.job, step.meta)
            elif isinstance(step, Clean):
                for stream in step.streams:
                    first = (stream.job, stream.name, stream.first)
                    self.later(self.kernel.between(0.0, 0.5), self.guarded, self._remove, *first)
            elif isinstance(step, Forget):
                remove_files = self.storage.drop(step.job)
                self.later(self.kernel.between(0.0, 0.5), self.guarded, remove_files)
            self.later(self.kernel.between(0.0, 0.01), self._advance, procedure, answer)
        except StopIteration as done:
            self._answer(answer, None, done.value)
        except Refused as refused:
            self._answer(answer, refused.refusal, None)
        except (StorageFull, StorageFailed) as error:
            reason = Reason.FULL if isinstance(error, StorageFull) else Reason.CLOSED
            try:
                procedure.throw(Refused(reason, str(error)))
            except Refused as refused:
                self._answer(answer, refused.refusal, None)

    def _settled(self, procedure: Procedure, answer: Callable[[Refusal | None, object], None]) -> None:
        if self.state.failed:
            self._answer(answer, Refusal(Reason.CLOSED, self.state.failed), None)
        else:
            self._advance(procedure, answer)

    def _answer(
        self, answer: Callable[[Refusal | None, object], None], refusal: Refusal | None, result: object
    ) -> None:
        answer(refusal, result)
        self._next_procedure()

    def _look_at_disk(self) -> None:
        self.later(LOOK_EVERY_S, self._look_at_disk)
        self._look()

    def _look(self) -> None:
        for notice in self.state.look_at_disk(self._disk.free_bytes(), self.kernel.now):
            self.kernel.count(f"told: {notice.event}")

    def _remove(self, job: str, stream: str, first: int) -> None:
        try:
            if self.storage.remove(job, stream, first):
                self.state.space.files_removed(self.kernel.now)
                self._look()
        except (StorageFull, StorageFailed):
            self.kernel.count("segment not removed")

    # -- reading --------------------------------------------------------------------------------------

    def read(self, stream: str, from_step: int, from_sequence: int) -> tuple[list[bytes], Refusal | None]:
        """What a Read without follow gives."""
        request = log_pb2.ReadRequest(
            job=JOB, stream=stream, from_step=from_step, from_sequence=from_sequence, follow=False
        )
        messages = []
        try:
            for message in self.reading.read(request, lambda: True):
                messages.append(message)
        except Refused as refused:
            return messages, refused.refusal
        return messages, None

    def digests(self, stream: str, from_step: int) -> tuple[list[log_pb2.RecordDigest], Refusal | None]:
        request = log_pb2.DigestsRequest(job=JOB, stream=stream, from_step=from_step)
        try:
            return [record for some in self.reading.digests(request) for record in some], None
        except Refused as refused:
            return [], refused.refusal

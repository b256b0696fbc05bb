"""The simulated coordinator: the real core, carried out as its driver does, with a durable row that outlives it."""

from collections.abc import Callable
from typing import Protocol

from services.coordinator import messages as m
from services.coordinator.core import Job
from services.coordinator.driver import GIVEN_UP
from services.coordinator.messages import Refusal
from services.coordinator.row import JobRow, LogServer
from services.coordinator.timing import Timing
from services.coordinator.views import view_of
from services.logserver import core as log_core
from services.logserver import procedures
from swift._pb import coordinator_pb2 as pb
from swift.log.wire import Reason
from swift.recovery import StreamSummary
from tests.sim.checkers import Checkers
from tests.sim.kernel import Kernel, Network, Process
from tests.sim.server import JOB, ServerProcess

TICK_S = 0.5
CALL_S = 1.0
TRIM_ATTEMPTS = 5

Answer = Callable[[Refusal | None], None]


class Shown:
    """A View, and the history that its job is in."""

    def __init__(self, view: pb.View, history: int, fenced: frozenset[str]) -> None:
        self.view = view
        self.history = history
        self.fenced = fenced


class Surroundings(Protocol):
    """What the coordinator finds around it."""

    checkers: Checkers
    history: int
    copies: int
    log_lost_s: float
    """0: whatever a log server does, it is waited for."""

    def servers(self) -> dict[str, ServerProcess | None]: ...

    def show(self, shown: Shown) -> None: ...

    def coordinator_died(self, saved: str | None) -> None: ...

    def row_saved(self, row: JobRow) -> None: ...


class _Died(Exception):
    """Between two effects."""


class _Question:
    """Asked of every log server until all have answered, or a newer one of its kind replaces it."""

    def __init__(self, kind: str, number: int, names: list[str]) -> None:
        self.kind = kind
        self.number = number
        self.open = set(names)
        self.answers: dict[str, list[StreamSummary]] = {}
        self.attempts = 0


class Coordinator(Process):
    """From one start to the next crash."""

    def __init__(
        self, kernel: Kernel, network: Network, world: Surroundings, saved: str | None, names: list[str]
    ) -> None:
        super().__init__(kernel, "coordinator")
        self.network = network
        self.world = world
        self.crash_in = -1
        """So many effects until it is gone; negative: it is not."""
        self.job: Job | None = None
        self.shown: Shown | None = None
        self._names = names
        self._timing = Timing(heartbeat_s=0.5, lease_s=3.0, step_bound_s=10.0, log_lost_s=world.log_lost_s)
        self._questions: dict[str, _Question] = {}
        self._before: str | None = saved
        if saved is not None:
            self.job = Job(JobRow.from_json(saved), self._timing, kernel.now)
            self._publish()
            self._guarded(lambda: self._carry_out(self._resume()))
        self.later(TICK_S, self._tick)

    def _resume(self) -> list[m.Effect]:
        assert self.job is not None
        return self.job.resume()

    def saved(self) -> str | None:
        """What a successor finds, if this one dies between two commands."""
        return self.job.row.to_json() if self.job is not None and self.job.row.revision else None

    # -- commands -------------------------------------------------------------------------------------

    def handle(self, command: m.Command, answer: Answer) -> None:
        def work() -> None:
            try:
                self._apply(command)
            except Refusal as refusal:
                answer(refusal)
            else:
                answer(None)

        self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Died:
            self.kernel.count("coordinator killed between two effects")
            self.world.coordinator_died(self._before)

    def _apply(self, command: m.Command) -> None:
        now = self.kernel.now
        if self.job is None:
            if not isinstance(command, m.Join):
                return
            servers = [LogServer(address=name, host=name) for name in self._names]
            self.job = Job.create(JOB, servers, command, self._timing, now, self.world.copies)
        elif not isinstance(command, m.Tick):
            self._step(m.Tick())
        self._step(command)

    def _step(self, command: m.Command) -> None:
        assert self.job is not None
        if self.crash_in >= 0:
            self._before = self.saved()
        self._carry_out(self.job.step(command, self.kernel.now))

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        if self.job is not None:
            self._guarded(lambda: self._apply(m.Tick()))
        if self.job is not None and self.world.log_lost_s:
            for name in self.job.row.addresses():
                server = self.world.servers()[name]
                if server is not None:
                    self.network.send(self.name, server, self._say_it_is_there, server)

    def _say_it_is_there(self, server: ServerProcess) -> None:
        """(at the server)"""
        self.network.send(server.name, self, self._hear, server.name)

    def _hear(self, name: str) -> None:
        self._guarded(lambda: self._apply(m.LogHeard(address=name)))

    # -- effects --------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[m.Effect]) -> None:
        job = self.job
        assert job is not None
        for effect in effects:
            if self.crash_in >= 0:
                if self.crash_in == 0:
                    raise _Died
                self.crash_in -= 1
            match effect:
                case m.Persist():
                    self.world.row_saved(job.row)
                    if self.crash_in >= 0:
                        self._before = job.row.to_json()
                case m.PublishView():
                    self._publish()
                case m.FenceLogs():
                    self._ask("fence", effect.generation)
                case m.FetchInventory():
                    self._ask("inventory", effect.generation)
                case m.ResetLogs():
                    self._ask("reset", effect.generation)
                case m.TrimLogs():
                    self.world.checkers.trim_asked(effect.below_step, self.world.history)
                    self._ask("trim", effect.below_step)
                case m.Emit():
                    self.kernel.count(f"coordinator: {effect.event}")
                    if effect.event == "state":
                        words = "coordinator: generation {} is {} {}"
                        self.kernel.note(words, job.row.generation, job.row.state, job.row.reason)

    def _publish(self) -> None:
        assert self.job is not None
        row = self.job.row
        fenced = frozenset(holder.incarnation for holder in row.fenced)
        self.shown = Shown(view_of(row), row.rolled_back_in, fenced)
        self.world.show(self.shown)

    # -- questions to log servers -----------------------------------------------------------------------

    def _ask(self, kind: str, number: int) -> None:
        assert self.job is not None
        names = self.job.row.addresses()
        question = self._questions[kind] = _Question(kind, number, names)
        for name in names:
            self._send(question, name)

    def _send(self, question: _Question, name: str) -> None:
        if self._questions.get(question.kind) is not question or name not in question.open:
            return
        question.attempts += 1
        if question.kind == "trim" and question.attempts > TRIM_ATTEMPTS * len(self._names):
            return
        server = self.world.servers()[name]
        if server is not None:
            self.network.send(self.name, server, self._arrive, server, question)
        self.later(CALL_S, self._unanswered, question, name)

    def _unanswered(self, question: _Question, name: str) -> None:
        if self._questions.get(question.kind) is question and name in question.open:
            self._blocked(question, name, "no answer")
            self._send(question, name)

    def _blocked(self, question: _Question, name: str, reason: str) -> None:
        if question.kind != "trim":
            blocked = m.LogsBlocked(generation=question.number, address=name, reason=reason)
            self._guarded(lambda: self._apply(blocked))

    def _arrive(self, server: ServerProcess, question: _Question) -> None:
        """(at the server) As its servicer: one procedure, or two."""
        state, number = server.state, question.number

        def done(refusal: log_core.Refusal | None, result: object) -> None:
            if refusal is None and question.kind in ("fence", "reset"):
                self.world.checkers.fence_answered(server.name, number)
            self.network.send(server.name, self, self._answered, question, server.name, refusal, result)

        def then_reset(refusal: log_core.Refusal | None, result: object) -> None:
            if refusal is not None:
                done(refusal, result)
            else:
                server.run(lambda: procedures.reset(state, JOB, number, GIVEN_UP), done)

        if question.kind == "inventory":
            done(None, _summaries(server))
        elif question.kind == "trim":
            server.run(lambda: procedures.trim(state, state.core.job(JOB), number), done)
        else:
            answer = then_reset if question.kind == "reset" else done
            server.run(lambda: procedures.fence(state, JOB, number, self.kernel.now), answer)

    def _answered(
        self, question: _Question, name: str, refusal: log_core.Refusal | None, result: object
    ) -> None:
        if self._questions.get(question.kind) is not question or name not in question.open:
            return
        if refusal is not None and refusal.reason is Reason.STALE_GENERATION:
            refused = m.LogsRefused(generation=question.number, reason=refusal.message, address=name)
            self._guarded(lambda: self._apply(refused))
            return
        if refusal is not None:
            self._blocked(question, name, refusal.message)
            return
        question.open.discard(name)
        if isinstance(result, list):
            question.answers[name] = result
        self._blocked(question, name, "")
        if question.open or not self.alive or self._questions.get(question.kind) is not question:
            return
        del self._questions[question.kind]
        generation = question.number
        if question.kind == "fence":
            self._guarded(lambda: self._apply(m.LogsFenced(generation=generation)))
        elif question.kind == "reset":
            self.world.checkers.reset_over = max(self.world.checkers.reset_over, generation)
            self._guarded(lambda: self._apply(m.LogsReset(generation=generation)))
        elif question.kind == "inventory":
            servers = question.answers
            self._guarded(lambda: self._apply(m.InventoryTaken(generation=generation, servers=servers)))


def _summaries(server: ServerProcess) -> list[StreamSummary]:
    reply = server.reading.inventory(JOB)
    return [
        StreamSummary(
            stream=stream.stream,
            records=stream.records,
            first_step=stream.first_step if stream.has_records else -1,
            last_step=stream.last_step if stream.has_records else -1,
            trimmed_below_step=reply.trimmed_below_step,
            corrupt=stream.corrupt,
            reason=stream.reason,
            unlogged=(stream.unlogged_from_step, stream.unlogged_to_step)
            if stream.HasField("unlogged_from_step")
            else None,
            marks=stream.marks,
        )
        for stream in reply.streams
    ]

"""The simulated coordinator: the real core, carried out as its driver does, with a durable row that outlives it."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.protocol import Reason
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import log_placement
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, LogServer, decode
from swift_ft_services.coordinator.log_calls import summary_of
from swift_ft_services.coordinator.log_placement import RESETS, Call
from swift_ft_services.coordinator.timeouts import Timing
from swift_ft_services.coordinator.views import view_of
from swift_ft_services.logserver import core, procedures
from tests.sim.checkers import Checkers
from tests.sim.kernel import Kernel, Network, Process
from tests.sim.server import JOB, ServerProcess

TICK_S = 0.5
CALL_S = 1.0
CONNECT_S = 0.1
RETRY_S = 0.1

Answer = Callable[[Refusal | None], None]


class Shown:
    """A View, and the history that its job is in."""

    def __init__(self, view: pb.View, history: int, fenced: frozenset[str]) -> None:
        self.view = view
        self.history = history
        self.fenced = fenced


class SharedStore:
    """As etcd, for several coordinators: the rows, and which of them holds them."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self._holder: object = None

    def hold(self, by: object) -> dict[str, str]:
        """Takes the store over: the lease of the one before has ended. Returns what it finds."""
        self._holder = by
        return dict(self.rows)

    def holds(self, by: object) -> bool:
        return self._holder is by

    def commit(self, by: object, puts: Mapping[str, str], deletes: Collection[str]) -> bool:
        """Returns False, and changes nothing, unless this one holds the store."""
        if not self.holds(by):
            return False
        self.rows.update(puts)
        for key in deletes:
            self.rows.pop(key, None)
        return True


class Surroundings(Protocol):
    """What the coordinator finds around it."""

    checkers: Checkers
    history: int
    store: SharedStore
    copies: int
    log_lost_s: float
    """0: whatever a log server does, it is waited for."""
    looks_at_logs: bool
    """They are asked how they are, all the time."""

    def servers(self) -> dict[str, ServerProcess | None]: ...

    def show(self, shown: Shown) -> None: ...

    def coordinator_died(self) -> None: ...

    def row_saved(self, row: JobRow, by: object) -> None: ...


class _Died(Exception):
    """Between two effects."""


class _Lost(Exception):
    """Another coordinator holds the store."""


class _Question:
    """Asked of every log server until all have answered, or a newer one of its kind replaces it."""

    def __init__(
        self, kind: str, number: int, calls: dict[str, tuple[str | Call, ...]], below_step: int
    ) -> None:
        """``number``: of the generation. ``calls``: to each server, one after the other."""
        self.kind = kind
        self.number = number
        self.below_step = below_step
        self.calls = calls
        self.open = set(calls)
        self.answers: dict[str, list[StreamSummary]] = {}


class _Asked:
    """The first of these calls is under way; the others follow its answer."""

    def __init__(self, question: _Question, name: str, calls: tuple[str | Call, ...]) -> None:
        self.question = question
        self.name = name
        self.calls = calls
        self.until_s = 0.0
        self.over = False


class Coordinator(Process):
    """From one start to the next crash."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        world: Surroundings,
        names: list[str],
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
        saved = world.store.hold(self)
        if saved:
            self.job = Job(decode(JOB, saved), self._timing, kernel.now, stored=True)
            self._publish()
            self._guarded(lambda: self._carry_out(self._resume()))
        self.later(TICK_S, self._tick)

    def _resume(self) -> list[m.Effect]:
        assert self.job is not None
        return self.job.resume()

    # -- commands -------------------------------------------------------------------------------------

    def handle(self, command: m.Command, answer: Answer) -> None:
        def work() -> None:
            try:
                self._apply(command)
            except Refusal as refusal:
                if not self.world.store.holds(self):
                    raise _Lost from None
                answer(refusal)
            else:
                answer(None)

        self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Died:
            self.kernel.count("coordinator killed between two effects")
            self.alive = False
            if self.world.store.holds(self):
                self.world.coordinator_died()
        except _Lost:
            self.kernel.count("coordinator: lost its store")
            self.alive = False

    def _apply(self, command: m.Command) -> None:
        now = self.kernel.now
        if self.job is None:
            if not isinstance(command, m.Join):
                return
            servers = [LogServer(address=name, host=name) for name in self._names]
            self.job = Job.create(JOB, servers, command, self._timing, now, self.world.copies)
        self._step(command)

    def _step(self, command: m.Command) -> None:
        assert self.job is not None
        self._carry_out(self.job.step(command, self.kernel.now))

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        if self.job is not None:
            self._guarded(lambda: self._apply(m.Tick()))
        if self.job is not None and self.world.looks_at_logs:
            row = self.job.row
            for name in row.addresses():
                server = self.world.servers()[name]
                if server is not None:
                    self.network.send(
                        self.name, server, self._say_how_it_is, server, row.generation, row.granted
                    )

    def _say_how_it_is(self, server: ServerProcess, generation: int, granted: int) -> None:
        """(at the server)"""
        unknown = JOB not in server.state.core.jobs
        self.network.send(server.name, self, self._hear, server.name, generation, granted, unknown)

    def _hear(self, name: str, generation: int, granted: int, unknown: bool) -> None:
        """As the driver's `_space`."""
        self._guarded(lambda: self._apply(m.LogHeard(address=name)))
        if unknown and granted == generation:
            self._begin_anew(generation, name)

    def _begin_anew(self, generation: int, name: str) -> None:
        assert self.job is not None
        before = self.job.row.generation
        self._guarded(lambda: self._apply(m.LogLost(generation=generation, address=name)))
        if self.job.row.generation > before:
            self.kernel.count("log server used anew")

    # -- effects --------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[m.Effect]) -> None:
        job = self.job
        assert job is not None
        if not any(isinstance(effect, m.Persist) for effect in effects) and not self.world.store.holds(self):
            raise _Lost
        for effect in effects:
            if self.crash_in >= 0:
                if self.crash_in == 0:
                    raise _Died
                self.crash_in -= 1
            match effect:
                case m.Persist():
                    if not self.world.store.commit(self, *job.changes.drain()):
                        raise _Lost
                    self.world.row_saved(job.row, self)
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
                    self._ask("trim", effect.generation, effect.below_step)
                case m.Emit():
                    self.kernel.count(f"coordinator: {effect.event}")
                    if effect.event == "state":
                        words = "coordinator: generation {} is {} {}"
                        self.kernel.note(words, job.row.generation, job.row.state, job.row.reason)

    def _publish(self) -> None:
        assert self.job is not None
        row = self.job.row
        fenced = frozenset(holder.incarnation for holder in row.fenced.values())
        self.shown = Shown(view_of(row), row.rolled_back_in, fenced)
        self.world.show(self.shown)

    # -- questions to log servers -----------------------------------------------------------------------

    def _ask(self, kind: str, number: int, below_step: int = 0) -> None:
        assert self.job is not None
        calls: dict[str, tuple[str | Call, ...]] = dict.fromkeys(self.job.row.addresses(), (kind,))
        if kind == "fence":
            calls.update(log_placement.to_fence(self.job.row, self.job.places))
        elif kind == "reset":
            calls.update(log_placement.to_give_up(self.job.row))
        question = self._questions[kind] = _Question(kind, number, calls, below_step)
        for name in calls:
            self._try(question, name)

    def _try(self, question: _Question, name: str) -> None:
        """As the driver's `_until_answered`, which begins again with the first call."""
        assert self.job is not None
        row = self.job.row
        if self._questions.get(question.kind) is not question or name not in question.open:
            return
        if question.kind != "trim" and (row.generation != question.number or row.state.is_over):
            return
        self._begin(_Asked(question, name, question.calls[name]))

    def _begin(self, asked: _Asked) -> None:
        asked.until_s = self.kernel.now + CALL_S
        self._connect(asked)
        self.later(CALL_S, self._unanswered, asked)

    def _connect(self, asked: _Asked) -> None:
        """It waits for a server that is about to start."""
        server = self.world.servers()[asked.name]
        if server is not None:
            self.network.send(self.name, server, self._arrive, server, asked)
        elif self.kernel.now + CONNECT_S < asked.until_s:
            self.later(CONNECT_S, self._connect, asked)

    def _unanswered(self, asked: _Asked) -> None:
        if not asked.over:
            asked.over = True
            self._failed(asked, "no answer")

    def _failed(self, asked: _Asked, reason: str) -> None:
        kind = asked.question.kind
        if self._questions.get(kind) is asked.question and kind != "trim":  # the next checkpoint trims again
            self._blocked(asked.question, asked.name, reason)
            self.later(RETRY_S, self._try, asked.question, asked.name)

    def _blocked(self, question: _Question, name: str, reason: str) -> None:
        if question.kind != "trim":
            blocked = m.LogsBlocked(generation=question.number, address=name, reason=reason)
            self._guarded(lambda: self._apply(blocked))

    def _arrive(self, server: ServerProcess, asked: _Asked) -> None:
        """(at the server) As its servicer."""
        state, number, call = server.state, asked.question.number, asked.calls[0]

        def done(refusal: core.Refusal | None, result: object) -> None:
            if refusal is None and call in (Call.FENCE, Call.FENCE_HELD):
                self.world.checkers.fence_answered(server.name, number)
            elif refusal is None and isinstance(call, Call) and call in RESETS:
                self.world.checkers.reset_answered(server.name, (number, RESETS[call]))
            self.network.send(server.name, self, self._answered, asked, refusal, result)

        if isinstance(call, Call) and call in RESETS:
            server.run(lambda: server.reset(number, RESETS[call]), done)
        elif isinstance(call, Call):
            held, now = call is Call.FENCE_HELD, self.kernel.now
            server.run(lambda: procedures.fence(state, JOB, number, now, held=held), done)
        elif call == "trim":
            below = asked.question.below_step
            server.run(lambda: procedures.trim(state, state.core.known(JOB), below, number), done)
        else:
            done(None, [summary_of(stream) for stream in server.reading.inventory(JOB).streams])

    def _answered(self, asked: _Asked, refusal: core.Refusal | None, result: object) -> None:
        question, name = asked.question, asked.name
        if asked.over or self._questions.get(question.kind) is not question:
            return
        asked.over = True
        if refusal is not None and question.kind == "trim":
            self._failed(asked, refusal.message)
        elif refusal is not None and refusal.reason in (Reason.STALE_GENERATION, Reason.NOT_GRANTED):
            del self._questions[question.kind]
            refused = m.LogsRefused(generation=question.number, reason=refusal.message, address=name)
            self._guarded(lambda: self._apply(refused))
        elif refusal is not None and refusal.reason is Reason.UNKNOWN:
            del self._questions[question.kind]
            self._begin_anew(question.number, name)
        elif refusal is not None:
            self._failed(asked, refusal.message)
        elif len(asked.calls) > 1:
            self._begin(_Asked(question, name, asked.calls[1:]))
        else:
            self._has_answered(question, name, result)

    def _has_answered(self, question: _Question, name: str, result: object) -> None:
        question.open.discard(name)
        if isinstance(result, list):
            question.answers[name] = result
        if question.kind != "trim":
            self._guarded(lambda: self._apply(m.LogHeard(address=name)))
        self._blocked(question, name, "")
        if question.open or not self.alive or self._questions.get(question.kind) is not question:
            return
        del self._questions[question.kind]
        generation = question.number
        if question.kind == "fence":
            self._guarded(lambda: self._apply(m.LogsFenced(generation=generation)))
        elif question.kind == "reset":
            self._guarded(lambda: self._apply(m.LogsReset(generation=generation)))
        elif question.kind == "inventory":
            servers = question.answers
            self._guarded(lambda: self._apply(m.InventoryTaken(generation=generation, servers=servers)))

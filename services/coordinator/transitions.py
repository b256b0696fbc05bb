"""What a job's core is made of, and its transitions: one `become_x` for each state (`core` draws them).

Each changes the row; `Job.step` finds what has changed.
"""

from collections.abc import Mapping, Sequence

from services.coordinator import commands as m
from services.coordinator import endings, exactness, moves, vacancies
from services.coordinator.checkpoints import CheckpointTracker
from services.coordinator.commands import Effect
from services.coordinator.leases import Leases
from services.coordinator.log_end import leave_recovering
from services.coordinator.log_placement import Places
from services.coordinator.messages_text import plan_fields
from services.coordinator.parts import Changes
from services.coordinator.planning import forget_recovery
from services.coordinator.regroup import Regroup
from services.coordinator.row import LEGAL, IllegalTransition, JobRow, LogServer, State
from services.coordinator.setbacks import Setbacks
from services.coordinator.step_watchdog import StepClock, Suspicions
from services.coordinator.timing import Timing
from swift.recovery import RankMeasured


class Transitions:
    """The parts of one job, and how it gets from state to state."""

    def __init__(
        self,
        row: JobRow,
        timing: Timing,
        now: float,
        log_servers: Sequence[LogServer] = (),
        stored: Mapping[str, str] | None = None,
    ) -> None:
        """`log_servers`: those there are now, for a job that is started again; none: those it had. `stored`: the parts
        that the row was read from; None: nothing of it is durable."""
        self.row = row
        self.changes = Changes(row, stored)
        """What of the row is not durable yet."""
        self._entered = (row.state, row.generation) if stored is not None else None
        self._log_servers = log_servers
        self.steps = StepClock(timing)
        self.checkpoints = CheckpointTracker(row, self.steps, timing)
        self.places = Places(row, timing, now)
        self.regroup = Regroup(row)
        self.endings = endings.Endings(row, self.steps, timing)
        self.setbacks = Setbacks(row, self.steps)
        self.leases = Leases([rank for rank, holder in row.holders.items() if not holder.gone], now)
        self._timing = timing
        self._looked = now
        self.measured: dict[int, RankMeasured] = {}
        """rank -> what it, or its predecessor, has said last; not durable: it is said again."""
        self.suspicions = Suspicions(self.steps)
        self._awaited = vacancies.Awaited()
        self.moves = moves.Moves(row, timing)
        self.replays: dict[int, m.Replaying] = {}
        """rank -> how far its replay is, while there is one."""

    def become_running(self, now: float) -> list[Effect]:
        """All ranks are ready: the recovery, if there was one, is over and forgotten."""
        self._enter(State.RUNNING)
        progress = self._progress()  # by a checkpoint that was complete while they recovered
        inexact = self._inexact(exactness.settle(self.row))
        vacancies.settle(self.row, max(self.row.ready.values()))
        forget_recovery(self.row)
        self.suspicions.clear()
        self.steps.restart(self.row.ready, now)
        version = max(self.row.ready.values())
        self.checkpoints.run_on(version)
        asked = self._asked(version, self.places.settle(version) or vacancies.wants_checkpoint(self.row))
        return [*self._transition(), *progress, *inexact, *asked, *self._trim()]

    def become_forming(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        """A new generation of a job that has not run yet: all begin anew, at version 0."""
        self._enter(State.FORMING)
        events = self._new_generation(dead, reason)
        self._forget_formed()
        return [*self._transition(), *events, *self._fence_logs()]

    def _forget_formed(self) -> None:
        """(FORMING) What was saved so far is of weights that nobody may have later, and of stages that may not fit."""
        row = self.row
        if row.state is State.FORMING:
            row.rolled_back_in = row.generation
            row.checkpoints, row.shards, row.shards_from = [], {}, 0

    def become_fencing(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        """A new generation without the holders of the `dead` ranks (rank -> why)."""
        leave_recovering(self.row)
        self._enter(State.FENCING)
        events = self._new_generation(dead, reason)
        return [*self._transition(), *events, *self._fence_logs()]

    def _new_generation(self, dead: Mapping[int, str], reason: str) -> list[m.Emit]:
        row = self.row
        self.setbacks.begin_generation()
        row.generation += 1
        row.reason = reason
        row.reports, row.ready, row.finished, row.blocked, row.plan, row.sources = {}, {}, {}, {}, None, {}
        row.called = {}
        events = []
        for rank in sorted({*dead, *(rank for rank, holder in row.holders.items() if holder.gone)}):
            holder = row.holders.pop(rank)
            row.fenced.append(holder)
            self.leases.forget(rank)
            self.steps.forget(rank)
            self.checkpoints.forget(rank)
            why = dead.get(rank, "had finished and exited")
            events.append(self._event("fenced", rank=rank, incarnation=holder.incarnation, reason=why))
        moves.keep(row)
        return events

    def _anew(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        vacant = vacancies.vacate(self.row, dead)
        events = [self._event("left_vacant", rank=slot) for slot in vacant]
        return [*self._begin_anew(dead, reason), *events]

    def _deaths(self, dead: Mapping[int, str], lost: Mapping[int, str]) -> list[Effect]:
        """Of ranks, and the loss of log servers, found together."""
        reason = "; ".join(f"rank {rank} {why}" for rank, why in sorted(dead.items()))
        words = self.places.lose(lost)
        events = [self._event("log_server_lost", **self.places.named(n), reason=words[n]) for n in lost]
        return [*self._anew(dead, "; ".join(filter(None, [reason, *words.values()]))), *events]

    def overdue(self, now: float) -> list[int]:
        """The lost ranks for which to wait longer costs more than to go on without them."""
        timing, row = self._timing, self.row
        if not vacancies.shrinks_late(row.config):
            return []
        known = self.measured.values()
        limit_s = vacancies.patience_s(row, known, timing.lease_s, timing.replaced_within_s)
        return self._awaited.overdue(row, limit_s, now)

    def give_up(self, ranks: Sequence[int]) -> list[Effect]:
        """No process comes for these, which nobody holds."""
        row = self.row
        waits = row.state in (State.FENCING, State.PLANNING, State.RECOVERING)
        missing = [rank for rank in ranks if rank not in row.holders and rank not in row.vacant]
        if not missing or not waits or not vacancies.shrinks_late(row.config):
            return []
        if ends := vacancies.give_up(row, missing):
            return self.become_failed(ends)
        return self._anew({}, f"no process takes the place of rank {', '.join(map(str, missing))}")

    def move_due(self, now: float) -> list[Effect]:
        """A lost rank's place is to be found at another stage; or nobody has joined for it."""
        if not (self.row.vacant or self.row.move):
            return []
        before, version = self.row.move, max(map(self.steps.version, self.row.holders), default=0)
        if not self.moves.look(self.measured, version, now):
            return []
        rank, to = self.row.move or before
        event = "move_wanted" if self.row.move else "move_given_up"
        return self._told([self._event(event, rank=rank, to=to)])

    def _begin_anew(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        if self.row.state is State.FORMING:
            return self.become_forming(dead, reason)
        return self.become_fencing(dead, reason)

    def _without_death(self, reason: str, what: str = "") -> list[Effect]:
        """A new generation in which all keep what they hold; as often as `setbacks` allows."""
        if ends := self.setbacks.refuse(what or reason):
            return self.become_failed(ends)
        return self._anew({}, reason)

    def _fence_logs(self) -> list[Effect]:
        """Nothing, if all log servers are lost: then it is waited for another one."""
        return [] if self.row.lacks_log_server() else [m.FenceLogs(generation=self.row.generation)]

    def become_planning(self) -> list[Effect]:
        self._enter(State.PLANNING)
        return self._transition()

    def become_recovering(self) -> list[Effect]:
        """The plan is made: what it gives up, or makes inexact, is taken back first."""
        self._enter(State.RECOVERING)
        row = self.row
        assert row.plan is not None
        if row.plan.restores:
            # What was saved after that version belongs to a history that is given up.
            row.rolled_back_in = row.generation
            self.checkpoints.roll_back(row.plan.target_version)
        elif not row.plan.exact:
            # What is saved from now on has other bits: no checkpoint is made of both.
            row.rolled_back_in = row.generation
            row.shards = {}
        return [*self._transition(), self._plan_event()]

    def _plan_event(self) -> m.Emit:
        """The plan in the trace. Said again after a restart: the drill's report cannot do without it."""
        assert self.row.plan is not None
        return self._event("plan", **plan_fields(self.row.plan))

    def become_finished(self) -> list[Effect]:
        self._enter(State.FINISHED)
        row = self.row
        version = max(row.finished.values())
        row.reason = endings.reason(row, version)
        row.final = version if version in row.checkpoints else None
        row.move = []
        return self._transition()

    def become_failed(self, reason: str, exit_code: int = 0) -> list[Effect]:
        self._forget_formed()
        self._enter(State.FAILED)
        self.row.reason = reason
        self.row.exit_code = exit_code
        self.row.blocked = {}
        return self._transition()

    def become_stopped(self, reason: str) -> list[Effect]:
        """Nobody is left, on purpose."""
        self._forget_formed()
        self._enter(State.STOPPED)
        self.row.reason = f"its launcher was told to stop: {reason}"
        self.row.blocked = {}
        self.suspicions.clear()
        return self._transition()

    def _enter(self, state: State) -> None:
        if state not in LEGAL[self.row.state]:
            raise IllegalTransition(f"{self.row.job}: {self.row.state} -> {state}")
        self.row.state = state
        self.replays.clear()

    def _transition(self) -> list[Effect]:
        state = self._event("state", state=str(self.row.state), reason=self.row.reason)
        return [state, m.PublishView()]

    # --- what is told ---

    def _asked(self, after_version: int, reason: str) -> list[m.Emit]:
        if not reason or not self.checkpoints.ask(after_version, reason):
            return []
        return [self._event("checkpoint_asked", version=self.row.checkpoint_at, reason=reason)]

    def _trim(self) -> list[Effect]:
        """Only while RUNNING: a replay under way must not lose its records."""
        if self.row.state is not State.RUNNING or not any(self.row.checkpoints):
            return []
        return [m.TrimLogs(below_step=self.row.checkpoints[-1])]

    def _progress(self) -> list[m.Emit]:
        """(a rank has told its version, or a checkpoint is complete)"""
        if not self.setbacks.made_progress():
            return []
        return [
            self._event("progress", version=max([self.checkpoints.newest_known(), *self.row.checkpoints]))
        ]

    def _told(self, events: Sequence[m.Emit]) -> list[Effect]:
        """The row has changed, of which these tell; nothing without any."""
        return [*events, m.PublishView()] if events else []

    def _groups_event(self) -> m.Emit:
        row = self.row
        return self._event("groups", in_force=row.groups, since=row.groups_since, wanted=row.groups_next)

    def _inexact(self, news: bool) -> list[m.Emit]:
        return [self._event("not_exact", **exactness.fields(self.row))] if news else []

    def _persist(self) -> list[m.Persist]:
        """Whatever has changed since the last time has to be durable."""
        row, now = self.row, (self.row.state, self.row.generation)
        if not self.changes.look():
            return []
        row.revision += 1
        entered, self._entered = (row.state if now != self._entered else None), now
        return [m.Persist(entered=entered)]

    def _event(self, event: str, **fields: object) -> m.Emit:
        return m.Emit(event=event, fields={"job": self.row.job, "generation": self.row.generation, **fields})

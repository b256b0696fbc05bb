"""Job: the state machine of one job. Takes commands and a clock reading, returns effects; does no I/O.

    FORMING ──all ready──> RUNNING ──all finished──> FINISHED ──started again──> FENCING
     ^   │                  │    ^
     └───┘            death │    │ all ready at the target
    death,                  v    │
    generation + 1    FENCING ──> PLANNING ──> RECOVERING
                         ^  logs fenced  all reported  │
                         └─ death, refusal, connection ┘   (from all four: generation + 1)
                            lost while all ranks live
    (no rank is left) ──all launchers asked to stop──> STOPPED ──started again──> FENCING
    (any) ──no plan, no progress, an error──> FAILED ──started again──> FENCING (FORMING: no checkpoint is complete)

Each `become_x` makes one transition. `step` makes at most one of them. If it changes the row (`Changes`), its effects
begin with Persist. After a crash, `resume` returns the effects of the state again: all are idempotent.

Invariants: the generation only grows, and grows with every death or refusal. granted <= generation. RUNNING requires
all ranks ready at one version. A View is a function of the row, so it shows only durable state. The number of
generations without a death and without a new version is bounded (`Setbacks`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import optional
from swift_ft.planner import HeldSnapshot, Report
from swift_ft_services.coordinator import checkpoints, endings, planning, restarts
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.checks import (
    check_change,
    check_first,
    check_holder,
    check_join,
    check_rank,
    check_ready,
    is_stale,
)
from swift_ft_services.coordinator.commands import Effect, Invalid
from swift_ft_services.coordinator.job_record import (
    LEGAL,
    Changes,
    Holder,
    IllegalTransition,
    JobRow,
    LogServer,
    State,
)
from swift_ft_services.coordinator.liveness import Leases, StepClock, Suspicions
from swift_ft_services.coordinator.log_placement import Places
from swift_ft_services.coordinator.timeouts import Timing


def report_of(said: pb.ReportRequest, holder: Holder) -> Report:
    return Report(
        rank=holder.rank,
        version=said.version if said.has_state else None,
        undo_to=optional(said, "undo_to"),
        undo_exact=said.undo_exact,
        forward_to=optional(said, "forward_to"),
        forward_by_all=said.forward_by_all,
        finish_to=optional(said, "finish_to"),
        since_generation=holder.since_generation,
        host=holder.host,
        can_help=said.can_help,
        snapshots=tuple(HeldSnapshot(held.rank, held.version) for held in said.snapshots),
    )


def versions_words(versions: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank} at {version}" for rank, version in sorted(versions.items()))


class Job:
    """The state machine of one job. Not thread-safe. `now` is in monotonic seconds and never decreases.

    Each `become_x` makes one transition (the module docstring draws them) by changing the row; `step` detects the
    changes.
    """

    legal: Mapping[State, frozenset[State]] = LEGAL
    """State -> the states that may follow it."""
    uses_log = True
    """False: the job has no log servers."""

    @classmethod
    def create(
        cls, job: str, log_servers: list[LogServer], join: m.Join, timing: Timing, now: float, copies: int = 1
    ) -> "Job":
        """Creates a job from its first Join, which is then passed to `step`. Raises Refusal if it is invalid."""
        check_first(join.request)
        row = restarts.first_row(job, log_servers if cls.uses_log else [], join.request, copies)
        restarts.begin_at_checkpoint(row, join.origin)
        return cls(row, timing, now, log_servers)

    def __init__(
        self,
        row: JobRow,
        timing: Timing,
        now: float,
        log_servers: Sequence[LogServer] = (),
        stored: bool = False,
    ) -> None:
        """`log_servers`: the log servers available now, used if the job is started again; if empty, it keeps its own.
        `stored`: True if the whole row is durable already, False if none of it is."""
        self.row = row
        self.changes = Changes(row, stored=stored)
        """Parts of the row that are not durable yet."""
        self._entered = (row.state, row.generation) if stored else None
        self._log_servers = log_servers if self.uses_log else ()
        self.steps = StepClock(timing)
        self.checkpoints = checkpoints.CheckpointTracker(row, self.steps, timing)
        self.places = Places(row, timing, now)
        self.endings = endings.Endings(row, self.steps, timing)
        self.setbacks = endings.Setbacks(row, self.steps)
        self.leases = Leases([rank for rank, holder in row.holders.items() if not holder.gone], now)
        self._timing = timing
        self._looked = now
        self.measured: dict[int, pb.RankMeasured] = {}
        """rank -> last measurement reported by it or its predecessor. Not durable: ranks report it again."""
        self.suspicions = Suspicions(self.steps)
        self._suspected: list[m.Emit] = []
        """Events of suspicions in this generation: emitted after the one that shows their cause."""
        self._awaited = planning.Awaited()
        self.replays: dict[int, pb.ReplayProgress] = {}
        """rank -> progress of its replay, while it replays."""

    def become_running(self, now: float) -> list[Effect]:
        """Enters RUNNING when all ranks are ready. Ends the recovery, if there was one, and clears its state."""
        self._enter(State.RUNNING)
        progress = self._progress()  # progress by a checkpoint that became complete during the recovery
        inexact = self._inexact(checkpoints.record_plan_exactness(self.row))
        planning.mark_vacant_since(self.row, max(self.row.ready.values()))
        planning.forget_recovery(self.row)
        self.suspicions.clear()
        self.steps.restart(self.row.ready, now)
        version = max(self.row.ready.values())
        self.checkpoints.run_on(version)
        asked = self._asked(
            version, self.places.mark_whole_from(version) or planning.wants_checkpoint(self.row)
        )
        begun = [*self._transition(), *progress, *inexact, *asked, *self._trim()]
        return [*begun, *self._fail_inexact(self.row.inexact_since is not None)]

    def become_forming(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        """Starts a new generation of a job that has not run yet: all ranks begin at version 0 again."""
        self._enter(State.FORMING)
        events = self._new_generation(dead, reason)
        self._forget_formed()
        return [*self._transition(), *events, *self._fence_logs()]

    def _forget_formed(self) -> None:
        """(FORMING) Discards checkpoints and shards: the next ranks may have other weights and other stages."""
        row = self.row
        if row.state is State.FORMING:
            row.rolled_back_in = row.generation
            row.checkpoints, row.shards, row.shards_from = [], {}, 0

    def become_fencing(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
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
        gone = {rank: "had finished and exited" for rank, holder in row.holders.items() if holder.gone}
        events = self._fence(gone | dict(dead))
        checkpoints.forget(row)
        events, self._suspected = [*events, *self._suspected], []
        return events

    def _fence(self, dead: Mapping[int, str]) -> list[m.Emit]:
        """Takes their ranks from these processes."""
        events = []
        for rank, why in sorted(dead.items()):
            holder = self.row.holders.pop(rank)
            self.row.fence(holder)
            self.leases.forget(rank)
            self.steps.forget(rank)
            self.checkpoints.forget(rank)
            events.append(self._event("fenced", rank=rank, incarnation=holder.incarnation, reason=why))
        return events

    def _anew(self, dead: Mapping[int, str], reason: str) -> list[Effect]:
        vacant = planning.vacate(self.row, dead)
        events = [self._event("left_vacant", rank=slot) for slot in vacant]
        begin = self.become_forming if self.row.state is State.FORMING else self.become_fencing
        return [*begin(dead, reason), *events]

    def _deaths(self, dead: Mapping[int, str], lost: Mapping[int, str]) -> list[Effect]:
        if not lost and self.row.vacant.keys() >= dead.keys():  # spares: the others go on
            return self._with_view(self._fence(dead))
        reason = "; ".join(f"rank {rank} {why}" for rank, why in sorted(dead.items()))
        words = self.places.lose(lost)
        events = [self._event("log_server_lost", **self.places.named(n), reason=words[n]) for n in lost]
        return [*self._anew(dead, "; ".join(filter(None, [reason, *words.values()]))), *events]

    def overdue(self, now: float) -> list[int]:
        """Returns the lost ranks for which waiting longer costs more than continuing without them."""
        timing, row = self._timing, self.row
        if not planning.shrinks_late(row.config):
            return []
        known = self.measured.values()
        limit_s = planning.patience_s(row, known, timing.lease_s, timing.replaced_within_s)
        return self._awaited.overdue(row, limit_s, now)

    def give_up(self, ranks: Sequence[int]) -> list[Effect]:
        row = self.row
        waits = row.state in (State.FENCING, State.PLANNING, State.RECOVERING)
        missing = [rank for rank in ranks if rank not in row.holders and rank not in row.vacant]
        if not missing or not waits or not planning.shrinks_late(row.config):
            return []
        if ends := planning.give_up(row, missing):
            return self.become_failed(ends)
        return self._anew({}, f"no process takes the place of rank {', '.join(map(str, missing))}")

    def _without_death(self, reason: str, what: str = "") -> list[Effect]:
        """Starts a generation in which all ranks keep their state. Fails the job once `setbacks` reaches its limit."""
        if ends := self.setbacks.refuse(what or reason):
            return self.become_failed(ends)
        return self._anew({}, reason)

    def _fence_logs(self) -> list[Effect]:
        """Returns no effect if all log servers are lost: the job then waits for a new one."""
        return [] if self.row.lacks_log_server() else [m.FenceLogs(generation=self.row.generation)]

    def become_planning(self) -> list[Effect]:
        self._enter(State.PLANNING)
        return self._transition()

    def become_recovering(self) -> list[Effect]:
        """Enters RECOVERING. First invalidates the checkpoints and shards that the plan rolls back or makes inexact."""
        self._enter(State.RECOVERING)
        row = self.row
        assert row.plan is not None
        if row.plan.restores:
            # Anything saved after that version belongs to a discarded history.
            row.rolled_back_in = row.generation
            self.checkpoints.roll_back(row.plan.target_version)
        elif not row.plan.exact:
            # Later saves hold different bits: no checkpoint may combine shards from before and after.
            row.rolled_back_in = row.generation
            row.shards = {}
        return [*self._transition(), self._plan_event()]

    def _plan_event(self) -> m.Emit:
        """Returns the trace event of the plan. Emitted again after a restart: the drill's report needs it."""
        assert self.row.plan is not None
        return self._event("plan", **planning.plan_fields(self.row.plan))

    def become_finished(self) -> list[Effect]:
        self._enter(State.FINISHED)
        row = self.row
        version = max(row.finished.values())
        row.reason = endings.reason(row, version)
        row.final = version if version in row.checkpoints else None
        return self._transition()

    def become_failed(self, reason: str, exit_code: int = 0) -> list[Effect]:
        self._forget_formed()
        self._enter(State.FAILED)
        self.row.reason = reason
        self.row.exit_code = exit_code
        self.row.blocked = {}
        suspected, self._suspected = self._suspected, []
        return [*self._transition(), *suspected]

    def become_stopped(self, reason: str) -> list[Effect]:
        """Enters STOPPED: all processes have ended after a requested stop."""
        self._forget_formed()
        self._enter(State.STOPPED)
        self.row.reason = f"its launcher was told to stop: {reason}"
        self.row.blocked = {}
        self.suspicions.clear()
        return self._transition()

    def _enter(self, state: State) -> None:
        if state not in self.legal[self.row.state]:
            raise IllegalTransition(f"{self.row.job}: {self.row.state} -> {state}")
        self.row.state = state
        self.replays.clear()

    def _transition(self) -> list[Effect]:
        state = self._event("state", state=str(self.row.state), reason=self.row.reason)
        return [state, m.PublishView()]

    # --- reporting ---

    def _asked(self, after_version: int, reason: str) -> list[m.Emit]:
        if not reason or not self.checkpoints.ask(after_version, reason):
            return []
        return [self._event("checkpoint_asked", version=self.row.checkpoint_at, reason=reason)]

    def _trim(self) -> list[Effect]:
        """Trims only while RUNNING: a replay in progress must not lose its records."""
        if self.row.state is not State.RUNNING or not any(self.row.checkpoints):
            return []
        return [m.TrimLogs(generation=self.row.generation, below_step=checkpoints.trim_below(self.row))]

    def _progress(self) -> list[m.Emit]:
        if not self.setbacks.made_progress():
            return []
        return [
            self._event("progress", version=max([self.checkpoints.newest_known(), *self.row.checkpoints]))
        ]

    def _with_view(self, events: Sequence[m.Emit]) -> list[Effect]:
        return [*events, m.PublishView()] if events else []

    def _not_exact(self, news: bool) -> list[Effect]:
        """Reports that the job is not exact. `news`: True if it was exact until now."""
        return [*self._with_view(self._inexact(news)), *self._fail_inexact(news)]

    def _fail_inexact(self, is_so: bool) -> list[Effect]:
        if not is_so or self.row.config.get("require_exact") != "True":
            return []
        return self.become_failed(f"not exact, and --require-exact was given: {self.row.inexact_reason}")

    def _inexact(self, news: bool) -> list[m.Emit]:
        fields = {"since": self.row.inexact_since, "reason": self.row.inexact_reason}
        return [self._event("not_exact", **fields)] if news else []

    def _persist(self) -> list[m.Persist]:
        row, now = self.row, (self.row.state, self.row.generation)
        if not self.changes.detect():
            return []
        row.revision += 1
        entered, self._entered = (row.state if now != self._entered else None), now
        return [m.Persist(entered=entered)]

    def _event(self, event: str, **fields: object) -> m.Emit:
        return m.Emit(event=event, fields={"job": self.row.job, "generation": self.row.generation, **fields})

    @property
    def heartbeat_interval_s(self) -> float:
        return self._timing.interval_s(self.row.wanted)

    def step(self, command: m.Command, now: float) -> list[Effect]:
        """Returns the effects of a command. Raises Refusal if it is rejected; then the row is unchanged."""
        effects = self._apply_command(command, now)
        return [*self._persist(), *effects]

    def _apply_command(self, command: m.Command, now: float) -> list[Effect]:
        match command:
            case m.Tick():
                return self._tick(now, behind=command.behind)
            case pb.HeartbeatRequest():
                return self._heartbeat(command, now)
            case m.Join():
                return self._join(command, now)
            case pb.ReportRequest():
                return self._report(command, now)
            case pb.ReadyRequest():
                return self._ready(command, now)
            case pb.RefuseRequest():
                return self._refuse(command)
            case pb.CheckpointRequest():
                return self._checkpoint(command)
            case pb.AskCheckpointRequest():
                return self._ask_checkpoint(command)
            case pb.MeasureRequest():
                check_holder(self.row, command)
                self.measured[command.rank] = command.measured
                return []
            case pb.ExitRequest():
                return self._exited(command) if m.is_of_process(command) else self._place(command, now)
            case pb.SuspectRequest():
                return self._suspect(command, now)
            case pb.DiffersRequest():
                return self._not_exact(checkpoints.note_difference(self.row, command))
            case pb.RehearsedRequest():
                return self._rehearsed(command)
            case pb.FinishRequest():
                return self._finish(command)
            case pb.FailRequest():
                return self._fail(command)
            case pb.StopRequest():
                return self._stop(command)
            case m.LogsFenced():
                return self._logs_fenced(command, now)
            case m.LogsBlocked():
                return self._logs_blocked(command, now)
            case m.LogsRefused():
                return self._logs_refused(command)
            case m.InventoryTaken():
                return self._inventory(command)
            case m.LogsReset():
                return self._logs_reset(command)
            case m.LogsPressed():
                return self._logs_pressed(command)
            case m.LogHeard():
                self.places.renew(command.address, now)
                return []
            case m.LogLost():
                return self._log_lost(command, now)
            case pb.ChangeLogServersRequest():
                check_change(self.row, command)
                return self._change_log_servers(command, now)
            case pb.RevokeRequest() | pb.VoteRequest():
                raise Invalid(f"job {self.row.job} is a session's, not a communicator's")

    def resume(self) -> list[Effect]:
        """Returns the effects of the current state again, after a restart of the coordinator."""
        row = self.row
        match row.state:
            case State.FORMING | State.FENCING if row.granted < row.generation:
                return self._fence_logs()
            case State.PLANNING if row.plan is not None:
                return [m.ResetLogs(generation=row.generation)]
            case State.PLANNING if self._all_reported():
                return [m.FetchInventory(generation=row.generation)]
            case State.RECOVERING:
                return [self._plan_event()]
            case State.RUNNING:
                return self._trim()
        return []

    def relocate(self, log_servers: Mapping[int, LogServer]) -> list[Effect]:
        """Replaces addresses of known log servers (number -> server); the servers themselves stay the same."""
        row = self.row
        row.log_servers = [
            replace(known, address=moved.address, host=moved.host)
            if (moved := log_servers.get(number))
            else known
            for number, known in enumerate(row.log_servers)
        ]
        row.blocked = {}
        return [*self._persist(), m.PublishView()]

    # --- commands of members ---

    def _join(self, join: m.Join, now: float) -> list[Effect]:
        row, request, member = self.row, join.request, join.request.member
        if restarts.starts_again(row, request):
            check_first(request)
            restarts.check_start(row, request)
            if row.checkpoints:
                restarts.check_origin(row, request)
            return [*self._start_again(join, now), *self._join(join, now)]
        check_join(row, request)
        restarts.check_origin(row, request)
        rank = member.rank
        if rank in row.holders:
            return []
        first = row.revision == 0
        restarts.note_run(row, request.run, rank)
        row.members += 1
        row.holders[rank] = Holder(
            rank=rank,
            incarnation=member.incarnation,
            pid=member.pid,
            host=member.host,
            since_generation=row.generation,
            member=row.members,
        )
        self.leases.renew(rank, now)
        self.places.seat(rank, member.host)
        # After the end, the process only runs the code that follows `Session.run`; no slot is refilled then.
        row.given_up = [slot for slot in row.given_up if slot != rank]
        fills = rank in row.vacant and not row.state.is_over
        back = planning.fill(row, rank) if fills else ""
        joined = self._event("joined", rank=rank, incarnation=member.incarnation, member_pid=member.pid)
        if first:
            return [*self._transition(), joined, *self._fence_logs()]
        if back:
            return [joined, *self._anew({}, back)]
        return [joined, m.PublishView()]

    def _start_again(self, join: m.Join, now: float) -> list[Effect]:
        row = self.row
        if self._log_servers:
            self.places.leases = Leases([], 0.0)  # of servers whose numbers start at 0 again
        if not row.checkpoints:
            restarts.begin_at_checkpoint(row, join.origin)
        reason = restarts.begin_again(row, join.request, self._log_servers)
        restarts.note_run(row, join.request.run, join.request.member.rank)
        self.places.leases.start_afresh(now)
        self.measured.clear()
        self.suspicions.clear()
        dead = dict.fromkeys(row.holders, "its job was started again")
        begun = self.become_fencing(dead, reason) if row.checkpoints else self.become_forming(dead, reason)
        row.setbacks = 0
        return begun

    def _heartbeat(self, heartbeat: pb.HeartbeatRequest, now: float) -> list[Effect]:
        rank = heartbeat.rank
        check_holder(self.row, heartbeat)
        if heartbeat.kept:
            self.leases.keep(rank, now, self._timing.kept_s)
            return []
        self.leases.renew(rank, now)
        if rank not in self.row.vacant:
            self.steps.see(rank, heartbeat.version, now, running=self.row.state is State.RUNNING)
        self.replays.pop(rank, None)
        if heartbeat.HasField("replay") and self.row.state is State.RECOVERING:
            self.replays[rank] = heartbeat.replay
        said = self.checkpoints.on_heartbeat(rank, optional(heartbeat, "unsaved"))
        told, progress = [self._event(name, **fields) for name, fields in said], self._progress()
        changed = progress or any(name == checkpoints.GIVEN_UP for name, _ in said)
        return self._with_view([*told, *progress]) if changed else [*told]

    def _suspect(self, suspect: pb.SuspectRequest, now: float) -> list[Effect]:
        row, rank = self.row, suspect.rank
        check_holder(row, suspect)
        if not self.suspicions.say(rank, suspect.reason, now, suspect.generation):
            return []
        event = self._event("suspect", rank=rank, reason=suspect.reason)
        waits = row.state in (State.FORMING, State.RECOVERING, State.RUNNING)
        if suspect.again and suspect.generation == row.generation and waits:
            return [event, *self._without_death(f"rank {rank}: {suspect.reason}")]
        if suspect.generation != row.generation:
            return [event]
        self._suspected.append(event)  # a death follows, or a new generation without one
        return []

    def _report(self, said: pb.ReportRequest, now: float) -> list[Effect]:
        row = self.row
        if self._is_stale(said, now) or row.state in (State.RECOVERING, State.RUNNING) or row.state.is_over:
            return []
        if row.state is not State.PLANNING:
            raise Invalid(f"a report in state {row.state}: wait for PLANNING")
        holder = row.holders[said.rank]
        report = report_of(said, holder)
        if row.plan is not None or row.reports.get(holder.rank) == report:
            return []
        row.reports[holder.rank] = report
        fetch = [m.FetchInventory(generation=row.generation)] if self._all_reported() else []
        return [self._event("reported", **planning.report_fields(report)), *fetch]

    def _ready(self, ready: pb.ReadyRequest, now: float) -> list[Effect]:
        row = self.row
        rank = ready.rank
        if self._is_stale(ready, now) or row.state is State.RUNNING or row.state.is_over:
            return []
        check_ready(row, ready)
        if row.ready.get(rank) == ready.version:
            return []
        if row.state is State.FORMING:
            row.num_stages = ready.num_stages
            row.stages[rank] = sorted(ready.stages)
            row.stage_shards[rank] = ready.shard
        row.ready[rank] = ready.version
        return self._run_if_ready(now)

    def _is_stale(self, said: pb.ReportRequest | pb.ReadyRequest, now: float) -> bool:
        """Returns whether the message is from an older generation. Renews the lease too: recovering ranks then need no
        separate heartbeats, which would be thousands at once."""
        stale = is_stale(self.row, said)
        self.leases.renew(said.rank, now)
        return stale

    def _run_if_ready(self, now: float) -> list[Effect]:
        row = self.row
        if row.lacks(row.ready) or row.granted < row.generation:
            return []
        if len(set(row.ready.values())) > 1:
            return self.become_failed(f"ranks begin at different versions: {versions_words(row.ready)}")
        problem = planning.stages_problem(row)
        if problem:
            return self.become_failed(problem)
        return self.become_running(now)

    def _refuse(self, refuse: pb.RefuseRequest) -> list[Effect]:
        row = self.row
        if is_stale(row, refuse) or row.state.is_over:
            return []
        rank = refuse.rank
        refused = self._event("refused", rank=rank, reason=refuse.reason)
        if row.state is State.FORMING:
            if restarts.step_back(row):
                assert row.origin is not None
                reason = (
                    f"{restarts.adopted_words(row.origin)}; rank {rank} refused a newer one: {refuse.reason}"
                )
                return [refused, *self.become_forming({}, reason)]
            reason = f"rank {rank} refused, before the job was formed: {refuse.reason}"
            return [refused, *self.become_failed(reason)]
        if refuse.differs:
            row.differed = row.differed or f"rank {rank}: {refuse.reason}"
        planning.count_refusal(row, rank, refuse.reason)
        return [*self._without_death(row.refused.reason), refused]

    def _checkpoint(self, durable: pb.CheckpointRequest) -> list[Effect]:
        check_holder(self.row, durable)
        complete = self.checkpoints.count(durable)
        if not (checkpoints.recorded(self.row, durable) or complete):
            return []
        done = self._event("checkpoint_complete", version=durable.version)
        event = [done, *self._progress()] if complete else []
        return [*event, m.PublishView(), *(self._trim() if complete else [])]

    def _rehearsed(self, said: pb.RehearsedRequest) -> list[Effect]:
        row = self.row
        check_rank(row, said.rank)
        if row.state.is_over:
            return []
        fields: dict[str, object] = {"rank": said.rank, "version": said.version}
        if said.under_way:
            checkpoints.begin_rehearsal(row, said)
            return self._with_view([self._event("rehearsal_begun", **fields)])
        event = "not_rehearsed" if said.why_not else "rehearsed"
        fields |= {"steps": said.steps, "difference": said.difference, "why_not": said.why_not}
        news = self._not_exact(checkpoints.end_rehearsal(row, said))
        return [*self._with_view([self._event(event, **fields)]), *self._trim(), *news]

    def _ask_checkpoint(self, ask: pb.AskCheckpointRequest) -> list[Effect]:
        if not ask.incarnation:
            newest = self.checkpoints.newest_known()
            return self._with_view(self._asked(newest, ask.reason)) if self.row.state is State.RUNNING else []
        if is_stale(self.row, ask) or self.row.state.is_over:
            return []
        return self._with_view(self._asked(ask.after_version, f"rank {ask.rank}: {ask.reason}"))

    def _finish(self, finish: pb.FinishRequest) -> list[Effect]:
        row = self.row
        check_holder(self.row, finish)
        if row.state is State.FORMING:
            raise Invalid("finish before the job runs")
        if row.state is not State.RUNNING or finish.rank in row.finished or finish.rank in row.vacant:
            return []
        rank = finish.rank
        if unlike := self.endings.unlike(finish):
            return self.become_failed(unlike, endings.UNLIKE_CODE)
        row.finished[rank] = finish.version
        if finish.HasField("called"):
            row.called[rank] = finish.called
        ends = self.endings.on_finish(finish)
        if row.lacks(row.finished):
            told = [self._event("rank_finished", rank=rank)]
            if ends:
                told.append(
                    self._event("ends_early", rank=rank, version=finish.version, reason=finish.reason)
                )
            return [*told, *([m.PublishView()] if ends else [])]
        if len(set(row.finished.values())) > 1:
            return self.become_failed(f"ranks finished at different versions: {versions_words(row.finished)}")
        return self.become_finished()

    def _fail(self, fail: pb.FailRequest) -> list[Effect]:
        if fail.incarnation:
            check_holder(self.row, fail)
        if self.row.state.is_over:
            return []
        who = f"rank {fail.rank}: " if fail.incarnation else ""
        return self.become_failed(who + fail.reason)

    def _stop(self, stop: pb.StopRequest) -> list[Effect]:
        """Ignores a late stop or an unknown launcher. A rank of that launcher whose exit goes unreported is declared
        dead by its lease, like any other."""
        row = self.row
        if row.state.is_over or stop.run not in row.run_of.values():
            return []
        event = self._event("launcher_stopped", run=stop.run, reason=stop.reason)
        all_are = restarts.note_stop(row, stop.run)
        running = row.state in (State.RUNNING, State.RECOVERING)
        stopped = [] if running or not all_are else self.become_stopped(stop.reason)
        return [*stopped, event]

    # --- deaths ---

    def _exited(self, exited: pb.ExitRequest) -> list[Effect]:
        row, rank = self.row, exited.rank
        holder = row.holders.get(rank)
        said = {"rank": rank, "member_pid": exited.pid, "exit_code": exited.exit_code}
        event = self._event("member_exited", **said)
        if row.state in (State.FAILED, State.STOPPED):
            return [event]
        if holder is None or not holder.is_process(exited.incarnation, exited.pid) or holder.gone:
            return [self._event("member_exited", **said, held=False)]
        why = endings.exit_words(exited.exit_code)
        if exited.exit_code == 0 and (rank in row.finished or row.state is State.FINISHED):
            row.holders[rank] = replace(holder, gone=True)
            self.leases.forget(rank)
            return [event]
        if row.state is State.FINISHED:
            # It may have had files left to save: another one may take the rank, with the final checkpoint.
            return [event, *self._with_view(self._fence({rank: why}))]
        if ends := self.setbacks.exit(rank, exited.exit_code):
            return [event, *self.become_failed(ends, endings.launcher_code(exited.exit_code))]
        if exited.given_up and (ends := planning.give_up(row, [rank])):
            return [event, *self.become_failed(f"rank {rank} {why}; {ends}")]
        return [event, *self._deaths({rank: why}, {})]

    def _place(self, place: pb.ExitRequest, now: float) -> list[Effect]:
        """Handles what is said of a rank's place: it failed the health check (shown only), or is given up."""
        check_rank(self.row, place.rank)
        if place.given_up:
            return self.give_up([place.rank])
        if not self.row.state.is_over:
            self.suspicions.say(place.rank, place.unfit, now, 0, unfit=True)
        return [self._event("place_unfit", rank=place.rank, reason=place.unfit)]

    def _tick(self, now: float, *, behind: bool) -> list[Effect]:
        looked, self._looked = self._looked, now
        if now - looked > self._timing.stall_s:
            # This process or its disk was stalled: the silence was not the ranks' fault.
            self.leases.start_afresh(now)
            self.places.leases.start_afresh(now)
        elif behind:
            self.leases.stand_still(now - looked, now)
            self.places.leases.stand_still(now - looked, now)
        if self.row.state.is_over:
            return []
        late = self.leases.overdue(self._timing.lease_s, now)
        late = {rank: why for rank, why in late.items() if not self.row.holders[rank].gone}
        lost = self.places.overdue(now, self._silent_hosts(late))
        if not late and not lost:
            why = self.suspicions.due(self.row, self._timing.suspicion_s, now) or self.endings.due(now)
            if why:
                return self._without_death(why)
            return self.give_up(self.overdue(now))
        events = [self._event("lease_expired", rank=rank, reason=why) for rank, why in sorted(late.items())]
        return [*self._deaths(late, lost), *events]

    def _silent_hosts(self, late: Collection[int]) -> set[str]:
        """Returns the machines of these ranks on which no other rank is left."""
        holders = self.row.holders
        others = {holder.host for rank, holder in holders.items() if rank not in late and not holder.gone}
        return {holders[rank].host for rank in late} - others

    # --- answers of the log servers ---

    def _logs_fenced(self, fenced: m.LogsFenced, now: float) -> list[Effect]:
        row = self.row
        if fenced.generation != row.generation or row.state not in (State.FORMING, State.FENCING):
            return []
        row.granted = row.generation
        self.places.note_cold(fenced.cold)
        came = [self._event("log_server_added", **self.places.named(n)) for n in self.places.granted()]
        row.blocked = {}
        if row.state is State.FENCING:
            return [*self.become_planning(), *came]
        return self._run_if_ready(now) or [m.PublishView()]

    def _logs_blocked(self, blocked: m.LogsBlocked, now: float) -> list[Effect]:
        row = self.row
        waits = row.state in (State.FORMING, State.FENCING, State.PLANNING)
        if blocked.generation != row.generation or not waits:
            return []
        begins = row.state is State.FORMING  # later it may have the only copy of this job's records
        if begins and blocked.given_up and (lost := self.places.given_up_elsewhere(blocked.address, now)):
            return self._deaths({}, lost)
        if not self.places.block(blocked.address, blocked.reason):
            return []
        return self._with_view(
            [self._event("log_server_blocked", address=blocked.address, reason=blocked.reason)]
        )

    def _logs_refused(self, refused: m.LogsRefused) -> list[Effect]:
        if refused.generation != self.row.generation or self.row.state.is_over:
            return []
        lost = self.places.without(refused)
        return self._deaths({}, lost) if lost else self.become_failed(refused.reason)

    def _log_lost(self, lost: m.LogLost, now: float) -> list[Effect]:
        """Uses the server as a new one, in a new generation: its records are lost."""
        row, number = self.row, self.places.number_of(lost.address)
        if (
            number is None
            or row.generation != lost.generation
            or row.state is State.FORMING
            or row.state.is_over
        ):
            return []
        why, host = "has come back without this job's records", row.log_servers[number].host
        change = pb.ChangeLogServersRequest(lost=lost.address, add=lost.address, add_host=host)
        return self._change_log_servers(change, now, why)

    def _change_log_servers(
        self, change: pb.ChangeLogServersRequest, now: float, why: str = ""
    ) -> list[Effect]:
        """`why`: reason for the loss; empty: an operator reports it."""
        added, lost = self.places.change(change, now, why or "was given up by an operator")
        if lost and why and (ends := self.setbacks.refuse(f"log server {change.lost} {why}")):
            return self.become_failed(ends)
        if lost:
            return self._deaths({}, lost)
        return self.become_fencing({}, f"log server {change.add} has come") if added else []

    def _inventory(self, inventory: m.InventoryTaken) -> list[Effect]:
        row = self.row
        if (
            inventory.generation != row.generation
            or row.state is not State.PLANNING
            or not self._all_reported()
        ):
            return []
        row.blocked = {}
        streams, sources = self.places.combined(inventory.servers, inventory.moved)
        row.plan, reason = planning.decide(row, streams, self.measured)
        row.sources = sources if row.plan is not None and row.plan.reads_log else {}
        if row.plan is None:
            return self.become_failed(reason)
        row.plan = planning.named(row, checkpoints.with_reason(row, row.plan))
        if not row.plan.gives_up_log:
            return self.become_recovering()
        planning.give_up_log(row, row.plan)
        return [m.ResetLogs(generation=row.generation)]

    def _logs_reset(self, reset: m.LogsReset) -> list[Effect]:
        row = self.row
        if reset.generation != row.generation or row.state is not State.PLANNING or row.plan is None:
            return []
        row.blocked = {}
        self.places.empty()
        self.places.note_cold(reset.cold)
        return self.become_recovering()

    def _logs_pressed(self, pressed: m.LogsPressed) -> list[Effect]:
        """Trims to a newer complete checkpoint if there is one (or retries that), else asks for an early one."""
        if self.row.state is not State.RUNNING or self.row.checkpoint_at is not None:
            return []
        if pressed.trimmed_below_step < max(self.row.checkpoints, default=0):
            ended = [m.PublishView()] if checkpoints.give_way(self.row) else []
            return [*ended, *self._trim()]
        reason = f"log server {pressed.address}: {pressed.reason}"
        return self._with_view(self._asked(self.checkpoints.newest_known(), reason))

    # --- ---

    def _all_reported(self) -> bool:
        return not self.row.lacks(self.row.reports)

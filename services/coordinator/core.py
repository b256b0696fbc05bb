"""Job: the state machine of one job. Commands and a clock reading in, effects out; no I/O.

    FORMING ──all ready──> RUNNING ──all finished──> FINISHED ──started again──> FENCING
     ^   │                  │    ^
     └───┘            death │    │ all ready at the target
    death,                  v    │
    generation + 1    FENCING ──> PLANNING ──> RECOVERING
                         ^  logs fenced  all reported  │
                         └─ death, refusal, a broken ──┘   (from all four: generation + 1)
                            connection of the living
    (no rank is left) ──all launchers told to stop──> STOPPED ──started again──> FENCING
    (any) ──no plan, no progress, an error──> FAILED ──started again──> FENCING (FORMING: no checkpoint is complete)

Each `become_x` makes one transition. `step` makes at most one of them; what it has changed in the row is found by
comparing (`parts.Changes`), and then its effects begin with Persist. After a crash, `resume` says the effects of the
state again: all are idempotent.

Invariants: the generation only grows, and with every death or refusal; granted <= generation; RUNNING only
with all ranks ready at one version; a View is a function of the row, so it shows only what is durable; so many
generations at most without a death and without a new version (`setbacks`).
"""

from collections.abc import Mapping
from dataclasses import replace

from services.coordinator import commands as m
from services.coordinator import exactness, vacancies
from services.coordinator.checkpoints import GIVEN_UP
from services.coordinator.command_checks import (
    check_change,
    check_first,
    check_holder,
    check_join,
    check_rank,
    check_ready,
    is_stale,
)
from services.coordinator.commands import Effect, Refusal, Refused
from services.coordinator.endings import UNLIKE_CODE
from services.coordinator.lives import (
    begin_again,
    check_start,
    first_row,
    note_run,
    note_stop,
    starts_again,
)
from services.coordinator.log_end import ends_next, is_ready
from services.coordinator.messages_text import exit_words, report_fields, versions_words
from services.coordinator.origins import begin, check_origin
from services.coordinator.planning import count_refusal, decide, give_up_log, stages_problem
from services.coordinator.row import Holder, LogServer, State
from services.coordinator.setbacks import launcher_code
from services.coordinator.timing import Timing
from services.coordinator.transitions import Transitions
from swift.recovery import Report


class Job(Transitions):
    """One job. Not thread-safe; `now` is monotonic seconds and never goes back."""

    @classmethod
    def create(
        cls, job: str, log_servers: list[LogServer], join: m.Join, timing: Timing, now: float, copies: int = 1
    ) -> "Job":
        """The job that a first Join makes. `step` it with that Join."""
        check_first(join)
        row = first_row(job, log_servers, join, copies)
        begin(row, join.origin)
        return cls(row, timing, now, log_servers)

    def step(self, command: m.Command, now: float) -> list[Effect]:
        """The effects of a command. Refusal: it was not taken, and nothing has changed."""
        effects = self._take(command, now)
        return [*self._persist(), *effects]

    def _take(self, command: m.Command, now: float) -> list[Effect]:
        match command:
            case m.Tick():
                return self._tick(now, behind=command.behind)
            case m.Heartbeat():
                return self._heartbeat(command, now)
            case m.Join():
                return self._join(command, now)
            case m.MemberReport():
                return self._report(command, now)
            case m.Ready():
                return self._ready(command, now)
            case m.Refuse():
                return self._refuse(command)
            case m.CheckpointDurable():
                return self._checkpoint(command)
            case m.AskCheckpoint():
                return self._ask_checkpoint(command)
            case m.Measure():
                check_holder(self.row, command.sender)
                self.measured[command.sender.rank] = command.measured
                return []
            case m.MemberExited():
                return self._exited(command) if command.is_of_process else self._place(command, now)
            case m.Suspect():
                return self._suspect(command, now)
            case m.Differs():
                return self._told(self._inexact(exactness.differed(self.row, command)))
            case m.Finish():
                return self._finish(command)
            case m.Fail():
                return self._fail(command)
            case m.Stop():
                return self._stop(command)
            case m.LogsFenced():
                return self._logs_fenced(command, now)
            case m.LogsBlocked():
                return self._logs_blocked(command)
            case m.LogsRefused():
                return self._logs_refused(command)
            case m.InventoryTaken():
                return self._inventory(command)
            case m.LogsReset():
                return self._logs_reset(command)
            case m.LogsPressed():
                return self._logs_pressed(command)
            case m.LogHeard():
                self.places.hear(command.address, now)
                return []
            case m.ChangeLogServers():
                return self._change_log_servers(command, now)
            case m.ChangeGroups():
                return self._told([self._groups_event()]) if self.regroup.ask(command) else []
            case m.Revoke() | m.Vote():
                raise Refusal(Refused.INVALID, f"job {self.row.job} is a session's, not a communicator's")

    def resume(self) -> list[Effect]:
        """The effects of the state this row is in, said again after a restart."""
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
        """These are the same ones under other addresses."""
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
        row = self.row
        if starts_again(row, join):
            check_first(join)
            check_start(row, join)
            if row.checkpoints:
                check_origin(row, join)
            return [*self._start_again(join, now), *self._join(join, now)]
        check_join(row, join)
        check_origin(row, join)
        if join.rank in row.holders:
            return []
        first = row.revision == 0
        note_run(row, join.run, join.rank)
        row.members += 1
        row.holders[join.rank] = Holder(
            rank=join.rank,
            incarnation=join.incarnation,
            pid=join.pid,
            host=join.host,
            since_generation=row.generation,
            member=row.members,
        )
        self.leases.hear(join.rank, now)
        self.places.seat(join.rank, join.host)
        # After the end it is only there for what comes behind it.
        row.given_up = [slot for slot in row.given_up if slot != join.rank]
        fills = join.rank in row.vacant and not row.state.is_over
        back = vacancies.fill(row, join.rank) if fills else ""
        joined = self._event("joined", rank=join.rank, incarnation=join.incarnation, member_pid=join.pid)
        if first:
            return [*self._transition(), joined, *self._fence_logs()]
        if back:
            return [joined, *self._anew({}, back)]
        return [joined, m.PublishView()]

    def _start_again(self, join: m.Join, now: float) -> list[Effect]:
        row = self.row
        if self._log_servers:
            self.places.forget_all()
        if not row.checkpoints:
            begin(row, join.origin)
        reason = begin_again(row, join, self._log_servers)
        note_run(row, join.run, join.rank)
        self.places.start_afresh(now)
        self.measured.clear()
        self.suspicions.clear()
        dead = dict.fromkeys(row.holders, "its job was started again")
        begun = self.become_fencing(dead, reason) if row.checkpoints else self.become_forming(dead, reason)
        row.setbacks = 0
        return begun

    def _heartbeat(self, heartbeat: m.Heartbeat, now: float) -> list[Effect]:
        rank = heartbeat.sender.rank
        check_holder(self.row, heartbeat.sender)
        if heartbeat.kept:
            self.leases.keep(rank, now, self._timing.kept_s)
            return []
        self.leases.hear(rank, now)
        self.steps.see(rank, heartbeat.version, now, running=self.row.state is State.RUNNING)
        self.replays.pop(rank, None)
        if heartbeat.replay is not None and self.row.state is State.RECOVERING:
            self.replays[rank] = heartbeat.replay
        said = self.checkpoints.hear(rank, heartbeat.unsaved)
        told, progress = [self._event(name, **fields) for name, fields in said], self._progress()
        changed = progress or any(name == GIVEN_UP for name, _ in said)
        return self._told([*told, *progress]) if changed else [*told]

    def _suspect(self, suspect: m.Suspect, now: float) -> list[Effect]:
        row, rank = self.row, suspect.sender.rank
        check_holder(row, suspect.sender)
        if not self.suspicions.say(rank, suspect.reason, now, suspect.generation):
            return []
        event = self._event("suspect", rank=rank, reason=suspect.reason)
        waits = row.state in (State.FORMING, State.RECOVERING, State.RUNNING)
        if suspect.again and suspect.generation == row.generation and waits:
            return [event, *self._without_death(f"rank {rank}: {suspect.reason}")]
        return [event]

    def _report(self, said: m.MemberReport, now: float) -> list[Effect]:
        row = self.row
        if self._is_stale(said, now) or row.state in (State.RECOVERING, State.RUNNING) or row.state.is_over:
            return []
        if row.state is not State.PLANNING:
            raise Refusal(Refused.INVALID, f"a report in state {row.state}: wait for PLANNING")
        holder = row.holders[said.sender.rank]
        report = Report(
            rank=holder.rank,
            version=said.version,
            undo_to=said.undo_to,
            undo_exact=said.undo_exact,
            forward_to=said.forward_to,
            forward_by_all=said.forward_by_all,
            finish_to=said.finish_to,
            since_generation=holder.since_generation,
            host=holder.host,
            can_help=said.can_help,
            off_log=said.off_log,
            snapshots=said.snapshots,
        )
        if row.plan is not None or row.reports.get(holder.rank) == report:
            return []
        row.reports[holder.rank] = report
        fetch = [m.FetchInventory(generation=row.generation)] if self._all_reported() else []
        return [self._event("reported", **report_fields(report)), *fetch]

    def _ready(self, ready: m.Ready, now: float) -> list[Effect]:
        row = self.row
        rank = ready.sender.rank
        if self._is_stale(ready, now) or row.state is State.RUNNING or row.state.is_over:
            return []
        check_ready(row, ready)
        if row.ready.get(rank) == ready.version:
            return []
        if row.state is State.FORMING:
            row.num_stages = ready.num_stages
            row.stages[rank] = list(ready.stages)
            row.stage_shards[rank] = ready.shard
        is_ready(row, ready)
        return self._run_if_ready(now)

    def _is_stale(self, said: m.MemberReport | m.Ready, now: float) -> bool:
        """Whoever says this is alive, and does not beat beside it: thousands would, while they recover."""
        stale = is_stale(self.row, said.sender, said.generation)
        self.leases.hear(said.sender.rank, now)
        return stale

    def _run_if_ready(self, now: float) -> list[Effect]:
        row = self.row
        if row.lacks(row.ready) or row.granted < row.generation:
            return []
        if len(set(row.ready.values())) > 1:
            return self.become_failed(f"ranks begin at different versions: {versions_words(row.ready)}")
        problem = stages_problem(row)
        if problem:
            return self.become_failed(problem)
        if why := ends_next(row):
            return self.become_fencing({}, why) if row.log_ends else self._without_death(why)
        return self.become_running(now)

    def _refuse(self, refuse: m.Refuse) -> list[Effect]:
        row = self.row
        if is_stale(row, refuse.sender, refuse.generation) or row.state.is_over:
            return []
        rank = refuse.sender.rank
        refused = self._event("refused", rank=rank, reason=refuse.reason)
        if row.state is State.FORMING:
            reason = f"rank {rank} refused, before the job was formed: {refuse.reason}"
            return [refused, *self.become_failed(reason)]
        if refuse.differs:
            exactness.differs(row, rank, refuse.reason)
        count_refusal(row, rank, refuse.reason)
        return [*self._without_death(row.refused.reason), refused]

    def _checkpoint(self, durable: m.CheckpointDurable) -> list[Effect]:
        check_holder(self.row, durable.sender)
        logged, complete = self.regroup.logged(durable), self.checkpoints.count(durable)
        in_force = [self._groups_event()] if self.regroup.settle() else []
        if not (complete or logged):
            return []
        done = self._event("checkpoint_complete", version=durable.version)
        event = [done, *self._progress()] if complete else []
        return [*event, *in_force, m.PublishView(), *(self._trim() if complete else [])]

    def _ask_checkpoint(self, ask: m.AskCheckpoint) -> list[Effect]:
        if ask.sender is None:
            newest = self.checkpoints.newest_known()
            return self._told(self._asked(newest, ask.reason)) if self.row.state is State.RUNNING else []
        if is_stale(self.row, ask.sender, ask.generation) or self.row.state.is_over:
            return []
        return self._told(self._asked(ask.after_version, f"rank {ask.sender.rank}: {ask.reason}"))

    def _finish(self, finish: m.Finish) -> list[Effect]:
        row = self.row
        check_holder(self.row, finish.sender)
        if row.state is State.FORMING:
            raise Refusal(Refused.INVALID, "finish before the job runs")
        if row.state is not State.RUNNING or finish.sender.rank in row.finished:
            return []
        rank = finish.sender.rank
        if unlike := self.endings.unlike(finish):
            return self.become_failed(unlike, UNLIKE_CODE)
        row.finished[rank] = finish.version
        if finish.called is not None:
            row.called[rank] = finish.called
        ends = self.endings.hear(finish)
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

    def _fail(self, fail: m.Fail) -> list[Effect]:
        if fail.sender is not None:
            check_holder(self.row, fail.sender)
        if self.row.state.is_over:
            return []
        who = "" if fail.sender is None else f"rank {fail.sender.rank}: "
        return self.become_failed(who + fail.reason)

    def _stop(self, stop: m.Stop) -> list[Effect]:
        """Late or unknown: nothing. A rank of theirs that nobody has told of is found dead as any other."""
        row = self.row
        if row.state.is_over or stop.run not in row.run_of.values():
            return []
        event = self._event("launcher_stopped", run=stop.run, reason=stop.reason)
        all_are = note_stop(row, stop.run)
        running = row.state in (State.RUNNING, State.RECOVERING)
        stopped = [] if running or not all_are else self.become_stopped(stop.reason)
        return [*stopped, event]

    # --- deaths ---

    def _exited(self, exited: m.MemberExited) -> list[Effect]:
        row, rank = self.row, exited.rank
        holder = row.holders.get(rank)
        said = {"rank": rank, "member_pid": exited.pid, "exit_code": exited.exit_code}
        event = self._event("member_exited", **said)
        if row.state in (State.FAILED, State.STOPPED):
            return [event]
        if holder is None or not holder.is_process(exited.incarnation, exited.pid) or holder.gone:
            return [self._event("member_exited", **said, held=False)]
        why = exit_words(exited.exit_code)
        if exited.exit_code == 0 and (rank in row.finished or row.state is State.FINISHED):
            row.holders[rank] = replace(holder, gone=True)
            self.leases.forget(rank)
            return [event]
        if row.state is State.FINISHED:
            return [event, *self._lost_after_the_end(rank, why)]
        if ends := self.setbacks.exit(rank, exited.exit_code):
            return [event, *self.become_failed(ends, launcher_code(exited.exit_code))]
        if exited.given_up and (ends := vacancies.give_up(row, [rank])):
            return [event, *self.become_failed(f"rank {rank} {why}; {ends}")]
        return [event, *self._deaths({rank: why}, {})]

    def _place(self, place: m.MemberExited, now: float) -> list[Effect]:
        """Of a rank without a process: not fit, which is shown, or given up."""
        check_rank(self.row, place.rank)
        if place.given_up:
            return self.give_up([place.rank])
        if not self.row.state.is_over:
            self.suspicions.say(place.rank, place.unfit, now, 0, unfit=True)
        return [self._event("place_unfit", rank=place.rank, reason=place.unfit)]

    def _lost_after_the_end(self, rank: int, why: str) -> list[Effect]:
        """It may have had files to save: its rank is free for another process, if that finds the state there."""
        row = self.row
        holder = row.holders.pop(rank)
        row.fenced.append(holder)
        self.leases.forget(rank)
        return self._told([self._event("fenced", rank=rank, incarnation=holder.incarnation, reason=why)])

    def _tick(self, now: float, *, behind: bool) -> list[Effect]:
        looked, self._looked = self._looked, now
        if now - looked > self._timing.stall_s:
            # This process was stopped, or its disk was: the silence was not the ranks'.
            self.leases.start_afresh(now)
            self.places.start_afresh(now)
        elif behind:
            self.leases.stand_still(now - looked, now)
            self.places.stand_still(now - looked, now)
        if self.row.state.is_over:
            return []
        late = self.leases.overdue(self._timing.lease_s, now)
        late = {rank: why for rank, why in late.items() if not self.row.holders[rank].gone}
        lost = self.places.overdue(now) if self.row.state is not State.FORMING else {}
        if not late and not lost:
            why = self.suspicions.due(self.row, self._timing.suspicion_s, now) or self.endings.due(now)
            if why:
                return self._without_death(why)
            return self.give_up(self.overdue(now)) or self.move_due(now)
        events = [self._event("lease_expired", rank=rank, reason=why) for rank, why in sorted(late.items())]
        return [*self._deaths(late, lost), *events]

    # --- answers of the log servers ---

    def _logs_fenced(self, fenced: m.LogsFenced, now: float) -> list[Effect]:
        row = self.row
        if fenced.generation != row.generation or row.state not in (State.FORMING, State.FENCING):
            return []
        row.granted = row.generation
        came = [self._event("log_server_added", **self.places.came(n)) for n in self.places.granted()]
        row.blocked = {}
        if row.state is State.FENCING:
            return [*self.become_planning(), *came]
        return self._run_if_ready(now) or [m.PublishView()]

    def _logs_blocked(self, blocked: m.LogsBlocked) -> list[Effect]:
        row = self.row
        waits = row.state in (State.FORMING, State.FENCING, State.PLANNING)
        if blocked.generation != row.generation or not waits:
            return []
        if not self.places.block(blocked.address, blocked.reason):
            return []
        return self._told([self._event("log_server_blocked", address=blocked.address, reason=blocked.reason)])

    def _logs_refused(self, refused: m.LogsRefused) -> list[Effect]:
        if refused.generation != self.row.generation or self.row.state.is_over:
            return []
        lost = self.places.without(refused)
        return self._deaths({}, lost) if lost else self.become_failed(refused.reason)

    def _change_log_servers(self, change: m.ChangeLogServers, now: float) -> list[Effect]:
        check_change(self.row, change)
        added, lost = self.places.change(change, now)
        if lost and change.why and (ends := self.setbacks.refuse(f"log server {change.lost} {change.why}")):
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
        streams, sources = self.places.combined(inventory.servers)
        row.plan, reason = decide(row, streams, self.measured)
        row.sources = sources if row.plan is not None and row.plan.reads_log else {}
        if row.plan is None:
            return self.become_failed(reason)
        row.plan = vacancies.named(row, exactness.named(row, row.plan))
        if not row.plan.gives_up_log:
            return self.become_recovering()
        give_up_log(row, row.plan)
        return [m.ResetLogs(generation=row.generation)]

    def _logs_reset(self, reset: m.LogsReset) -> list[Effect]:
        row = self.row
        if reset.generation != row.generation or row.state is not State.PLANNING or row.plan is None:
            return []
        row.blocked = {}
        self.places.empty()
        in_force = [self._groups_event()] if self.regroup.empty(row.plan.target_version) else []
        return [*self.become_recovering(), *in_force]

    def _logs_pressed(self, pressed: m.LogsPressed) -> list[Effect]:
        """A checkpoint that is complete already helps first: its trim is under way, or is tried again."""
        if self.row.state is not State.RUNNING or self.row.checkpoint_at is not None:
            return []
        if pressed.trimmed_below_step < max(self.row.checkpoints, default=0):
            return self._trim()
        reason = f"log server {pressed.address}: {pressed.reason}"
        return self._told(self._asked(self.checkpoints.newest_known(), reason))

    # --- ---

    def _all_reported(self) -> bool:
        return not self.row.lacks(self.row.reports)

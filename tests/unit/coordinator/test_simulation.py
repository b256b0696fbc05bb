"""Random histories of a job: joins, deaths, silences, refusals, slow log servers, and the coordinator dying
between any two of its effects. Hypothesis chooses; a failure prints the history that repeats it.

Ranks are a mesh of stages and replicas. A step may leave them in between: gradients reduced, buckets applied. Each
state has a tag that stands for its bits: an inexact undo makes a new one, and so does whatever was refused.

Checked all the time: nothing is shown or asked before it is durable; the durable generation only grows, and
states follow each other as LEGAL says; nobody but the live holder is heard; a plan is one that the members can
follow; RUNNING begins with all members at one version, replicas with the same bits, and none with bits that were
refused; nothing is trimmed that a replay could need. At the end everything works again: the job must finish, with
every acknowledged message said once only.
"""

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.record import boundary
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Fenced, Invalid, Refusal
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import LEGAL, JobRow, LogServer, State
from swift_ft_services.coordinator.timeouts import Timing
from swift_ft_services.coordinator.views import view_of
from tests.unit.coordinator.driver_world import join
from tests.unit.coordinator.followers import Followers, Process
from tests.unit.coordinator.rows import encode, read, write_changes

TIMING = Timing(heartbeat_s=1.0, lease_s=5.0, step_bound_s=20.0)
STEPS = 9
CHECKPOINT_EVERY = 3
MESHES = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))
CHOICES = st.lists(st.integers(0, 9), min_size=1, max_size=6)
CRASHES = st.none() | st.integers(0, 5)
"""How many effects of a command are carried out before the coordinator dies."""
FAILURES = ("no complete checkpoint", "in a row")
"""The ends that such a history may have, besides FINISHED."""


class Crashed(Exception):
    """The coordinator died before it answered."""


class Simulation(Followers, RuleBasedStateMachine):
    @initialize(
        mesh=st.sampled_from(MESHES),
        config=st.sampled_from([{}, {"undo": "arithmetic"}, {"strategy": "replay"}, {"strategy": "replica"}]),
        formed=st.sampled_from([True, True, True, True, False]),
    )
    def begin(self, mesh: tuple[int, int], config: dict[str, str], formed: bool) -> None:
        self.num_stages, self.dp_size = mesh
        self.config = config
        self.world_size = world_size = self.num_stages * self.dp_size
        self.stored: dict[str, str] = {}
        self.job: Job | None = None
        self.now = 0.0
        self.view: pb.View | None = None
        self.shown: dict[tuple[int, int], bytes] = {}
        self.asked: list[m.FenceLogs | m.FetchInventory | m.ResetLogs] = []
        self.granted = self.emptied = 0
        """The newest generation that the log servers hold, and in which they were emptied."""
        self.saved = {}
        self.spoilt = {}
        self.undone = self.trimmed_below = 0
        self.durable: JobRow | None = None
        self.processes = [Process(rank, f"{rank}.0") for rank in range(world_size)]
        self.unreported: list[Process] = []
        self.spawned = world_size
        for _ in range(20 if formed else 0):
            if not self.runs():
                self.all_goes_well(1, "full")
        assert self.runs() == formed

    def runs(self) -> bool:
        return self.durable is not None and self.durable.state is State.RUNNING

    # --- the coordinator ---

    def say(self, command: m.Command, crash: int | None = None) -> None:
        """One command. Crashed: it was not acknowledged."""
        if self.job is None:
            if not isinstance(command, m.Join):
                return
            self.job = Job.create("j", [LogServer(address="l")], command, TIMING, self.now)
        before = encode(self.job.row)
        try:
            effects = self.job.step(command, self.now)
        except Refusal:
            assert encode(self.job.row) == before
            raise
        sender = getattr(command, "sender", None)
        if sender is not None and effects:
            spoke_for = read(before).holders[sender.rank]
            assert spoke_for.incarnation == sender.incarnation, "somebody else than the holder was heard"
        self.carry_out(effects, crash)

    def carry_out(self, effects: list[m.Effect], crash: int | None) -> None:
        assert self.job is not None
        for index, effect in enumerate(effects):
            if index == crash:
                self.restart()
                raise Crashed
            if isinstance(effect, m.Persist):
                self.persist()
            elif isinstance(effect, m.PublishView):
                self.publish()
            elif isinstance(effect, m.TrimLogs):
                assert self.durable is not None
                assert self.durable.state is State.RUNNING, "a replay may need it"
                assert all((rank, effect.below_step) in self.saved for rank in range(self.world_size))
                self.trimmed_below = max(self.trimmed_below, effect.below_step)
            elif not isinstance(effect, m.Emit):
                assert self.durable is not None
                assert self.durable.generation == effect.generation, "asked before it was durable"
                self.asked.append(effect)

    def persist(self) -> None:
        assert self.job is not None
        row, before = self.job.row, self.durable
        write_changes(self.job, self.stored)
        self.durable = read(self.stored)
        if before is None:
            return
        grown = row.generation - before.generation
        assert grown in (0, 1)
        assert row.revision > before.revision
        assert row.granted <= self.granted, "the log servers do not hold it"
        assert row.granted <= row.generation
        if row.checkpoint_at is not None and row.checkpoint_at != before.checkpoint_at:
            # Nobody has been heard of beyond it.
            known = [self.job.steps.version(rank) for rank in row.holders]
            assert row.checkpoint_at > max([*known, *row.checkpoints], default=0)
        if row.state is not before.state or grown:
            assert row.state in LEGAL[before.state]
            assert grown == (row.state in (State.FENCING, State.FORMING))
        if row.state is State.RECOVERING and row.plan is not None and row.plan.restores:
            assert self.emptied == row.generation, "restored over a log of another history"
        if row.state is State.RUNNING and before.state is not State.RUNNING:
            self.check_states()
            assert row.granted == row.generation
            assert len(row.holders) == self.world_size
        if row.state is State.FINISHED and before.state is not State.FINISHED:
            self.check_states()
            assert {p.version for p in self.processes if self.holds(p)} == {STEPS}

    def publish(self) -> None:
        assert self.job is not None
        assert self.durable is not None
        assert self.durable == self.job.row, "shown before it was durable"
        self.view = view_of(self.job.row)
        key = (self.view.generation, self.view.revision)
        text = self.view.SerializeToString(deterministic=True)
        assert self.shown.setdefault(key, text) == text, "one revision, two contents"

    def restart(self) -> None:
        self.asked = []
        if not self.stored:
            self.job = None
            return
        self.job = Job(read(self.stored), TIMING, self.now, stored=True)
        self.publish()
        self.carry_out(self.job.resume(), None)

    def holds(self, process: Process) -> bool:
        assert self.job is not None
        holder = self.job.row.holders.get(process.rank)
        return holder is not None and holder.incarnation == process.incarnation

    # --- rules ---

    @rule(index=st.integers(0, 20), crash=CRASHES, choice=st.integers(0, 9))
    def a_process_acts(self, index: int, crash: int | None, choice: int) -> None:
        able = [p for p in self.processes if p.alive]
        if able:
            self.act(able[index % len(able)], crash, choice)

    @rule(rounds=st.integers(1, 4), log=st.sampled_from(["full", "full", "empty"]))
    def all_goes_well(self, rounds: int, log: str) -> None:
        for _ in range(rounds):
            for process in [p for p in self.processes if p.alive and not p.cut_off]:
                self.act(process, choice=1)
                self.act(process, choice=2)
            for _ in list(self.asked):
                self.a_log_server_answers(0, log, None)

    @rule(choices=CHOICES)
    def everybody_acts(self, choices: list[int]) -> None:
        able = [p for p in self.processes if p.alive and not p.cut_off]
        for index, process in enumerate(able):
            self.act(process, choice=choices[index % len(choices)])

    @rule(
        index=st.integers(0, 20),
        choices=CHOICES,
        rounds=st.integers(0, 5),
        log=st.sampled_from(["full", "full", "empty"]),
    )
    def a_rank_is_lost(self, index: int, choices: list[int], rounds: int, log: str) -> None:
        """And replaced at once; the recovery goes on for a while. Left to chance, few would get anywhere."""
        self.a_process_dies(index, False)
        self.the_launcher_reports(None)
        for rank in range(self.world_size):
            self.a_replacement_comes(rank)
        for begin in range(rounds):
            self.everybody_acts(choices[begin % len(choices) :] + choices[: begin % len(choices)])
            for _ in list(self.asked):
                self.a_log_server_answers(0, log, None)

    @rule(index=st.integers(0, 20), last=st.sampled_from([False, False, False, True]))
    def a_process_dies(self, index: int, last: bool) -> None:
        living = [p for p in self.processes if p.alive]
        if living and (last or len([p for p in living if p.at is not None]) > 1):
            process = living[index % len(living)]
            process.alive = False
            self.unreported.append(process)

    @rule(index=st.integers(0, 20))
    def a_process_is_cut_off_or_comes_back(self, index: int) -> None:
        process = self.processes[index % len(self.processes)]
        process.cut_off = not process.cut_off

    @rule(index=st.integers(0, 20), what=st.integers(0, 6))
    def a_message_of_the_past_arrives(self, index: int, what: int) -> None:
        """From a process that was fenced, or of a generation that is over."""
        if self.job is None:
            return
        process = self.processes[index % len(self.processes)]
        late = self.job.row.generation - (1 if self.holds(process) else 0)
        sender, version = process.sender, process.version or 0
        before = encode(self.job.row)
        commands: list[m.Command] = [
            pb.ReportRequest(**sender, generation=late, has_state=True, version=version),
            pb.ReadyRequest(**sender, generation=late, version=version, stages=(), num_stages=0),
            pb.RefuseRequest(**sender, generation=late, reason="late"),
            pb.FinishRequest(**sender, version=version),
            pb.HeartbeatRequest(**sender, version=version),
            pb.FailRequest(**sender, reason="late"),
            pb.CheckpointRequest(**sender, version=99, generation=0),
        ]
        command = commands[what % (3 if self.holds(process) else 7)]
        try:
            assert self.job.step(command, self.now) == []
        except Refusal as refusal:
            if not isinstance(refusal, Fenced):
                raise
        else:
            assert self.holds(process), "a fenced process was heard"
        assert encode(self.job.row) == before

    @rule(crash=CRASHES)
    def the_launcher_reports(self, crash: int | None) -> None:
        if not self.unreported:
            return
        dead = self.unreported[0]
        with contextlib.suppress(Crashed):
            self.say(pb.ExitRequest(rank=dead.rank, incarnation=dead.incarnation, pid=0, exit_code=-9), crash)
            self.unreported.pop(0)

    @rule(rank=st.integers(0, 3))
    def a_replacement_comes(self, rank: int) -> None:
        """Perhaps before the death of its predecessor is known; but one for each rank."""
        rank %= self.world_size
        if not any(p.alive and not p.cut_off for p in self.processes if p.rank == rank):
            self.processes.append(Process(rank, f"{rank}.{self.spawned}"))
            self.spawned += 1

    @rule(which=st.integers(0, 2), log=st.sampled_from(["full", "full", "empty", "corrupt"]), crash=CRASHES)
    def a_log_server_answers(self, which: int, log: str, crash: int | None) -> None:
        if not self.asked:
            return
        ask = self.asked.pop(which % len(self.asked))
        answer: m.Command
        if isinstance(ask, m.FenceLogs):
            self.granted = max(self.granted, ask.generation)
            answer = m.LogsFenced(generation=ask.generation)
        elif isinstance(ask, m.ResetLogs):
            self.emptied = max(self.emptied, ask.generation)
            self.trimmed_below = 0  # nothing is there, of any step
            answer = m.LogsReset(generation=ask.generation)
        else:
            answer = m.InventoryTaken(
                generation=ask.generation, servers={"l": list(self.streams(log).values())}
            )
        with contextlib.suppress(Crashed):
            self.say(answer, crash)

    @rule(reason=st.sampled_from(["", "no route"]), crash=CRASHES)
    def a_log_server_does_not_answer(self, reason: str, crash: int | None) -> None:
        for ask in self.asked:
            with contextlib.suppress(Crashed):
                self.say(m.LogsBlocked(generation=ask.generation, address="l", reason=reason), crash)
            return

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]), crash=CRASHES)
    def time_passes(self, seconds: float, crash: int | None) -> None:
        self.now += seconds
        with contextlib.suppress(Crashed):
            self.say(m.Tick(), crash)
        for process in self.processes:
            if process.alive and process.joined and not process.cut_off:
                with contextlib.suppress(Crashed):
                    self.guarded(process, self.heartbeat(process))

    @rule(trimmed=st.booleans(), crash=CRASHES)
    def a_log_server_runs_full(self, trimmed: bool, crash: int | None) -> None:
        if self.job is None:
            return
        newest = self.trimmed_below if trimmed else 0
        with contextlib.suppress(Crashed):
            self.say(m.LogsPressed(address="l", reason="full", trimmed_below_step=newest), crash)

    @rule(index=st.integers(0, 20), crash=CRASHES)
    def a_rank_could_not_log(self, index: int, crash: int | None) -> None:
        if self.job is None:
            return
        process = self.processes[index % len(self.processes)]
        if self.holds(process) and process.version is not None:
            with contextlib.suppress(Crashed):
                self.guarded(process, self.ask_of(process), crash)

    def ask_of(self, process: Process) -> pb.AskCheckpointRequest:
        assert self.job is not None
        assert process.version is not None
        return pb.AskCheckpointRequest(
            **process.sender,
            generation=self.job.row.generation,
            after_version=process.version,
            reason="not logged",
        )

    @rule()
    def the_coordinator_restarts(self) -> None:
        if self.job is not None:
            self.restart()

    # --- what a process does ---

    def guarded(self, process: Process, command: m.Command, crash: int | None = None) -> bool:
        """True: acknowledged."""
        try:
            self.say(command, crash)
        except Refusal as refusal:
            if isinstance(refusal, Fenced):
                assert not self.holds(process), "the holder was fenced"
                process.alive = False
                self.unreported.append(process)
                return False
            if isinstance(refusal, Invalid):
                raise
            return False
        return True

    def act(self, process: Process, crash: int | None = None, choice: int = 0) -> None:
        with contextlib.suppress(Crashed):
            if not process.cut_off:
                process.view = self.view
            view = process.view
            if view is not None and any(f.incarnation == process.incarnation for f in view.fenced):
                process.alive = False
                self.unreported.append(process)
            elif not process.joined:
                request = join(
                    process.rank, process.incarnation, world_size=self.world_size, config=self.config
                )
                process.joined = self.guarded(process, m.Join(request), crash)
            elif view is not None:
                self.act_on(process, view, crash, choice)

    def once(self, process: Process, command: m.Command, crash: int | None, *key: object) -> None:
        """Says it until it is acknowledged, and never again."""
        key = (type(command).__name__, *key)
        if key not in process.acked and self.guarded(process, command, crash):
            process.acked.add(key)

    def act_on(self, process: Process, view: pb.View, crash: int | None, choice: int) -> None:
        generation, rank = view.generation, process.rank
        if view.state == pb.FORMING:
            process.become(0)
            if choice != 8 and ("CheckpointRequest", 0, generation) not in process.acked:
                self.save(process, crash)
            else:
                self.ready(process, generation, crash)
        elif view.state == pb.PLANNING:
            command = pb.ReportRequest(
                **process.sender,
                generation=generation,
                has_state=process.version is not None,
                version=process.version,
                undo_to=process.undo_to,
                undo_exact=process.undo_exact,
                forward_to=process.forward_to,
            )
            self.once(process, command, crash, generation)
        elif view.state == pb.RECOVERING:
            if choice >= 8 and ("ReadyRequest", generation) not in process.acked:
                process.refuses = generation
            if process.refuses == generation:
                self.spoil(process, view.plan)
                refuse = pb.RefuseRequest(**process.sender, generation=generation, reason="bits differ")
                self.once(process, refuse, crash, generation)
            elif self.follow(process, view.plan, choice):
                self.ready(process, generation, crash)
        elif view.state == pb.RUNNING and process.at is not None:
            self.train(process, generation, crash, choice)
        assert 0 <= rank < self.world_size

    def train(self, process: Process, generation: int, crash: int | None, choice: int) -> None:
        """A step: whole, (gradients reduced), (some buckets applied), (all of them), whole."""
        step = process.at
        assert step is not None
        behind = [p.at for p in self.processes if p.alive and p.joined and p.at is not None]
        if process.version == STEPS:
            finish = pb.FinishRequest(**process.sender, version=STEPS)
            self.once(process, finish, crash, generation)
        elif process.version is not None and process.forward_to is None:
            if step <= min(behind):
                process.undo_exact = choice % 2 == 1
                partial = ((step + 1, None, None), (step, None, step + 1), (None, step, None))
                process.become(*partial[choice % 3])
        elif choice % 2 and process.forward_to != process.version:
            process.become(None, step, step + 1)
        else:
            process.become(step + 1)
        if process.version is not None and process.version > step:
            process.acked = {key for key in process.acked if key[0] != "CheckpointRequest"}
        assert process.view is not None
        newest = max(process.view.checkpoints, default=-1)
        early = process.view.checkpoint_at if process.view.HasField("checkpoint_at") else None
        if (
            process.version is not None
            and (process.version % CHECKPOINT_EVERY == 0 or process.version == early)
            and process.version > newest
        ):
            self.save(process, crash, fails=choice == 6)
        self.prune(process, process.view)
        if (
            early is not None
            and process.version is not None
            and early < process.version
            and self.holds(process)
        ):
            self.guarded(process, self.ask_of(process), crash)

    def save(self, process: Process, crash: int | None, fails: bool = False) -> None:
        assert process.version is not None
        assert process.view is not None
        process.unsaved = (process.version, process.view.generation, process.bits)
        if not fails:
            self.write(process, crash)

    def write(self, process: Process, crash: int | None) -> None:
        assert process.unsaved is not None
        (version, generation, bits), process.unsaved = process.unsaved, None
        self.saved[process.rank, version] = bits
        durable = pb.CheckpointRequest(**process.sender, version=version, generation=generation)
        self.once(process, durable, crash, version, generation)

    @rule(index=st.integers(0, 20), crash=CRASHES)
    def what_failed_is_written_after_all(self, index: int, crash: int | None) -> None:
        failed = [p for p in self.processes if p.alive and p.joined and p.unsaved is not None]
        if failed:
            with contextlib.suppress(Crashed):
                self.write(failed[index % len(failed)], crash)

    def ready(self, process: Process, generation: int, crash: int | None) -> None:
        assert process.version is not None
        ready = pb.ReadyRequest(
            **process.sender,
            generation=generation,
            version=process.version,
            stages=(process.rank // self.dp_size,),
            num_stages=self.num_stages,
        )
        self.once(process, ready, crash, generation)

    def streams(self, log: str) -> dict[str, StreamSummary]:
        if log == "empty":
            return {}
        names = [
            boundary(stage, kind, dp_rank, self.dp_size)
            for stage in range(self.num_stages)
            for kind in "FB"
            for dp_rank in range(self.dp_size)
        ]
        return {
            name: StreamSummary(
                stream=name,
                records=1,
                first_step=self.trimmed_below,
                last_step=STEPS,
                trimmed_below_step=self.trimmed_below,
                corrupt=log == "corrupt",
            )
            for name in names
        }

    # --- the end: everything works again ---

    def teardown(self) -> None:
        if not hasattr(self, "stored"):
            return
        for process in self.processes:
            process.cut_off = False
        for _ in range(400):
            if self.durable is not None and self.durable.state.is_over:
                break
            self.the_launcher_reports(None)
            for rank in range(self.world_size):
                self.a_replacement_comes(rank)
            self.all_goes_well(1, "full")
            self.time_passes(0.5, None)
        assert self.durable is not None
        row = self.durable
        if row.state is State.FAILED:
            assert any(reason in row.reason for reason in FAILURES), row.reason
        else:
            assert row.state is State.FINISHED, f"stuck in {row.state}: {row}"


@pytest.mark.timeout(400)  # some 30 s of calculation
def test_random_histories() -> None:
    run_state_machine_as_test(
        Simulation,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            # Shrinking takes minutes; the history that failed is printed whole. Add Phase.shrink by hand.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )

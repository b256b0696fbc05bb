"""Other groups in a job that runs: whoever dies, whenever: what a plan reads is in the log.

The model: a pipeline of ranks, each with a View of its own age; checkpoints that become durable when they like; a log
of (step, source, destination), of which a dead process loses what it had not got out. Its ranks log by `LoggedGroups`,
its coordinator is the product's, and so are its plans.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator import commands as m
from services.coordinator.checkpoints import CheckpointTracker
from services.coordinator.commands import Refusal
from services.coordinator.parts import encode
from services.coordinator.planning import decide, give_up_log
from services.coordinator.regroup import Regroup
from services.coordinator.row import Holder, JobRow, State
from services.coordinator.step_watchdog import StepClock
from services.coordinator.timing import Timing
from swift.recovery import Plan, RecoveryGroups, Report, Strategy, StreamSummary
from swift.recovery.regroup import LoggedGroups
from tests.unit.coordinator.rows import copy_of

TIMING = Timing(heartbeat_s=0.5, lease_s=10.0, step_bound_s=30.0)
RANKS, EVERY = 4, 4
CHOICES = ("0,1,2,3", "0-1,2-3", "0,1-2,3", "0-2,3", "0-3", "0-1,2,3")


def row_of(groups: str = "0,1,2,3") -> JobRow:
    return JobRow(
        job="j",
        world_size=RANKS,
        config={"strategy": "auto", "groups": groups},
        fingerprint={},
        log_servers=[],
        state=State.RUNNING,
        num_stages=RANKS,
        stages={rank: [rank] for rank in range(RANKS)},
        stage_shards=dict.fromkeys(range(RANKS), 0),
        holders={
            rank: Holder(rank=rank, incarnation=f"a{rank}", pid=1, host="", since_generation=1, member=rank)
            for rank in range(RANKS)
        },
        checkpoints=[0],
        groups=groups,
    )


@dataclass
class Shown:
    """A View, as far as groups go."""

    groups: str
    wanted: str
    number: int
    since: dict[int, int]
    generation: int


@dataclass
class Rank:
    number: int
    view: Shown
    logged: LoggedGroups
    version: int = 0
    afloat: set[tuple[int, int, int]] = field(default_factory=set)
    """Given to the log, and not there yet."""


@dataclass
class World:
    chance: random.Random
    row: JobRow
    ranks: list[Rank] = field(default_factory=list)
    log: set[tuple[int, int, int]] = field(default_factory=set)
    saved: list[m.CheckpointDurable] = field(default_factory=list)
    """On their way to the coordinator."""
    replays: int = 0

    def __post_init__(self) -> None:
        # Each world has paces of its own: what needs two rare things at once is common in some of them.
        pick = self.chance.choice
        self.views, self.shards = pick([0.1, 0.4, 0.7]), pick([0.15, 0.3, 0.6])
        self.cut = pick([0.0, 0.05, 0.15])
        self.asks, self.deaths = pick([0.05, 0.1, 0.3]), pick([0.03, 0.1, 0.2])
        self.regroup = Regroup(self.row)
        self.checkpoints = CheckpointTracker(self.row, StepClock(TIMING), TIMING)
        self.row.generation = 1
        self.ranks = [self.fresh(number) for number in range(RANKS)]

    def shown(self) -> Shown:
        row = self.row
        number = row.groups_number if row.groups_next else 0
        return Shown(row.groups, row.groups_next, number, dict(row.groups_from), row.generation)

    def fresh(self, number: int) -> Rank:
        return Rank(
            number, self.shown(), LoggedGroups(number, RecoveryGroups.parse(self.row.config["groups"]))
        )

    def look(self, rank: Rank) -> None:
        view = rank.view
        rank.logged.learn(view.groups, view.wanted, view.number, view.since)

    def step(self, rank: Rank, plan: Plan | None = None) -> None:
        """One step, and the checkpoint behind it. In a replay only what the plan's groups part comes from the log."""
        self.look(rank)
        replayed = [RecoveryGroups.parse(plan.groups)] if plan is not None else []
        for groups in rank.logged.at(rank.version, replayed):
            for neighbour in (rank.number - 1, rank.number + 1):
                if 0 <= neighbour < RANKS and groups.crosses(rank.number, neighbour):
                    rank.afloat.add((rank.version, rank.number, neighbour))
        rank.version += 1
        if rank.version % EVERY == 0:
            self.look(rank)
            number, since = rank.logged.saving(rank.version)
            self.saved.append(
                m.CheckpointDurable(
                    sender=m.Sender(rank=rank.number, incarnation=""),
                    version=rank.version,
                    generation=rank.view.generation,
                    groups_number=number,
                    groups_since=since,
                )
            )

    def hear(self, durable: m.CheckpointDurable) -> None:
        """As the core does."""
        self.regroup.logged(durable)
        self.checkpoints.count(durable)
        self.regroup.settle()

    def arrive(self) -> None:
        """Something of all that is on its way gets there."""
        for rank in self.ranks:
            if self.chance.random() < self.views:
                rank.view = self.shown()
            self.out(rank, keep=self.chance.random())
        kept = []
        for durable in self.saved:
            if self.chance.random() < self.shards and not any(d.sender == durable.sender for d in kept):
                self.hear(durable)
            else:
                kept.append(durable)
        self.saved = kept

    def out(self, rank: Rank, keep: float = 0.0) -> None:
        """In order: the older ones first."""
        ordered = sorted(rank.afloat)
        gone = ordered[: len(ordered) - int(keep * len(ordered))]
        self.log.update(gone)
        rank.afloat.difference_update(gone)

    def die(self, dead: list[int]) -> None:
        for number in dead:
            self.saved = [durable for durable in self.saved if durable.sender.rank != number]
            self.ranks[number] = self.fresh(number)
        self.row.generation += 1
        for rank in self.ranks:
            self.out(rank)
            rank.view = self.shown()  # nobody goes on without it
        self.recover(set(dead))

    def recover(self, empty: set[int]) -> None:
        row = self.row
        row.reports = self.reports(empty)
        plan, reason = decide(row, self.inventory(self.log), {})
        assert plan is not None, reason
        if plan.restores:
            give_up_log(row, plan)
            row.refused = type(row.refused)()
            self.log.clear()
            self.regroup.empty(plan.target_version)
        for rank in self.ranks:
            rank.view = self.shown()
            mine = plan.of(rank.number)
            if mine.strategy in (Strategy.REPLAY, Strategy.CHECKPOINT):
                assert mine.from_version in row.checkpoints
            rank.version = mine.from_version
        self.check(plan, self.log)
        # They go on side by side, while others' checkpoints become durable, and may be cut short.
        self.replays += plan.reads_log
        while behind := [rank for rank in self.ranks if rank.version < plan.target_version]:
            first = min(rank.version for rank in behind)
            for rank in behind:
                if rank.version == first:
                    self.step(rank, plan)
            self.arrive()
            if self.chance.random() < self.cut:
                return self.die([self.chance.choice(behind).number])
        return None

    def suppose(self, dead: list[int]) -> None:
        """They die now: what is planned can be read. (And nobody has died.)"""
        row = copy_of(self.row)
        row.reports = self.reports(set(dead))
        log = self.log.union(*(rank.afloat for rank in self.ranks if rank.number not in dead))
        plan, reason = decide(row, self.inventory(log), {})
        assert plan is not None, reason
        if not plan.restores:
            self.replays += plan.reads_log
            self.check(plan, log)

    def reports(self, empty: set[int]) -> dict[int, Report]:
        return {
            rank.number: Report(rank=rank.number, version=None if rank.number in empty else rank.version)
            for rank in self.ranks
        }

    def inventory(self, log: set[tuple[int, int, int]]) -> dict[str, StreamSummary]:
        found = {}
        for rank in range(RANKS):
            for kind, neighbour in (("F", rank + 1), ("B", rank - 1)):
                steps = [step for step, source, to in log if (source, to) == (rank, neighbour)]
                if steps:
                    found[f"s{rank}.{kind}"] = StreamSummary(
                        stream=f"s{rank}.{kind}",
                        records=len(steps),
                        first_step=min(steps),
                        last_step=max(steps),
                    )
        return found

    def check(self, plan: Plan, log: set[tuple[int, int, int]]) -> None:
        """All that the replays read is there, or is made again by who replays beside them."""
        groups = RecoveryGroups.parse(plan.groups)
        for rank in self.ranks:
            begins = plan.of(rank.number).from_version
            for neighbour in (rank.number - 1, rank.number + 1):
                if not 0 <= neighbour < RANKS or begins == plan.target_version:
                    continue
                theirs = plan.of(neighbour).from_version
                if not groups.crosses(neighbour, rank.number):
                    assert theirs == begins
                    continue
                for step in range(begins, min(theirs, plan.target_version)):
                    assert (step, neighbour, rank.number) in log, (
                        plan.reason,
                        step,
                        neighbour,
                        self.row,
                    )

    def train(self) -> None:
        """A step, of those that are behind: neighbours are a step apart at most."""
        first = min(rank.version for rank in self.ranks)
        for rank in self.ranks:
            if rank.version == first and (self.chance.random() < 0.8 or rank is self.ranks[0]):
                self.step(rank)


@pytest.mark.timeout(400)  # a property test: 12 s alone, 138 s were seen at a load of 12
@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CHOICES))
def test_whoever_dies_whenever_the_log_has_what_the_plan_reads(seed: int, first: str) -> None:
    world = run(seed, first)
    assert world.row.groups in CHOICES


def run(seed: int, first: str = "0,1,2,3") -> World:
    chance = random.Random(seed)
    world = World(chance, row_of(first))
    for _ in range(40):
        turn = chance.random()
        if turn < world.asks:
            world.regroup.ask(m.ChangeGroups(groups=chance.choice(CHOICES)))
        elif turn < world.asks + world.deaths:
            world.die(chance.sample(range(RANKS), chance.choice([1, 1, 1, 2])))
        world.train()
        world.arrive()
        world.suppose(chance.sample(range(RANKS), chance.choice([1, 1, 2])))
    return world


def test_the_model_gets_everywhere() -> None:
    """Else it would prove nothing: groups come into force by checkpoints, and are replayed by before and after."""
    worlds = [run(seed) for seed in range(60)]
    assert sum(world.replays for world in worlds) > 60
    assert sum(world.row.groups_since > 0 for world in worlds) > 20
    assert sum(bool(world.row.groups_next) for world in worlds) > 5


# --- what an operator may ask ---


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("", "name the stages of each group"),
        ("0-1", "are of 2 stages, the pipeline has 4"),
        ("1-3", "does not begin at 0"),
        ("much", "is no run of stages"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: str, words: str) -> None:
    row = row_of()
    before = encode(row)
    with pytest.raises(Refusal, match=words):
        Regroup(row).ask(m.ChangeGroups(groups=groups))
    assert encode(row) == before


def test_groups_are_refused_before_and_after_the_run() -> None:
    row = row_of()
    row.state = State.FORMING
    with pytest.raises(Refusal, match="is FORMING: its groups cannot be changed now"):
        Regroup(row).ask(m.ChangeGroups(groups="0-3"))
    row.state = State.FINISHED
    with pytest.raises(Refusal, match="is FINISHED: its groups cannot be changed now"):
        Regroup(row).ask(m.ChangeGroups(groups="0-3"))


def test_a_job_with_replicas_gets_them_when_all_dp_ranks_log_by_them() -> None:
    row = row_of("0,1")
    row.stages, row.num_stages = {0: [0], 1: [0], 2: [1], 3: [1]}, 2
    regroup = Regroup(row)
    assert regroup.ask(m.ChangeGroups(groups="0-1"))
    row.checkpoints = [0, 8]
    for rank, since in enumerate((4, 8, 8, 4)):
        assert not regroup.settle()
        regroup.logged(said(rank, since))
    assert regroup.settle()
    assert (row.groups, row.groups_since) == ("0-1", 8)


def test_several_stages_on_a_rank_have_one_group_of_all_or_none() -> None:
    row = row_of("0-3")
    row.stages = {0: [0, 2], 1: [1, 3]}
    row.world_size, row.holders = 2, {rank: row.holders[rank] for rank in (0, 1)}
    regroup = Regroup(row)
    with pytest.raises(Refusal, match="part stages 0 and 2, which are lost together with rank 0"):
        regroup.ask(m.ChangeGroups(groups="0-1,2-3"))
    assert regroup.ask(m.ChangeGroups(groups="none"))
    assert row.groups_next == "none"
    assert not regroup.ask(m.ChangeGroups(groups=" none"))
    for rank in (0, 1):
        assert regroup.logged(said(rank, 4))
    row.checkpoints = [0, 4]
    assert regroup.settle()
    assert (row.groups, row.groups_next, row.groups_since) == ("", "", 4)
    assert not regroup.ask(m.ChangeGroups(groups="none"))
    assert regroup.ask(m.ChangeGroups(groups="0-3"))
    assert row.groups_next == "0-3"


def said(rank: int, since: int, number: int = 1) -> m.CheckpointDurable:
    return m.CheckpointDurable(
        sender=m.Sender(rank=rank, incarnation=""),
        version=since,
        generation=1,
        groups_number=number,
        groups_since=since,
    )


def test_asking_again_changes_nothing_and_the_groups_in_force_call_it_off() -> None:
    row = row_of()
    regroup = Regroup(row)
    assert not regroup.ask(m.ChangeGroups(groups="0,1,2,3"))
    assert regroup.ask(m.ChangeGroups(groups="0-1,2-3"))
    assert not regroup.ask(m.ChangeGroups(groups="0-1, 2-3"))
    assert (row.groups_next, row.groups_number) == ("0-1,2-3", 1)
    assert regroup.ask(m.ChangeGroups(groups="0,1,2,3"))
    assert (row.groups, row.groups_next, row.groups_number) == ("0,1,2,3", "", 2)


def test_a_word_of_another_wish_does_not_count() -> None:
    """It was asked for, called off and asked for again: who logged by it before may have stopped."""
    row = row_of()
    regroup = Regroup(row)
    for groups in ("0-1,2-3", "0,1,2,3", "0-1,2-3"):
        regroup.ask(m.ChangeGroups(groups=groups))
    assert not regroup.logged(said(1, 4))
    assert row.groups_from == {}


def test_the_row_remembers() -> None:
    row = row_of("0-1,2-3")
    row.groups_since, row.groups_next, row.groups_number, row.groups_from = 8, "0-3", 3, {1: 12}
    row.plan = Plan(target_version=9, ranks=(), collective_source=-1, reason="", groups="0-1,2-3")
    assert copy_of(row) == row


def test_groups_are_the_same_however_they_are_written() -> None:
    row = row_of("0-1, 2-3")
    assert not Regroup(row).ask(m.ChangeGroups(groups="0-1,2-3"))


def test_no_replay_is_planned_from_before_they_were_in_force() -> None:
    row = row_of("0-1,2-3")
    row.groups, row.groups_since, row.checkpoints = "0,1,2,3", 8, [4, 8]
    log = {(step, rank, to) for step in range(4, 9) for rank in range(RANKS) for to in (rank - 1, rank + 1)}
    row.reports = {rank: Report(rank=rank, version=None if rank == 1 else 6) for rank in range(RANKS)}
    plan, _ = decide(row, World(random.Random(0), row_of()).inventory(log), {})
    assert plan is not None
    assert plan.restores
    row.groups_since = 0
    plan, _ = decide(row, World(random.Random(0), row_of()).inventory(log), {})
    assert plan is not None
    assert (plan.of(1).strategy, plan.of(1).from_version, plan.groups) == (Strategy.REPLAY, 4, "0,1,2,3")


def test_behind_an_older_checkpoint_that_is_restored_everything_is_logged_again() -> None:
    row = row_of()
    row.groups_since = 8
    assert not Regroup(row).empty(4)
    assert row.groups_since == 4
    row.groups_since = 0
    assert not Regroup(row).empty(4)
    assert row.groups_since == 0

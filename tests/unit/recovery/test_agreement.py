"""plan() with replicas and partial states: the cases one by one, then properties over random ones."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings

from swift_ft.log.record import Steps
from swift_ft.planner import (
    Assignment,
    Plan,
    PlanConfig,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
    plan,
)
from tests.unit.recovery.grouped import grouped_situations
from tests.unit.recovery.situations import (
    Situation,
    check_can_be_followed,
    check_ways,
    expected,
    situations,
    snapshot_situations,
)

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, *_ = Strategy
AUTO = PlanConfig()
AT_10 = (0, 10)


def mesh(stages: int, dp_size: int, shards: dict[int, int] | None = None) -> Assignment:
    """Rank = stage * dp_size + dp_rank, as torch numbers a (pipeline, data) mesh."""
    return Assignment.from_reports(
        num_stages=stages,
        stages={rank: (rank // dp_size,) for rank in range(stages * dp_size)},
        shards=shards or {},
    )


def held(version: int) -> dict[str, object]:
    return {"version": version}


def stuck(step: int) -> dict[str, object]:
    """In the commit vote of `step`, nothing applied."""
    return {"version": step, "forward_to": step + 1}


def half(step: int, exact: bool = True) -> dict[str, object]:
    """Some buckets of `step` are applied."""
    return {"version": None, "undo_to": step, "undo_exact": exact}


def applied(step: int) -> dict[str, object]:
    """All buckets of `step` are applied, the vote is not over."""
    return {**half(step), "forward_to": step + 1}


LOST: dict[str, object] = {"version": None}


def reports(*states: dict[str, object], hosts: str = "") -> list[Report]:
    return [
        Report(rank=rank, host=hosts[rank] if hosts else "", **state)  # type: ignore[arg-type]
        for rank, state in enumerate(states)
    ]


def whole_log(assignment: Assignment, first: int, last: int) -> dict[str, StreamSummary]:
    dp_size = assignment.dp_size
    names = [
        f"s{stage}c{dp_rank}.{kind}" if dp_size > 1 else f"s{stage}.{kind}"
        for stage in range(assignment.num_stages)
        for dp_rank in range(dp_size)
        for kind in "FBXT"
    ]
    return {name: StreamSummary(stream=name, records=1, first_step=first, last_step=last) for name in names}


def decided(
    said: list[Report],
    assignment: Assignment,
    log: dict[str, StreamSummary] | None = None,
    checkpoints: tuple[int, ...] = AT_10,
    config: PlanConfig = AUTO,
    refused: Refusals = Refusals(),  # noqa: B008
) -> Plan:
    outcome, reason = plan(said, assignment, log or {}, checkpoints, config, refused)
    assert outcome is not None, reason
    assert outcome.reason == reason
    check_can_be_followed(
        Situation(
            reports=tuple(said),
            assignment=assignment,
            log=log or {},
            checkpoints=checkpoints,
            config=config,
            refused=refused,
        ),
        outcome,
    )
    return outcome


def ways(outcome: Plan) -> list[tuple[Strategy, int] | tuple[Strategy, int, tuple[int, ...]]]:
    return [
        (r.strategy, r.from_version, r.sources) if r.sources else (r.strategy, r.from_version)
        for r in outcome.ranks
    ]


class TestWithoutReplay:
    def test_a_lost_rank_is_copied_from_its_replica(self) -> None:
        outcome = decided(reports(held(15), LOST, held(15), held(15)), mesh(2, 2))
        assert ways(outcome) == [(KEEP, 15), (REPLICA, 15, (0,)), (KEEP, 15), (KEEP, 15)]
        assert outcome.exact
        assert outcome.reason == (
            "target version 15: KEEP on ranks 0, 2, 3; REPLICA on rank 1; the highest version that every stage "
            "reaches without replay (stage 0: 15; stage 1: 15)"
        )
        assert outcome.of(1).reason == "holds no state; rank 0 holds version 15"

    def test_who_waits_in_the_vote_rolls_forward_if_every_stage_can(self) -> None:
        outcome = decided(reports(stuck(14), LOST, stuck(14), held(14)), mesh(2, 2))
        assert ways(outcome) == [
            (ROLL_FORWARD, 15),
            (REPLICA, 15, (0,)),
            (ROLL_FORWARD, 15),
            (REPLICA, 15, (2,)),
        ]
        assert outcome.of(0).reason == "holds version 14, and has all gradients of step 14 reduced"
        assert outcome.of(1).reason == "holds no state; rank 0 rolls forward to version 15"
        assert "stage 0: 15, 14; stage 1: 15, 14" in outcome.reason

    def test_and_drops_the_step_if_one_cannot(self) -> None:
        outcome = decided(reports(stuck(14), LOST, held(14), held(14)), mesh(2, 2))
        assert ways(outcome) == [(KEEP, 14), (REPLICA, 14, (0,)), (KEEP, 14), (KEEP, 14)]

    def test_a_half_update_is_taken_back(self) -> None:
        outcome = decided(reports(half(14), half(14), LOST), mesh(1, 3))
        assert ways(outcome) == [(UNDO, 14), (UNDO, 14), (REPLICA, 14, (1, 0))]
        assert outcome.exact
        assert outcome.of(0).reason == "is between two versions, and takes step 14 back, bit for bit"
        assert outcome.of(2).reason.endswith("rank 1 goes back to version 14, rank 0 goes back to version 14")

    def test_nobody_copies_what_it_can_make_itself(self) -> None:
        outcome = decided(reports(held(15), applied(14), half(14)), mesh(1, 3))
        assert ways(outcome) == [(KEEP, 15), (ROLL_FORWARD, 15), (REPLICA, 15, (1, 0))]
        outcome = decided(reports(held(14), half(14), LOST), mesh(1, 3))
        assert ways(outcome) == [(KEEP, 14), (UNDO, 14), (REPLICA, 14, (1, 0))]
        outcome = decided(reports(applied(14), half(14), LOST), mesh(1, 3))
        assert ways(outcome) == [(ROLL_FORWARD, 15), (REPLICA, 15, (0,)), (REPLICA, 15, (0,))]
        outcome = decided(reports(applied(14), half(14), stuck(14)), mesh(1, 3))
        assert ways(outcome) == [(ROLL_FORWARD, 15), (REPLICA, 15, (0, 2)), (ROLL_FORWARD, 15)]

    def test_a_rank_ahead_of_what_the_others_reach_copies_it(self) -> None:
        # Rank 0 has 15 and cannot go back; its replica has what stage 1 has.
        outcome = decided(reports(held(15), held(14), held(14), LOST), mesh(2, 2))
        assert ways(outcome) == [(REPLICA, 14, (1,)), (KEEP, 14), (KEEP, 14), (REPLICA, 14, (2,))]

    def test_one_dp_rank_rolls_forward_and_undoes_too(self) -> None:
        assert ways(decided(reports(held(15), stuck(14), applied(14)), mesh(3, 1))) == [
            (KEEP, 15),
            (ROLL_FORWARD, 15),
            (ROLL_FORWARD, 15),
        ]
        assert ways(decided(reports(held(14), half(14)), mesh(2, 1))) == [(KEEP, 14), (UNDO, 14)]

    def test_several_victims(self) -> None:
        outcome = decided(reports(LOST, LOST, held(15), LOST, held(15), LOST), mesh(2, 3))
        assert ways(outcome) == [
            (REPLICA, 15, (2,)),
            (REPLICA, 15, (2,)),
            (KEEP, 15),
            (REPLICA, 15, (4,)),
            (KEEP, 15),
            (REPLICA, 15, (4,)),
        ]

    def test_the_nearest_source_comes_first(self) -> None:
        states = (held(3), held(3), LOST, held(3), held(3))
        assert decided(reports(*states), mesh(1, 5)).of(2).sources == (1, 3, 0, 4)
        assert decided(reports(*states, hosts="abbab"), mesh(1, 5)).of(2).sources == (1, 4, 3, 0)

    def test_shards_are_replicas_of_their_own_only(self) -> None:
        # Two replica groups (ranks 0 and 2, 1 and 3) of two shards each.
        assignment = mesh(1, 4, {0: 0, 1: 1, 2: 0, 3: 1})
        outcome = decided(reports(LOST, LOST, held(9), held(9)), assignment)
        assert ways(outcome) == [(REPLICA, 9, (2,)), (REPLICA, 9, (3,)), (KEEP, 9), (KEEP, 9)]
        # Both ranks of shard 1 are lost: the stage has no version, so all of it replays from the checkpoint.
        outcome = decided(reports(held(15), LOST, held(15), LOST), assignment, whole_log(assignment, 10, 15))
        assert ways(outcome) == [(REPLAY, 10)] * 4
        assert "reach no version together" in outcome.of(0).reason
        assert outcome.of(1).reason == "holds no state; the newest complete checkpoint is of version 10"


class TestInexactUndo:
    ARITHMETIC = PlanConfig(inexact_undo=True)

    def test_it_is_used_only_if_allowed(self) -> None:
        said = reports(half(14, exact=False), LOST)
        outcome = decided(said, mesh(1, 2), config=self.ARITHMETIC)
        assert ways(outcome) == [(UNDO, 14), (REPLICA, 14, (0,))]
        assert not outcome.exact
        assert outcome.reason.endswith("not bit for bit: the undo of rank 0")
        assert outcome.of(0).reason.endswith("takes step 14 back, not bit for bit")
        outcome = decided(said, mesh(1, 2))
        assert outcome.restores
        assert outcome.exact

    def test_one_replica_undoes_and_the_others_copy_it(self) -> None:
        # They may have applied different buckets: two undos would not give the same bits.
        outcome = decided(
            reports(half(14, exact=False), LOST, half(14, exact=False)), mesh(1, 3), config=self.ARITHMETIC
        )
        assert ways(outcome) == [(UNDO, 14), (REPLICA, 14, (0,)), (REPLICA, 14, (0,))]

    def test_an_exact_way_to_the_same_version_is_taken_instead(self) -> None:
        outcome = decided(reports(half(14, exact=False), half(14), LOST), mesh(1, 3), config=self.ARITHMETIC)
        assert ways(outcome) == [(REPLICA, 14, (1,)), (UNDO, 14), (REPLICA, 14, (1,))]
        assert outcome.exact

    def test_an_exact_replay_to_the_same_version_is_taken_instead(self) -> None:
        # Stage 1 is lost, so something must be replayed; stage 0 could go back to 14 by an inexact undo.
        assignment = mesh(2, 1)
        outcome = decided(
            reports({**half(14, exact=False), "forward_to": 15}, LOST),
            assignment,
            whole_log(assignment, 10, 15),
            config=self.ARITHMETIC,
            refused=Refusals().and_of([ROLL_FORWARD], "rank 0 refused ROLL_FORWARD"),
        )
        assert outcome.exact
        assert outcome.target_version == 14
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10)]

    def test_without_replicas_to_copy_from_each_would_undo_and_that_is_no_version(self) -> None:
        outcome = decided(
            reports(half(14, exact=False), half(14, exact=False)),
            mesh(1, 2),
            config=self.ARITHMETIC,
            refused=Refusals().and_of([REPLICA], "rank 1 refused REPLICA: digests differ"),
        )
        assert ways(outcome) == [(REPLAY, 10)] * 2


class TestReplay:
    def test_a_stage_of_which_nobody_lives_is_replayed_by_all_of_its_dp_ranks(self) -> None:
        assignment = mesh(3, 2)
        outcome = decided(
            reports(held(15), held(15), LOST, LOST, held(15), LOST), assignment, whole_log(assignment, 10, 14)
        )
        assert ways(outcome) == [
            (KEEP, 15),
            (KEEP, 15),
            (REPLAY, 10),
            (REPLAY, 10),
            (KEEP, 15),
            (REPLICA, 15, (4,)),
        ]
        assert outcome.reason.endswith(
            "no version is reached by every stage without replay (stage 0: 15; stage 1: none; stage 2: 15)"
        )

    def test_a_stage_that_is_behind_gets_to_one_version_and_catches_up_together(self) -> None:
        assignment = mesh(2, 3)
        outcome = decided(
            reports(held(15), held(15), held(15), held(14), LOST, half(14)),
            assignment,
            whole_log(assignment, 10, 14),
        )
        assert ways(outcome)[3:] == [(CATCH_UP, 14), (REPLICA, 14, (3, 5)), (UNDO, 14)]
        assert outcome.of(3).reason == "holds version 14, 1 behind"
        assert outcome.of(4).reason == (
            "holds no state; rank 3 holds version 14, rank 5 goes back to version 14; 1 to replay"
        )
        outcome = decided(
            reports(held(16), held(16), held(16), half(14), LOST, stuck(13)),
            assignment,
            whole_log(assignment, 10, 15),
        )
        assert ways(outcome)[3:] == [(UNDO, 14), (REPLICA, 14, (3, 5)), (ROLL_FORWARD, 14)]
        assert outcome.of(3).reason.endswith("bit for bit; 2 to replay")

    def test_each_dp_rank_reads_its_own_streams(self) -> None:
        assignment = mesh(3, 2)
        said = reports(held(15), held(15), LOST, LOST, held(15), held(15))
        log = whole_log(assignment, 10, 14)
        needed = ["s0c0.F", "s0c1.F", "s2c0.B", "s2c1.B"]
        assert ways(decided(said, assignment, {name: log[name] for name in needed}))[2] == (REPLAY, 10)
        for name in needed:
            outcome = decided(said, assignment, {other: log[other] for other in needed if other != name})
            assert outcome.restores
            assert f"{name} is empty" in outcome.reason
        assert decided(said, assignment, log | {"s1c1.X": corrupted("s1c1.X")}).restores
        assert not decided(said, assignment, log | {"s1.X": corrupted("s1.X")}).restores

    def test_a_lower_target_is_tried_where_no_newer_state_is_thrown_away(self) -> None:
        # Stage 0 has 14 and could finish 15; stage 2 has logged up to step 13 only.
        assignment = mesh(3, 2)
        said = reports(stuck(14), stuck(14), LOST, LOST, held(14), held(14))
        log = whole_log(assignment, 10, 13)
        outcome = decided(said, assignment, log)
        assert outcome.target_version == 14
        assert ways(outcome)[0] == (KEEP, 14)
        assert "none above 14 can be replayed: " in outcome.reason
        # Had stage 0 finished it already, its state would be given up: then all restore.
        said = reports(held(15), held(15), LOST, LOST, held(14), held(14))
        assert decided(said, assignment, log).restores

    def test_collectives_come_from_one_who_has_done_the_steps_if_nobody_keeps(self) -> None:
        assignment = mesh(1, 2)
        log = {"r0.C": StreamSummary(stream="r0.C", records=5, first_step=10, last_step=14)}
        config = PlanConfig(strategy="replay")
        outcome = decided(reports(held(15), LOST), assignment, log, config=config)
        assert ways(outcome) == [(REPLAY, 10)] * 2
        assert outcome.collective_source == 0
        log = {"r1.C": StreamSummary(stream="r1.C", records=5, first_step=10, last_step=14)}
        assert decided(reports(held(15), LOST), assignment, log, config=config).restores

    @pytest.mark.parametrize(("records", "restores"), [(2, False), (3, True)])
    def test_a_stream_of_nothing_but_marks_wants_no_source(self, records: int, restores: bool) -> None:
        assignment = mesh(2, 2)
        log = whole_log(assignment, 10, 14)
        log["r0.C"] = StreamSummary(
            stream="r0.C", records=records, first_step=12, last_step=14, unlogged=Steps(10, 14), marks=2
        )
        said = reports(held(15), LOST, held(15), held(15))
        outcome = decided(said, assignment, log, config=PlanConfig(strategy="replay"))
        assert outcome.restores == restores
        assert outcome.collective_source == -1

    def test_one_who_keeps_comes_first(self) -> None:
        assignment = mesh(2, 2)
        log = whole_log(assignment, 10, 14)
        for rank in range(4):
            log[f"r{rank}.C"] = StreamSummary(stream=f"r{rank}.C", records=5, first_step=10, last_step=14)
        said = reports(held(15), LOST, held(15), held(15))
        outcome = decided(said, assignment, log, config=PlanConfig(strategy="replay"))
        assert ways(outcome)[0] == (REPLAY, 10)
        assert outcome.collective_source == 2


def corrupted(name: str) -> StreamSummary:
    return StreamSummary(stream=name, records=5, first_step=10, last_step=14, corrupt=True)


class TestStrategies:
    SAID = (held(15), LOST, held(15), held(15))

    def test_replica_never_replays(self) -> None:
        config = PlanConfig(strategy="replica")
        assignment = mesh(2, 2)
        log = whole_log(assignment, 10, 14)
        assert ways(decided(reports(*self.SAID), assignment, log, config=config))[1] == (REPLICA, 15, (0,))
        outcome = decided(reports(LOST, LOST, held(15), held(15)), assignment, log, config=config)
        assert outcome.restores
        assert outcome.of(0).reason == (
            "the job is configured never to replay, and no version is reached by every stage without replay "
            "(stage 0: none; stage 1: 15)"
        )

    def test_replay_never_copies(self) -> None:
        config = PlanConfig(strategy="replay")
        assignment = mesh(2, 2)
        outcome = decided(reports(*self.SAID), assignment, whole_log(assignment, 10, 14), config=config)
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 15), (KEEP, 15)]

    def test_checkpoint_always_restores(self) -> None:
        config = PlanConfig(strategy="checkpoint")
        assert decided(reports(held(15), held(15)), mesh(1, 2), config=config).restores


class TestRefusals:
    LAYOUT = mesh(2, 2)
    LOG = whole_log(LAYOUT, 10, 14)
    SAID = reports(held(15), LOST, held(15), held(15))

    def test_after_a_refused_copy_the_stage_replays(self) -> None:
        refused = Refusals().and_of([REPLICA], "rank 1 refused REPLICA: digests differ")
        outcome = decided(self.SAID, self.LAYOUT, self.LOG, refused=refused)
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 15), (KEEP, 15)]
        outcome = decided(self.SAID, self.LAYOUT, {}, refused=refused)
        assert outcome.restores
        assert outcome.of(0).reason.startswith("rank 1 refused REPLICA: digests differ; rank 0 cannot replay")

    def test_after_a_refused_copy_each_goes_its_own_way(self) -> None:
        refused = Refusals().and_of([REPLICA], "rank 1 refused REPLICA: digests differ")
        outcome = decided(reports(held(15), applied(14)), mesh(1, 2), refused=refused)
        assert ways(outcome) == [(KEEP, 15), (ROLL_FORWARD, 15)]

    def test_a_refused_replay_does_not_stop_a_copy(self) -> None:
        refused = Refusals().and_of([CATCH_UP, REPLAY], "rank 1 refused REPLAY: bits differ")
        assert ways(decided(self.SAID, self.LAYOUT, refused=refused))[1] == (REPLICA, 15, (0,))
        said = reports(LOST, LOST, held(15), held(15))
        outcome = decided(said, self.LAYOUT, self.LOG, refused=refused)
        assert outcome.restores
        assert outcome.of(2).reason == "rank 1 refused REPLAY: bits differ"

    def test_a_refused_undo_or_roll_forward_is_gone_round(self) -> None:
        said = reports(applied(14), applied(14))
        assert ways(decided(said, mesh(1, 2))) == [(ROLL_FORWARD, 15)] * 2
        refused = Refusals().and_of([ROLL_FORWARD], "no")
        assert ways(decided(said, mesh(1, 2), refused=refused)) == [(UNDO, 14)] * 2
        refused = refused.and_of([UNDO], "nor that")
        assert refused.strategies == (ROLL_FORWARD, UNDO)
        outcome = decided(said, mesh(1, 2), refused=refused)
        assert outcome.restores
        assert outcome.of(0).reason == "nor that; no rank holds a state"

    def test_everything(self) -> None:
        refused = Refusals().and_everything("the log is in quarantine")
        assert refused.everything
        assert CHECKPOINT not in refused.strategies
        assert decided(reports(held(15), held(15)), mesh(1, 2), refused=refused).restores


def test_ranks_that_name_no_stage_are_planned_each_by_itself() -> None:
    assignment = Assignment.from_reports(num_stages=0, stages={0: (), 1: ()})
    outcome, _ = plan(reports(held(15), LOST), assignment, {}, AT_10, AUTO)
    assert outcome is not None
    assert ways(outcome) == [(KEEP, 15), (REPLAY, 10)]


class TestVacantSlots:
    """Three replicas of one stage, of which the middle one is vacant."""

    SMALLER = mesh(1, 3).held_by({0: 0, 2: 2})

    def said(self, *states: dict[str, object]) -> list[Report]:
        return [replace(report, rank=slot) for report, slot in zip(reports(*states), (0, 2), strict=True)]

    def test_the_others_go_on(self) -> None:
        outcome = decided(self.said(held(15), held(15)), self.SMALLER)
        assert [(r.rank, r.strategy) for r in outcome.ranks] == [(0, KEEP), (2, KEEP)]

    def test_copies_come_from_those_that_are_there(self) -> None:
        outcome = decided(self.said(LOST, held(15)), self.SMALLER)
        assert ways(outcome) == [(REPLICA, 15, (2,)), (KEEP, 15)]

    def test_nothing_is_replayed_without_what_is_missing(self) -> None:
        outcome = decided(self.said(half(14, exact=False), half(14, exact=False)), self.SMALLER)
        assert outcome.restores

    def test_a_replay_is_not_done_without_the_rank_that_took_part_the_first_time(self) -> None:
        outcome = decided(self.said(held(14), held(15)), self.SMALLER, config=PlanConfig(strategy="replay"))
        assert outcome.restores
        assert "a step cannot be replayed without rank 1" in outcome.reason

    def test_a_report_of_a_vacant_slot_does_not_fit(self) -> None:
        with pytest.raises(ValueError, match="one report of every slot that is held"):
            plan(reports(held(15), held(15), held(15)), self.SMALLER, {}, AT_10, AUTO)

    def test_a_stage_without_members_has_no_way_back(self) -> None:
        lost = mesh(2, 2).held_by({0: 0, 1: 1})
        assert plan(reports(held(15), held(15)), lost, {}, AT_10, AUTO) == (
            None,
            "no rank is left that runs stage 1",
        )


# --- properties ---


@settings(max_examples=200, deadline=None)
@given(grouped_situations())
def test_the_plan_is_the_one_that_there_is_for_recovery_groups(situation: Situation) -> None:
    check_is_the_one(situation)


@settings(max_examples=600, deadline=None)
@given(snapshot_situations())
def test_the_plan_is_the_one_that_there_is_for_snapshots(situation: Situation) -> None:
    check_is_the_one(situation)


@settings(max_examples=600, deadline=None)
@given(situations())
def test_the_plan_is_the_one_that_there_is(situation: Situation) -> None:
    check_is_the_one(situation)


def check_is_the_one(situation: Situation) -> None:
    outcome, reason = plan(*situation.arguments())
    wanted = expected(situation)
    event(f"{wanted.kind}{'' if wanted.exact else ', inexact'}")
    assert reason
    if outcome is None:
        assert wanted.kind == "none"
        return
    check_can_be_followed(situation, outcome)
    strategies = {r.strategy for r in outcome.ranks}
    replays = REPLAY in strategies or any(r.from_version < outcome.target_version for r in outcome.ranks)
    back = "snapshot" if Strategy.SNAPSHOT in strategies else "checkpoint"
    kind = back if outcome.restores else "replay" if replays else "direct"
    assert (kind, outcome.target_version, outcome.exact) == (wanted.kind, wanted.target, wanted.exact)
    event(", ".join(sorted(strategies)))
    if not outcome.restores:
        check_ways(situation, outcome)


@settings(max_examples=200, deadline=None)
@given(situations())
def test_the_order_of_what_is_said_does_not_matter(situation: Situation) -> None:
    said, assignment, log, *rest = situation.arguments()
    turned = Assignment.from_reports(
        num_stages=assignment.num_stages,
        stages=dict(reversed(list(assignment.stages.items()))),
        shards={n: slot.shard for n, slot in reversed(list(enumerate(assignment.slots)))},
    )
    again = plan(list(reversed(said)), turned, dict(reversed(log.items())), *rest)
    assert again == plan(said, assignment, log, *rest)

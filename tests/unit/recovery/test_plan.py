"""plan() for pipelines without replicas: the cases one by one. test_agreement.py has the replicas."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

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

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, *_ = Strategy


def reports(*versions: int | None) -> list[Report]:
    return [Report(rank=rank, version=version) for rank, version in enumerate(versions)]


def one_stage_each(ranks: int) -> Assignment:
    return Assignment.from_reports(num_stages=ranks, stages={rank: (rank,) for rank in range(ranks)})


def log(*summaries: StreamSummary) -> dict[str, StreamSummary]:
    return {summary.stream: summary for summary in summaries}


def stream(name: str, first: int, last: int, *, trimmed: int = 0, corrupt: bool = False) -> StreamSummary:
    return StreamSummary(
        stream=name,
        records=1 if last >= first else 0,
        first_step=first if last >= first else -1,
        last_step=last if last >= first else -1,
        trimmed_below_step=trimmed,
        corrupt=corrupt,
        reason="a checksum differs" if corrupt else "",
    )


def full_log(stages: Iterable[int], first: int, last: int) -> dict[str, StreamSummary]:
    return log(*(stream(f"s{stage}.{kind}", first, last) for stage in stages for kind in "FB"))


def decided(*arguments: object, **named: object) -> Plan:
    outcome, reason = plan(*arguments, **named)  # type: ignore[arg-type]
    assert outcome is not None, reason
    assert outcome.reason == reason
    return outcome


def strategies(outcome: Plan) -> list[tuple[Strategy, int]]:
    return [(r.strategy, r.from_version) for r in outcome.ranks]


AUTO = PlanConfig()
AT_10 = (0, 10)


def test_a_dead_middle_stage_is_replayed_from_its_neighbours_streams() -> None:
    outcome = decided(
        reports(15, None, 15),
        one_stage_each(3),
        log(stream("s0.F", 10, 14), stream("s2.B", 10, 14)),
        AT_10,
        AUTO,
    )
    assert outcome.target_version == 15
    assert strategies(outcome) == [(KEEP, 15), (REPLAY, 10), (KEEP, 15)]
    assert outcome.collective_source == -1
    assert outcome.reason == "target version 15: KEEP on ranks 0, 2; REPLAY on rank 1"
    assert "holds no state" in outcome.of(1).reason


def test_a_survivor_that_is_behind_catches_up() -> None:
    outcome = decided(
        reports(15, 14, None),
        one_stage_each(3),
        full_log(range(3), 10, 15),
        (10,),
        AUTO,
    )
    assert strategies(outcome) == [(KEEP, 15), (CATCH_UP, 14), (REPLAY, 10)]


def test_a_survivor_older_than_the_checkpoint_loads_it() -> None:
    outcome = decided(reports(15, 4), one_stage_each(2), full_log(range(2), 10, 15), AT_10, AUTO)
    assert strategies(outcome) == [(KEEP, 15), (REPLAY, 10)]


def test_nothing_is_replayed_if_the_checkpoint_is_the_target() -> None:
    outcome = decided(reports(10, None), one_stage_each(2), {}, AT_10, AUTO)
    assert strategies(outcome) == [(KEEP, 10), (REPLAY, 10)]


def test_all_that_hold_the_same_version_keep_it_even_without_a_checkpoint() -> None:
    outcome = decided(reports(3, 3), one_stage_each(2), {}, (), AUTO)
    assert strategies(outcome) == [(KEEP, 3), (KEEP, 3)]


def test_adjacent_stages_that_replay_together_need_each_other_only_before_their_start() -> None:
    # Stages 1 and 2 both replay from 10: s1.F and s2.B are generated again, and may be gone.
    outcome = decided(
        reports(15, None, None, 15),
        one_stage_each(4),
        log(stream("s0.F", 10, 14), stream("s3.B", 10, 14)),
        AT_10,
        AUTO,
    )
    assert strategies(outcome) == [(KEEP, 15), (REPLAY, 10), (REPLAY, 10), (KEEP, 15)]


@pytest.mark.parametrize(("last", "covered"), [(13, True), (12, False)])
def test_a_neighbour_that_catches_up_must_have_logged_what_is_before_its_version(
    last: int, covered: bool
) -> None:
    outcome = decided(
        reports(None, 14, 15),
        one_stage_each(3),
        log(stream("s1.B", 10, last), stream("s0.F", 14, 14), stream("s2.B", 14, 14)),
        AT_10,
        AUTO,
    )
    wanted = [(REPLAY, 10), (CATCH_UP, 14), (KEEP, 15)] if covered else [(CHECKPOINT, 10)] * 3
    assert strategies(outcome) == wanted


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (log(stream("s2.B", 10, 14)), "s0.F is empty, and step 10 is needed"),
        (log(stream("s0.F", 11, 14), stream("s2.B", 10, 14)), "s0.F begins at step 11"),
        (log(stream("s0.F", 12, 14, trimmed=12), stream("s2.B", 10, 14)), "s0.F is trimmed below step 12"),
        (log(stream("s0.F", 10, 14), stream("s2.B", 10, 13)), "s2.B ends at step 13, and step 14 is needed"),
        (log(stream("s0.F", 10, 14, corrupt=True), stream("s2.B", 10, 14)), "s0.F is corrupt (a checksum"),
        (
            log(stream("s0.F", 10, 14), stream("s2.B", 10, 14), stream("s1.F", 10, 13, corrupt=True)),
            "s1.F is corrupt",
        ),
        (
            log(stream("s0.F", 10, 14), stream("s2.B", 10, 14), stream("s1.X", 10, 13, corrupt=True)),
            "s1.X is corrupt",
        ),
    ],
)
def test_what_the_log_cannot_feed_falls_back_to_the_checkpoint(
    missing: dict[str, StreamSummary], why: str
) -> None:
    outcome = decided(reports(15, None, 15), one_stage_each(3), missing, AT_10, AUTO)
    assert strategies(outcome) == [(CHECKPOINT, 10)] * 3
    assert outcome.target_version == 10
    assert outcome.restores
    assert why in outcome.reason
    assert why in outcome.of(0).reason


def test_streams_that_nobody_replays_from_may_be_corrupt() -> None:
    outcome = decided(
        reports(15, None, 15),
        one_stage_each(3),
        log(stream("s0.F", 10, 14), stream("s2.B", 10, 14), stream("s0.X", 10, 14, corrupt=True)),
        AT_10,
        AUTO,
    )
    assert outcome.of(1).strategy is REPLAY


def test_stages_handed_over_inside_a_rank_need_no_stream() -> None:
    # V-schedule: rank 0 runs stages 0 and 3, rank 1 stages 1 and 2.
    assignment = Assignment.from_reports(num_stages=4, stages={0: (0, 3), 1: (1, 2)})
    outcome = decided(
        reports(15, None), assignment, log(stream("s0.F", 10, 14), stream("s3.B", 10, 14)), AT_10, AUTO
    )
    assert strategies(outcome) == [(KEEP, 15), (REPLAY, 10)]
    outcome = decided(
        reports(None, 15), assignment, log(stream("s2.F", 10, 14), stream("s1.B", 10, 13)), AT_10, AUTO
    )
    assert "s1.B ends at step 13" in outcome.reason


class TestCollectives:
    LOG = (stream("s0.F", 10, 14), stream("s2.B", 10, 14))

    def test_the_rank_that_has_been_there_longest_is_the_source(self) -> None:
        outcome = decided(
            [
                Report(rank=0, version=15, since_generation=3),
                Report(rank=1, version=None, since_generation=4),
                Report(rank=2, version=15, since_generation=1),
            ],
            one_stage_each(3),
            log(*self.LOG, stream("r0.C", 10, 14), stream("r1.C", 10, 14), stream("r2.C", 10, 14)),
            AT_10,
            AUTO,
        )
        assert outcome.collective_source == 2

    def test_a_source_that_does_not_cover_all_is_passed_over(self) -> None:
        outcome = decided(
            reports(15, None, 15),
            one_stage_each(3),
            log(*self.LOG, stream("r0.C", 10, 13), stream("r1.C", 10, 14), stream("r2.C", 10, 15)),
            AT_10,
            AUTO,
        )
        assert outcome.collective_source == 2

    @pytest.mark.parametrize(
        ("source", "why"),
        [
            (stream("r0.C", 11, 14), "r0.C begins at step 11"),
            (stream("r0.C", 10, 13), "r0.C ends at step 13"),
            (stream("r0.C", 10, 14, corrupt=True), "r0.C is corrupt"),
            (stream("r1.C", 10, 14), "none was logged"),
        ],
    )
    def test_without_one_everybody_restores(self, source: StreamSummary, why: str) -> None:
        outcome = decided(reports(15, None, 15), one_stage_each(3), log(*self.LOG, source), AT_10, AUTO)
        assert outcome.restores
        assert why in outcome.reason

    def test_it_must_reach_back_to_where_the_first_replay_begins(self) -> None:
        outcome = decided(
            reports(14, None, 15),
            one_stage_each(3),
            log(*full_log(range(3), 10, 14).values(), stream("r2.C", 12, 14)),
            AT_10,
            AUTO,
        )
        assert "r2.C begins at step 12, and step 10 is needed" in outcome.reason

    def test_none_is_needed_if_nobody_replays(self) -> None:
        outcome = decided(reports(10, None), one_stage_each(2), log(stream("r0.C", 0, 9)), AT_10, AUTO)
        assert outcome.collective_source == -1


@pytest.mark.parametrize(
    ("held", "config", "refused", "why"),
    [
        ((None, None), AUTO, "", "no rank holds a state"),
        ((15, None), AUTO, "rank 1 refused REPLAY: bits differ", "rank 1 refused REPLAY: bits differ"),
        ((15, 15), AUTO, "bits differ", "bits differ"),
        ((15, None), PlanConfig(strategy="checkpoint"), "", "the job is configured to restore checkpoints"),
        ((7, None), AUTO, "", "no complete checkpoint at version 7 or before for rank 1"),
    ],
)
def test_reasons_to_restore(held: tuple[int | None, ...], config: PlanConfig, refused: str, why: str) -> None:
    checkpoints = (10, 20) if held[0] == 7 else AT_10
    refusals = Refusals().and_everything(refused) if refused else Refusals()
    outcome = decided(
        reports(*held), one_stage_each(2), full_log(range(2), 0, 15), checkpoints, config, refusals
    )
    assert outcome.restores
    assert outcome.target_version == max(checkpoints)
    assert why in outcome.reason


def test_without_a_checkpoint_there_is_no_plan() -> None:
    outcome, reason = plan(reports(3, None), one_stage_each(2), {}, (), AUTO)
    assert outcome is None
    assert reason.endswith("there is no complete checkpoint to go back to")


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="one report of every slot"):
        plan(reports(3), one_stage_each(2), {}, AT_10, AUTO)
    with pytest.raises(ValueError, match="use one of auto, replica, replay, checkpoint"):
        PlanConfig(strategy="hope")


def lacking(name: str, first: int, last: int) -> StreamSummary:
    """Steps 10 to 14, and these were declared unlogged."""
    return replace(stream(name, 10, 14), unlogged=Steps(first, last))


@pytest.mark.parametrize("name", ["s0.F", "s2.B", "s1.F", "s1.B", "s1.X"])
def test_nothing_is_replayed_over_a_step_that_was_dropped(name: str) -> None:
    logged = {**full_log(range(3), 10, 14), "s1.X": stream("s1.X", 10, 14)}
    outcome = decided(
        reports(15, None, 15), one_stage_each(3), {**logged, name: lacking(name, 12, 13)}, AT_10, AUTO
    )
    assert outcome.restores
    assert outcome.target_version == 10
    assert outcome.reason == (
        "every rank restores the checkpoint of version 10: rank 1 cannot replay stage 1: records of "
        f"{name} in steps 12 to 13 are declared unlogged: dropped, as the log could not keep up, or lost with a "
        "process that a replica has replaced"
    )


@pytest.mark.parametrize("steps", [(3, 9), (9, 9), (15, 15), (15, 20)])
def test_a_dropped_step_that_a_replay_does_not_need_is_no_matter(steps: tuple[int, int]) -> None:
    """Before the checkpoint; or the one that was under way."""
    logged = {**full_log(range(3), 10, 14), "s0.F": lacking("s0.F", *steps)}
    outcome = decided(reports(15, None, 15), one_stage_each(3), logged, AT_10, AUTO)
    assert strategies(outcome) == [(Strategy.KEEP, 15), (Strategy.REPLAY, 10), (Strategy.KEEP, 15)]


@pytest.mark.parametrize("steps", [(3, 10), (10, 10), (14, 14), (14, 20)])
def test_the_first_and_the_last_step_of_a_replay_are_needed(steps: tuple[int, int]) -> None:
    logged = {**full_log(range(3), 10, 14), "s0.F": lacking("s0.F", *steps)}
    assert decided(reports(15, None, 15), one_stage_each(3), logged, AT_10, AUTO).restores


def test_collective_results_come_from_a_rank_that_has_dropped_none() -> None:
    logged = {**full_log(range(3), 10, 14), "r0.C": lacking("r0.C", 14, 14), "r2.C": stream("r2.C", 10, 14)}
    outcome = decided(reports(15, None, 15), one_stage_each(3), logged, AT_10, AUTO)
    assert outcome.collective_source == 2
    outcome = decided(
        reports(15, None, 15), one_stage_each(3), {**logged, "r2.C": lacking("r2.C", 14, 14)}, AT_10, AUTO
    )
    assert outcome.restores
    assert "records of r0.C in step 14 are declared unlogged" in outcome.reason

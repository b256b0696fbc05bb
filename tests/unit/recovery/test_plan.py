"""plan(): by transcripts (tests/golden/planner, read as `planned` says; `pytest --rewrite`, then review the diff), and
against all that could be planned, over random situations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import event, given, settings

from swift_ft.log.record import Steps
from swift_ft.planner import Assignment, PlanConfig, Refusals, Strategy, plan, without_log
from tests.unit.recovery.planned import full_log, mesh, reports, rerun, situation_of, stream
from tests.unit.recovery.situations import (
    Situation,
    check_can_be_followed,
    check_ways,
    expected,
    grouped_situations,
    situations,
    snapshot_situations,
)

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, *_ = Strategy
GOLDEN = Path(__file__).parents[2] / "golden" / "planner"
AT_10 = (0, 10)


@pytest.mark.parametrize("name", ["pipelines", "replicas", "groups", "help", "snapshots"])
def test_transcript(name: str, golden: Callable[[Path, str], None]) -> None:
    path = GOLDEN / f"{name}.txt"
    golden(path, rerun(path.read_text()))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="one report of every slot that is held"):
        plan(reports("3"), mesh(2), {}, AT_10, PlanConfig())
    with pytest.raises(ValueError, match="one report of every slot that is held"):
        plan(reports("15 15 15"), mesh(1, 3).held_by({0: 0, 2: 2}), {}, AT_10, PlanConfig())
    with pytest.raises(ValueError, match="use one of auto, replica, replay, checkpoint"):
        PlanConfig(strategy="hope")


@pytest.mark.parametrize(("records", "restores"), [(2, False), (3, True)])
def test_a_stream_of_nothing_but_marks_wants_no_source(records: int, restores: bool) -> None:
    marks = replace(stream("r0.C", 12, 14), records=records, unlogged=Steps(10, 14), marks=2)
    log = full_log(mesh(2, 2), 10, 14) | {"r0.C": marks}
    outcome, _ = plan(reports("15 - 15 15"), mesh(2, 2), log, AT_10, PlanConfig(strategy="replay"))
    assert outcome is not None
    assert outcome.restores == restores
    assert outcome.collective_source == -1


def test_refusals_add_up_and_never_hold_for_the_checkpoint() -> None:
    refused = Refusals().and_of([ROLL_FORWARD], "no").and_of([UNDO], "nor that")
    assert (refused.strategies, refused.reason) == ((ROLL_FORWARD, UNDO), "nor that")
    everything = Refusals().and_everything("the log is in quarantine")
    assert everything.everything
    assert CHECKPOINT not in everything.strategies


def test_ranks_that_name_no_stage_are_planned_each_by_itself() -> None:
    assignment = Assignment.from_reports(num_stages=0, stages={0: (), 1: ()})
    outcome, _ = plan(reports("15 -"), assignment, {}, AT_10, PlanConfig())
    assert outcome is not None
    assert [(r.strategy, r.from_version) for r in outcome.ranks] == [(KEEP, 15), (REPLAY, 10)]


def test_the_reason_does_not_grow_with_every_plan_of_a_recovery() -> None:
    situation = situation_of("4x1 strategy=snapshot checkpoints=0,5: 11s8 - - 11s8")
    first, reason = plan(*situation.arguments())
    assert first is not None
    refused = Refusals().and_everything(first.ranks[0].reason)
    assert plan(*replace(situation, refused=refused).arguments())[1] == reason


@pytest.mark.parametrize(
    ("said", "strategies", "exact"),
    [
        ("15 15 15", [KEEP] * 3, False),
        ("15 - 15", [KEEP, REPLAY, KEEP], False),  # it loads the checkpoint of that version
        ("17 - 17", [CHECKPOINT] * 3, True),
    ],
)
def test_nothing_is_read_of_a_log_that_is_given_up(
    said: str, strategies: list[Strategy], exact: bool
) -> None:
    situation = situation_of(f"3x1 checkpoints=5,15 helpers=2: {said} | 0-14")
    found, reason = without_log(partial(plan, *situation.arguments()[:-1]), Refusals())
    assert found is not None, reason
    assert found.reason == reason
    assert [r.strategy for r in found.ranks] == strategies
    assert (found.target_version, found.exact) == (15, exact)
    assert (found.reads_log, found.gives_up_log) == (False, True)
    ends = "the log does not lead to version 15, and begins anew"
    assert found.reason.endswith(ends) is not exact


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

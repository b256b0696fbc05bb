"""Verdicts of drills with replicas: each piece of evidence is broken or taken away once."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.lab.drill import report
from swift_ft.lab.drill.facts import Evidence, Facts
from swift_ft.lab.drill.report import FAIL, INCONCLUSIVE, PASS, corrupt_copy_check
from swift_ft.lab.drill.timeline import Recovery
from swift_ft.planner.groups import RecoveryGroups
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, STEPS, Trace, answers, judged
from tests.unit.drill.replica_evidence import (
    KILL,
    by_replica,
    by_undo,
    config,
    copied,
    digest,
    evidence,
    kept,
    losses,
    recovers,
    trace_of,
)
from tests.unit.drill.test_report import without

Events = list[dict[str, Any]]
ARITHMETIC = {"updates": "wait_free", "undo": "arithmetic"}


def test_a_copy_passes_with_nothing_replayed() -> None:
    result = judged(config(), evidence())
    assert json.loads(json.dumps(result)) == result
    assert result["exact"] is True
    shape = result["topology"]
    assert (shape["ranks"], shape["pipeline_ranks"], shape["replicas"]) == (4, 2, 2)
    assert shape["stages_of_rank"] == {"0": [0], "1": [0], "2": [1], "3": [1]}
    assert result["strategy"] == {"0": "keep", "1": "replica"}
    assert result["steps_replayed"] == 0
    assert result["microbatches_recomputed"] == 0
    assert result["bytes_copied"] == 4096
    assert result["recoveries"][0]["sources"] == {"3": [2]}
    assert result["recoveries"][0]["recovery_seconds"]["restore"] == pytest.approx(0.15)
    assert result["recoveries"][0]["recovery_seconds"]["replay"] == 0
    assert "replayed sends were verified" not in [check["name"] for check in result["checks"]]
    assert result["undo"]["exact"] is None


@pytest.mark.parametrize("field", ["parameters", "optimizer"])
def test_replicas_that_differ_fail_although_both_runs_agree(field: str) -> None:
    """Gradients that nobody reduces: the failure-free run is just as wrong."""
    good = evidence()
    ours, twin = copy.deepcopy(dict(good.digests)), copy.deepcopy(dict(good.twin.digests))
    for found in (ours, twin):
        found[f"rank3-v{STEPS}"][field] = "of its own"
    result = report.build(config(), evidence(digests=ours, twin=replace(good.twin, digests=twin)))
    assert result["bitwise_equal"] is True
    assert result["verdict"] == FAIL
    assert "ranks 2, 3 at the end" in result["reason"]


def test_dp_ranks_may_be_at_different_places_of_their_data() -> None:
    assert digest(2, 3)["data"] != digest(3, 3)["data"]
    assert answers(report.build(config(), evidence()))["replicas hold the same state"] is True


# Another strategy than the one that was to be expected.


def by_replay(trace: Trace) -> None:
    recovers(trace, kept() | dict.fromkeys((2, 3), ("REPLAY", CHECKPOINT)))
    for rank in (2, 3):
        trace.replay(rank, 2, CHECKPOINT, KILL_STEP)
    trace.state("RUNNING", 2, 0.02)


def test_a_replay_beside_a_living_replica_fails_unless_it_was_asked_for() -> None:
    found = evidence(trace_of(by_replay))
    result = judged(config(), found, FAIL)
    assert answers(result)["living replicas were used"] is False
    asked = judged(config(strategy="replay"), found)
    assert asked["strategy"] == {"0": "keep", "1": "replay"}
    assert asked["microbatches_recomputed"] == 2 * 4 * (KILL_STEP - CHECKPOINT)


def test_a_stage_without_a_living_rank_is_replayed() -> None:
    specs = (KILL, f"rank=2,step={KILL_STEP},phase=backward")
    judged(config(*specs), evidence(trace_of(by_replay, victims=(3, 2))))


@pytest.mark.parametrize(("strategy", "recover"), [("replay", by_replica), ("replica", by_replay)])
def test_a_strategy_that_was_not_asked_for_fails(strategy: str, recover: Callable[[Trace], None]) -> None:
    result = judged(config(strategy=strategy), evidence(trace_of(recover)), FAIL)
    assert answers(result)["the strategy was the one asked for"] is False


def test_what_a_superseded_generation_gave_is_still_how_it_came_back() -> None:
    """Rank 3 has its copy when rank 0 dies: in the plan that counts it keeps what it holds."""

    def recover(trace: Trace) -> None:
        recovers(trace, kept((3, "REPLICA")), sources={3: [2]})
        copied(trace)
        trace.rank(0, "fault", id="fault1", phase="copy", step=KILL_STEP, microbatch=0)
        trace.pids[0] = 300
        recovers(trace, kept((0, "REPLICA")), 3, sources={0: [1]})
        copied(trace, 3, joiner=0, source=1)
        trace.state("RUNNING", 3)

    result = judged(config(KILL, "rank=0,phase=copy"), evidence(trace_of(recover), generation=3))
    assert result["strategy"] == {"0": "replica", "1": "replica"}
    assert result["recoveries"][0]["sources"] == {"0": [1], "3": [2]}
    assert result["bytes_copied"] == 8192


# Undo and roll forward.


@pytest.mark.parametrize("mode", ["exact", "preimage"])
def test_an_exact_undo_passes_as_exact(mode: str) -> None:
    result = judged(config(updates="wait_free"), evidence(trace_of(by_undo(mode, True))))
    assert result["exact"] is True
    assert result["strategy"]["1"] == "replica"
    assert result["undo"]["mode"] == mode
    assert (result["undo"]["exact"], result["undo"]["ranks"], result["undo"]["buckets"]) == (True, [2], 3)


def test_an_undo_that_left_no_record_is_inconclusive() -> None:
    events = without("undone")(trace_of(by_undo("exact", True)).events)
    judged(config(updates="wait_free"), evidence(events=events), INCONCLUSIVE, "undone of rank 2")


def test_an_inexact_undo_that_nobody_asked_for_fails() -> None:
    result = judged(config(updates="wait_free"), evidence(trace_of(by_undo("arithmetic", False))), FAIL)
    assert answers(result)["updates were taken back as asked"] is False
    assert result["exact"] is False


def arithmetic(**changes: Any) -> Evidence:
    return evidence(trace_of(by_undo("arithmetic", False)), **changes)


def drifted(*versions: str) -> dict[str, dict[str, str]]:
    ours = copy.deepcopy(dict(evidence().digests))
    for name, found in ours.items():
        if any(name.endswith(version) for version in versions):
            found["parameters"] += " and some ulps"
            found["optimizer"] += " and some ulps"
    return ours  # type: ignore[return-value]


def test_an_arithmetic_undo_passes_by_its_loss_curve_and_says_so() -> None:
    found = arithmetic(digests=drifted(f"v{STEPS}", "-g2"))
    result = judged(
        config(**ARITHMETIC),
        found,
        PASS,
        "an arithmetic undo is not exact, so no bits are promised: at 0 of 2 places",
        "losses differ by 0.0e+00 of their size at most",
    )
    assert (result["exact"], result["bitwise_equal"], result["undo"]["exact"]) == (False, False, False)


def test_an_arithmetic_undo_is_not_exact_even_if_the_bits_agree() -> None:
    result = judged(config(**ARITHMETIC), arithmetic())
    assert (result["exact"], result["bitwise_equal"]) == (False, True)


def test_other_bits_without_an_arithmetic_undo_fail() -> None:
    judged(config(**ARITHMETIC), evidence(digests=drifted(f"v{STEPS}")), FAIL, "parameters")


@pytest.mark.parametrize("field", ["scheduler", "rng", "data"])
def test_an_arithmetic_undo_excuses_nothing_but_what_is_trained(field: str) -> None:
    ours = drifted(f"v{STEPS}")
    ours[f"rank1-v{STEPS}"][field] = "other"
    judged(config(**ARITHMETIC), arithmetic(digests=ours), FAIL, f"rank 1: {field} differ")


def test_an_arithmetic_undo_does_not_excuse_replicas_that_differ() -> None:
    ours = drifted(f"v{STEPS}")
    ours[f"rank2-v{STEPS}"]["parameters"] += " and some more"
    judged(config(**ARITHMETIC), arithmetic(digests=ours), FAIL)


def other_losses(change: Callable[[int, float], float]) -> Any:
    return {step: {c: change(step, value) for c, value in by.items()} for step, by in losses().items()}


@pytest.mark.parametrize(
    ("twin", "verdict"),
    [
        (other_losses(lambda step, value: value * 1.00009), PASS),
        (other_losses(lambda step, value: value * 0.9998), FAIL),
        (other_losses(lambda step, value: value * (1.0002 if step == STEPS - 1 else 1)), FAIL),
        (other_losses(lambda step, value: value * (1.0002 if step == KILL_STEP else 1)), FAIL),
        (other_losses(lambda step, value: 0.0 if step == 3 else value), INCONCLUSIVE),
        (other_losses(lambda step, value: float("nan") if step == 3 else value), FAIL),
        ({step: by for step, by in losses().items() if step != 3}, INCONCLUSIVE),
        ({step: {0: by[0]} for step, by in losses().items()}, INCONCLUSIVE),
        ({}, INCONCLUSIVE),
    ],
)
def test_the_loss_curve_decides_where_bits_may_differ(twin: Any, verdict: str) -> None:
    told = replace(evidence().twin, losses=twin)
    result = judged(config(**ARITHMETIC), arithmetic(twin=told), verdict)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    judged(config(updates="wait_free"), evidence(trace_of(by_undo("exact", True)), twin=told))


def test_losses_are_means_over_dp_ranks_of_the_last_time_a_step_was_done() -> None:
    trace = trace_of()
    trace.rank(2, "loss", step=STEPS - 1, dp_rank=0, loss=9.0)
    curve = report.build(config(), evidence(trace))["loss"]
    assert curve["steps"] == list(range(STEPS))
    assert curve["failure_free"][0] == 5.0625
    assert curve["recovered"][:-1] == curve["failure_free"][:-1]
    last = losses()[STEPS - 1]
    assert curve["recovered"][-1] == (9.0 + last[1]) / 2
    assert curve["largest_relative_difference"] == (9.0 - last[0]) / (last[0] + last[1])


def test_rolling_forward_loses_no_step() -> None:
    def recover(trace: Trace) -> None:
        forward = [(rank, "ROLL_FORWARD") for rank in (0, 1, 2)]
        strategies = kept((3, "REPLICA"), *forward, at=KILL_STEP + 1)
        recovers(trace, strategies, target=KILL_STEP + 1, sources={3: [2]})
        for rank in (0, 1, 2):
            trace.rank(rank, "roll_forward", generation=2, version=KILL_STEP + 1)
        copied(trace)
        trace.state("RUNNING", 2)

    trace = trace_of(recover, back_at=KILL_STEP + 1)
    result = judged(config(), evidence(trace, version=KILL_STEP + 1))
    assert result["strategy"] == {"0": "roll_forward", "1": "replica"}
    assert result["undo"]["rolled_forward"] == [0, 1, 2]
    assert result["steps_lost"] == 0
    events = without("roll_forward", rank=1)(trace.events)
    judged(config(), evidence(events=events, version=KILL_STEP + 1), INCONCLUSIVE)


def test_the_backends_order_is_named() -> None:
    shape = config().topology
    three = replace(config(), topology=replace(shape, replicas=3))
    assert config().exact_reduction
    assert three.exact_reduction, "auto is ordered from three on"
    assert not replace(three, reduction="fast").exact_reduction
    assert replace(three, data_parallel="ddp").exact_reduction
    assert replace(config(), reduction="fast").exact_reduction


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        (["flip", "received"], False),
        (["flip", "refusal of the log", "received"], False),
        (["flip", "refusal"], True),
        (["flip", "refusal", "another copy", "received"], True),
        (["flip"], None),
        (["flip", "another copy", "received"], None),
    ],
)
def test_a_corrupt_copy_must_be_refused_by_who_got_it(events: list[str], expected: bool | None) -> None:
    said = {
        "flip": {"event": "corrupted", "rank": 3, "byte": 7, "bit": 0},
        "received": {"event": "replica_received", "rank": 3},
        "another copy": {"event": "copy_begin", "rank": 3, "role": "joiner"},
        "refusal": {"event": "refused", "rank": 3, "reason": "what rank 3 received is not what it sent"},
        "refusal of the log": {"event": "refused", "rank": 3, "reason": "s1.F@4 is corrupt"},
    }
    assert corrupt_copy_check([said[event] for event in events]).answer is expected


@pytest.mark.parametrize(
    ("groups", "victims", "fine"),
    [("0-1", {2, 3}, True), ("0-1", {3}, False), ("", {2, 3}, False), ("0,1", {2, 3}, False)],
)
def test_who_is_lost_with_a_stage_that_nobody_holds_may_be_replayed(
    groups: str, victims: set[int], fine: bool
) -> None:
    recovery = Recovery(began_t=0.0, window=[{"event": "child_exit", "rank": rank} for rank in victims])
    recovery.planned[2] = {"ranks": [{"rank": rank, "strategy": "REPLAY"} for rank in range(4)]}
    given = config(groups=RecoveryGroups.parse(groups))
    facts = replace(Facts.of(given, evidence()), recoveries=[recovery])
    (check,) = [c for c in report.checks_of_replicas(facts) if c.name == "living replicas were used"]
    assert check.answer is fine

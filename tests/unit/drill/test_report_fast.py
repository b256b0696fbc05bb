"""A replay that was combined fast, in the report: named, judged by parameters and losses, counted where it was made."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swift.drill import difference, report
from swift.drill.report import Evidence
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, RANKS, STEPS, Trace, config, digests, good, kept

FAST = {"helpers": 2, "combine": "fast"}


def packed(*values: float) -> str:
    return array("f", values).tobytes().hex()


VALUES = [1.0, -2.0, 2.0, 4.0]  # norm 5
TWIN = packed(*VALUES)


def fast_trace(change: Callable[[Trace], None] = lambda trace: None) -> Trace:
    trace = Trace()
    trace.state("FORMING", 1)
    trace.state("RUNNING", 1)
    for step in range(KILL_STEP):
        trace.step(step)
    trace.kill(2, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    trace.state("PLANNING", 2, 0.03)
    trace.plan(2, KILL_STEP, kept())
    trace.events[-1] |= {
        "exact": False,
        "saves": True,
        "help": [{"owner": 2, "helpers": [1, 3], "until": KILL_STEP, "fast": True}],
    }
    trace.state("RECOVERING", 2, 0.04)
    for rank in range(RANKS):
        trace.rank(rank, "group_built", generation=2)
    begun = {"helpers": [1, 3], "shares": [2, 1, 1], "combine": "fast", "declined": {}}
    trace.rank(2, "help_begin", generation=2, until=KILL_STEP, **begun)
    trace.replay(2, 2, CHECKPOINT, KILL_STEP)
    trace.events[-1] |= {"exact": False, "shared_steps": KILL_STEP - CHECKPOINT}
    trace.state("FENCING", 3, 0.02, "the checkpoint is complete")
    trace.state("PLANNING", 3, 0.02)
    trace.plan(3, KILL_STEP, dict.fromkeys(range(RANKS), ("KEEP", KILL_STEP)))
    trace.events[-1] |= {"exact": False}
    trace.state("RECOVERING", 3, 0.02)
    change(trace)
    trace.state("RUNNING", 3, 0.02)
    for step in range(KILL_STEP, STEPS):
        trace.step(step)
    trace.finish()
    for event in [e for e in trace.events if e["event"] == "step_end" and not e.get("replay")]:
        if event["rank"] == RANKS - 1:
            trace.events.append({**event, "event": "loss", "column": 0, "loss": 2.0})
    trace.events.sort(key=lambda event: event["t"])
    return trace


def evidence(values: str | None = TWIN, trace: Trace | None = None, **changes: Any) -> Evidence:
    """`values`: of rank 2's parameters at the recovery and at the end."""
    plain = good()
    ours = digests((KILL_STEP, 3))
    for name in ours:
        mine = name.startswith("rank2")
        ours[name] = {**ours[name], "values": values if mine else TWIN}
        if mine:
            ours[name] |= {"parameters": "other", "optimizer": "other"}
        if mine and values is None:
            del ours[name]["values"]
    twin = {name: {**one, "values": TWIN} for name, one in plain.twin_digests.items()}
    losses = {step: {0: 2.0} for step in range(STEPS)}
    found = replace(
        plain, events=(trace or fast_trace()).events, digests=ours, twin_digests=twin, twin_losses=losses
    )
    return replace(found, **changes)


def answers(result: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["answer"] for check in result["checks"]}


def test_it_passes_without_being_exact() -> None:
    result = report.build(config(**FAST), evidence())
    assert result["verdict"] == "PASS", result["reason"]
    assert result["exact"] is False
    assert result["bitwise_equal"] is False
    assert "a replay was combined fast, which promises no bits" in result["reason"]
    assert answers(result)["parameters are close to the failure-free run's"] is True
    assert "values" not in str(result["digests"])


def test_the_replay_counts_although_a_generation_came_behind_it() -> None:
    result = report.build(config(**FAST), evidence())
    (recovery,) = result["recoveries"]
    assert recovery["generations"] == [2, 3]
    assert recovery["steps_replayed"] == KILL_STEP - CHECKPOINT
    assert recovery["verified_sends"] == 24
    assert recovery["strategy"]["2"] == "replay"
    assert [one["steps"] for one in recovery["shared_replays"]] == [KILL_STEP - CHECKPOINT]
    seconds = recovery["recovery_seconds"]
    assert seconds["replay"] > 0.3
    assert seconds["rejoin"] > 0.06  # with the generation in which the log begins anew
    assert "superseded" not in seconds


def test_and_so_it_does_if_that_generation_had_to_be_made_again() -> None:
    def again(trace: Trace) -> None:
        trace.state("FENCING", 4, 0.02, "rank 0 was killed by signal 9")
        trace.state("PLANNING", 4, 0.02)
        trace.plan(4, KILL_STEP, dict.fromkeys(range(RANKS), ("KEEP", KILL_STEP)))
        trace.events[-1] |= {"exact": False}
        trace.state("RECOVERING", 4, 0.02)

    found = evidence(trace=fast_trace(again))
    found = replace(found, digests={name.replace("-g3", "-g4"): one for name, one in found.digests.items()})
    (recovery,) = report.build(config(**FAST), found)["recoveries"]
    assert recovery["steps_replayed"] == KILL_STEP - CHECKPOINT


def test_nobody_who_did_not_allow_it_gets_it() -> None:
    result = report.build(config(helpers=2), evidence())
    assert result["verdict"] == "FAIL"
    assert "digests at version 8: rank 2: optimizer, parameters differ" in result["reason"]


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        (packed(1.0, -2.0, 2.0, 4.0004), True),
        (packed(1.0, -2.0, 2.0, 4.0006), False),
        (packed(1.0, -2.0, 2.0, float("nan")), False),
        (packed(1.0, -2.0), None),
        (None, None),
    ],
)
def test_parameters_decide(values: str | None, answer: bool | None) -> None:
    result = report.build(config(**FAST), evidence(values))
    assert answers(result)["parameters are close to the failure-free run's"] is answer
    assert result["verdict"] == {True: "PASS", False: "FAIL", None: "INCONCLUSIVE"}[answer]


def test_how_far_apart() -> None:
    result = report.build(config(**FAST), evidence(packed(1.0, -2.0, 2.0, 4.0004)))
    first = result["difference"]["at"][0]["ranks"]
    assert first["2"]["relative"] == pytest.approx(0.0004 / 5, rel=1e-2)
    assert first["2"]["largest"] == pytest.approx(0.0004 / 2.5, rel=1e-2)
    assert first["0"] == {"relative": 0.0, "largest": 0.0}
    assert result["difference"]["tolerance"] == difference.TOLERANCE


def test_a_fast_replay_that_was_given_up_leaves_nothing_inexact() -> None:
    """The last plan did it again, bit for bit."""

    def exactly(trace: Trace) -> None:
        trace.events = [e for e in trace.events if e.get("generation") != 3]
        trace.state("FENCING", 3, 0.02, "rank 3 refused")
        trace.state("PLANNING", 3, 0.02)
        trace.plan(3, KILL_STEP, kept())
        trace.events[-1] |= {"exact": True}
        trace.state("RECOVERING", 3, 0.02)
        trace.replay(2, 3, CHECKPOINT, KILL_STEP)

    found = evidence(trace=fast_trace(exactly))
    result = report.build(config(**FAST), found)
    assert result["verdict"] == "FAIL", "its digests differ here, and may not any more"
    result = report.build(config(**FAST), replace(found, digests=digests((KILL_STEP, 3))))
    assert result["verdict"] == "PASS", result["reason"]
    assert result["exact"] is True

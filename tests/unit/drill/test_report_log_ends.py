"""A recovery behind which the log begins anew, in a generation of its own: what made the state is counted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from swift_ft.lab.drill import report
from swift_ft.lab.drill.facts import Evidence
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, RANKS, Trace, config, digests, good, judged, kept


def trace_of(change: Callable[[Trace], None] = lambda trace: None) -> Trace:
    trace = Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    trace.state("PLANNING", 2, 0.03)
    trace.plan(2, KILL_STEP, kept())
    trace.events[-1] |= {"exact": False, "saves": True, "help": [{"owner": 2, "helpers": [1, 3]}]}
    trace.state("RECOVERING", 2, 0.04)
    for rank in range(RANKS):
        trace.rank(rank, "group_built", generation=2)
    begun = {"helpers": [1, 3], "shares": [2, 1, 1], "declined": {}}
    trace.rank(2, "help_begin", generation=2, until=KILL_STEP, **begun)
    trace.replay(2, 2, CHECKPOINT, KILL_STEP)
    trace.events[-1] |= {"shared_steps": KILL_STEP - CHECKPOINT}
    anew(trace, 3, "the checkpoint is complete")
    change(trace)
    trace.state("RUNNING", 3, 0.02)
    trace.end(KILL_STEP)
    return trace


def anew(trace: Trace, generation: int, reason: str) -> None:
    """All keep what they hold, and the log is emptied."""
    trace.state("FENCING", generation, 0.02, reason)
    trace.state("PLANNING", generation, 0.02)
    trace.plan(generation, KILL_STEP, dict.fromkeys(range(RANKS), ("KEEP", KILL_STEP)))
    trace.events[-1] |= {"exact": False}
    trace.state("RECOVERING", generation, 0.02)


def evidence(trace: Trace, generation: int = 3) -> Evidence:
    return replace(good(), events=trace.events, digests=digests((KILL_STEP, generation)))


@pytest.mark.parametrize("again", [False, True])
def test_the_replay_counts_although_a_generation_came_behind_it(again: bool) -> None:
    """Also if that one had to be made again."""

    def interrupted(trace: Trace) -> None:
        if again:
            anew(trace, 4, "rank 0 was killed by signal 9")

    found = evidence(trace_of(interrupted), generation=3 + again)
    (recovery,) = report.build(config(helpers=2), found)["recoveries"]
    assert recovery["generations"] == [2, 3, 4][: 2 + again]
    assert recovery["steps_replayed"] == KILL_STEP - CHECKPOINT
    assert recovery["verified_sends"] == 24
    assert recovery["strategy"]["2"] == "replay"
    assert [one["steps"] for one in recovery["shared_replays"]] == [KILL_STEP - CHECKPOINT]
    seconds = recovery["recovery_seconds"]
    assert seconds["replay"] > 0.3
    assert seconds["rejoin"] > 0.06  # with the generation in which the log begins anew
    assert "superseded" not in seconds


def test_nobody_who_did_not_allow_it_gets_other_bits() -> None:
    found = evidence(trace_of())
    other = {
        name: {**one, "parameters": "other"} if name.startswith("rank2") else one
        for name, one in found.digests.items()
    }
    judged(
        config(helpers=2),
        replace(found, digests=other),
        "FAIL",
        "digests at version 8: rank 2: parameters differ",
    )

"""A recovery behind which the log begins anew, in a generation of its own: what made the state is counted."""

from collections.abc import Callable
from typing import Any

import pytest

from swift_ft.lab.drill import report
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, RANKS, Trace, config, digests, good, judged, kept


def trace_of(change: Callable[[Trace], None] = lambda trace: None) -> Trace:
    trace = Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    plan: dict[str, Any] = {"exact": False, "saves": True, "help": [{"owner": 2, "helpers": [1, 3]}]}
    trace.recovers(2, KILL_STEP, kept(), **plan)
    for rank in range(RANKS):
        trace.rank(rank, "group_built", generation=2)
    begun: dict[str, Any] = {"helpers": [1, 3], "shares": [2, 1, 1], "declined": {}}
    trace.rank(2, "help_begin", generation=2, until=KILL_STEP, **begun)
    trace.replay(2, 2, CHECKPOINT, KILL_STEP)
    trace.events[-1] |= {"shared_steps": KILL_STEP - CHECKPOINT}
    anew(trace, 3, "the checkpoint is complete")
    change(trace)
    trace.state("RUNNING", 3, 0.02)
    return trace.end(KILL_STEP)


def anew(trace: Trace, generation: int, reason: str) -> None:
    """All keep what they hold, and the log is emptied."""
    keep = dict.fromkeys(range(RANKS), ("KEEP", KILL_STEP))
    trace.recovers(generation, KILL_STEP, keep, reason, exact=False)


@pytest.mark.parametrize("again", [False, True])
def test_the_replay_counts_although_a_generation_came_behind_it(again: bool) -> None:
    """Also if that one had to be made again."""

    def interrupted(trace: Trace) -> None:
        if again:
            anew(trace, 4, "rank 0 was killed by signal 9")

    found = good(trace_of(interrupted), digests=digests((KILL_STEP, 3 + again)))
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
    other = digests((KILL_STEP, 3))
    other[f"rank2-v{KILL_STEP}-g3"]["parameters"] = "other"
    said = "digests at version 8: rank 2: parameters differ"
    judged(config(helpers=2), good(trace_of(), digests=other), "FAIL", said)

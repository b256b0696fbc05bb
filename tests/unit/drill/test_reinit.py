"""The verdict of a drill of the strategy "reinit", and with its evidence broken."""

from collections.abc import Sequence
from typing import Any

from swift_ft.lab.drill import report
from swift_ft.lab.drill.report import FAIL, PASS
from tests.unit.drill.evidence import KILL_STEP, RANKS, Trace, config, digests, good

TARGET, VICTIM = 5, 2
SURVIVORS = [rank for rank in range(RANKS) if rank != VICTIM]


def trace_of(again: Sequence[int]) -> Trace:
    trace = Trace()
    trace.state("FORMING", 1)
    trace.state("RUNNING", 1)
    trace.add("coordinator", "checkpoint_complete", version=TARGET)
    for step in range(KILL_STEP):
        trace.step(step)
    trace.kill(VICTIM, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    for rank in again:
        trace.rank(rank, "reinit", seconds=0.05)
    trace.state("PLANNING", 2, 0.03)
    trace.plan(2, TARGET, dict.fromkeys(range(RANKS), ("CHECKPOINT", TARGET)))
    trace.state("RECOVERING", 2, 0.04)
    for rank in range(RANKS):
        trace.rank(rank, "restore_begin", generation=2)
        trace.rank(rank, "restore_end", generation=2, version=TARGET)
    trace.state("RUNNING", 2)
    trace.end(TARGET)
    return trace


def built(again: Sequence[int]) -> dict[str, Any]:
    found = good(digests=digests((TARGET, 2)), events=trace_of(again).events)
    return report.build(config(strategy="reinit"), found)


def test_all_survivors_began_again() -> None:
    result = built(SURVIVORS)
    assert result["verdict"] == PASS, result["reason"]
    assert result["exact"] is True
    assert [entry["rank"] for entry in result["reinit"]["begun_again"]] == SURVIVORS


def test_who_went_on_where_it_was_is_named() -> None:
    result = built(SURVIVORS[1:])
    assert result["verdict"] == FAIL
    assert f"recovery 1: rank {SURVIVORS[0]} went on where it was" in result["reason"]

"""Drills of the strategy "snapshot": what can be asked for, and its verdict with each piece of evidence broken."""

from collections.abc import Sequence
from typing import Any

from swift_ft.lab.drill import report
from swift_ft.lab.drill.report import FAIL, PASS
from tests.unit.drill.evidence import KILL_STEP, RANKS, STEPS, Trace, answers, config, digests, good

EVERY, TARGET, VICTIM = 3, 6, 2


def take(trace: Trace, version: int, ranks: Sequence[int] = range(RANKS)) -> None:
    for rank in ranks:
        trace.rank(
            rank,
            "snapshot_taken",
            version=version,
            digest=f"{rank}@{version}",
            kept_for=[(rank - 1) % RANKS],
            bytes=100,
            kept_bytes=110,
            copy_s=0.1,
            pass_s=0.2,
            seconds=0.3,
        )


def steps(trace: Trace, first: int, behind: int) -> None:
    for step in range(first, behind):
        trace.step(step)
        if (step + 1) % EVERY == 0:
            take(trace, step + 1)


def trace_of(target: int = TARGET, strategy: str = "SNAPSHOT") -> Trace:
    trace = Trace.begun(0)
    take(trace, 0)
    steps(trace, 0, KILL_STEP)
    trace.kill(VICTIM, KILL_STEP)
    trace.recovers(2, target, dict.fromkeys(range(RANKS), (strategy, target)))
    for rank in range(RANKS):
        where = {"generation": 2, "version": target}
        trace.rank(rank, "restore_begin", generation=2)
        source = (rank + 1) % RANKS if rank == VICTIM else rank
        if strategy == "SNAPSHOT":
            trace.rank(
                rank,
                "snapshot_restored",
                digest=f"{rank}@{target}",
                source=source,
                bytes=100,
                seconds=0.1,
                **where,
            )
        trace.rank(rank, "restore_end", **where)
    trace.state("RUNNING", 2)
    take(trace, target)
    steps(trace, target, STEPS)
    return trace.end(STEPS)


def built(trace: Trace, target: int = TARGET) -> dict[str, Any]:
    found = good(trace, digests=digests((target, 2)))
    return report.build(config(strategy="snapshot", snapshot_every=EVERY), found)


def test_all_went_back_to_the_newest_one() -> None:
    result = built(trace_of())
    assert result["verdict"] == PASS, result["reason"]
    assert result["exact"] is True
    assert result["steps_lost"] == KILL_STEP - TARGET
    shown = result["snapshot"]
    assert shown["every"] == EVERY
    assert shown["partners"] == {str(rank): [(rank + 1) % RANKS] for rank in range(RANKS)}
    assert {entry["rank"]: entry["source"] for entry in shown["restored"]} == {0: 0, 1: 1, 2: 3, 3: 3}


def test_an_older_one_is_not_enough() -> None:
    result = built(trace_of(target=3), 3)
    assert result["verdict"] == FAIL
    assert (
        "no more steps were lost than there are between snapshots: 5, with --snapshot-every 3"
        in result["reason"]
    )


def test_a_checkpoint_is_not_enough_while_one_is_whole() -> None:
    result = built(trace_of(target=5, strategy="CHECKPOINT"), 5)
    assert result["verdict"] == FAIL
    assert "fell back to a checkpoint" in result["reason"]


def test_a_newer_checkpoint_may_be_taken() -> None:
    result = built(trace_of(target=7, strategy="CHECKPOINT"), 7)
    assert result["verdict"] == PASS, result["reason"]


def test_a_checkpoint_stands_behind_if_its_keeper_is_lost_too() -> None:
    trace = trace_of(target=5, strategy="CHECKPOINT")
    (plan,) = (event for event in trace.events if event["event"] == "plan")
    plan["reason"] = "every rank restores the checkpoint of version 5: no snapshot of rank 2 is left"
    at = next(i for i, event in enumerate(trace.events) if event["event"] == "fault")
    trace.events.insert(at, {**trace.events[at], "rank": 3, "pid": 103, "who": "rank3"})
    assert answers(built(trace, 5))["the strategy was the one asked for"] is True


def test_other_strategies_have_no_section() -> None:
    assert report.build(config(), good())["snapshot"] is None

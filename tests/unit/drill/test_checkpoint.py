"""Drills of the strategies "checkpoint" and "reinit": the verdict with each piece of its evidence broken."""

from collections.abc import Sequence
from typing import Any

import pytest

from swift_ft.lab.drill import report
from swift_ft.lab.drill.report import FAIL, INCONCLUSIVE, PASS
from tests.unit.drill.evidence import RANKS, Trace, answers, carried_out, config, digests, good, judged

VICTIM, LOST, EVERY = 2, 8, 2
NEWER, OLDER = 6, 4
DAMAGED_RANK = 1
SPECS = (f"rank={VICTIM},step={LOST},microbatch=3", f"corrupt=checkpoint,rank={DAMAGED_RANK},step={LOST}")
CORRUPT = "checkpoint of version 6 is corrupt: a tensor is not what its checksum says"


def begun() -> Trace:
    """Until the loss."""
    trace = Trace.begun(0)
    for step in range(LOST):
        trace.step(step)
        if (step + 1) % EVERY == 0 and step + 1 < LOST:
            trace.add("coordinator", "checkpoint_complete", version=step + 1)
    trace.kill(VICTIM, LOST)
    return trace


def goes_back(trace: Trace, generation: int, target: int, reason: str, again: Sequence[int] = ()) -> None:
    """`again`: these begin their script again."""
    trace.recovers(generation, target, dict.fromkeys(range(RANKS), ("CHECKPOINT", target)), reason)
    for rank in again:
        trace.rank(rank, "reinit", seconds=0.05)


def ends(trace: Trace, generation: int, target: int) -> Trace:
    trace.restored(generation, target)
    trace.state("RUNNING", generation)
    return trace.end(target)


def restored(target: int = NEWER, again: Sequence[int] = ()) -> Trace:
    trace = begun()
    goes_back(trace, 2, target, "rank 2 died", again)
    return ends(trace, 2, target)


def refused(target: int = OLDER) -> Trace:
    """One rank does not load what all are to go back to."""
    trace = begun()
    goes_back(trace, 2, NEWER, "rank 2 died")
    trace.add("coordinator", "refused", rank=DAMAGED_RANK, reason=CORRUPT)
    goes_back(trace, 3, target, CORRUPT)
    return ends(trace, 3, target)


def flipped(trace: Trace) -> Trace:
    return carried_out(trace, "corrupted", rank=DAMAGED_RANK, version=NEWER, file="x", bit=7)


def built(
    trace: Trace, generation: int, target: int, *specs: str, strategy: str = "checkpoint"
) -> dict[str, Any]:
    return report.build(config(*specs, strategy=strategy), good(trace, digests=digests((target, generation))))


def test_all_went_back_to_the_newest_one() -> None:
    result = built(restored(), 2, NEWER)
    assert result["verdict"] == PASS, result["reason"]
    assert result["exact"] is True
    assert result["steps_lost"] == LOST - NEWER


def test_all_survivors_began_again() -> None:
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    result = built(restored(again=survivors), 2, NEWER, strategy="reinit")
    assert (result["verdict"], result["exact"]) == (PASS, True), result["reason"]
    assert [entry["rank"] for entry in result["reinit"]["begun_again"]] == survivors
    result = built(restored(again=survivors[1:]), 2, NEWER, strategy="reinit")
    assert result["verdict"] == FAIL
    assert f"recovery 1: rank {survivors[0]} went on where it was" in result["reason"]


@pytest.mark.parametrize("strategy", ["checkpoint", "reinit"])
def test_an_older_one_is_not_enough(strategy: str) -> None:
    result = built(restored(OLDER), 2, OLDER, strategy=strategy)
    assert result["verdict"] == FAIL
    assert "to version 4, and 6 was complete" in result["reason"]


def test_one_that_was_given_up_does_not_count_later() -> None:
    """All have gone back behind version 6; until it is saved again, 4 is the newest."""
    trace = begun()
    goes_back(trace, 2, NEWER, "rank 2 died")
    trace.add("coordinator", "refused", rank=DAMAGED_RANK, reason=CORRUPT)
    goes_back(trace, 3, OLDER, CORRUPT)
    trace.state("RUNNING", 3)
    goes_back(trace, 4, OLDER, "rank 2 died")
    result = built(ends(trace, 4, OLDER), 4, OLDER)
    assert answers(result)["all went back to the newest complete checkpoint"]


@pytest.mark.parametrize(
    ("spec", "verdict"),
    [("service=logserver,step=3", PASS), (SPECS[0], INCONCLUSIVE)],
    ids=["none was lost", "lost"],
)
def test_where_nobody_went_back(spec: str, verdict: str) -> None:
    trace = carried_out(Trace.begun(3), "service_killed", "fault0", service="logserver").end(3)
    judged(config(spec, strategy="checkpoint"), good(trace, digests=digests()), verdict)


def test_a_replay_is_not_what_was_asked_for() -> None:
    judged(config(strategy="checkpoint"), good(), FAIL)


def test_a_damaged_one_leads_to_the_one_before() -> None:
    result = built(flipped(refused()), 3, OLDER, *SPECS)
    assert result["verdict"] == PASS, result["reason"]
    assert CORRUPT in result["reason"]


@pytest.mark.parametrize(
    ("trace", "generation", "target", "why"),
    [
        (restored(), 2, NEWER, "the flipped bit was loaded"),
        (refused(NEWER), 3, NEWER, "the flipped bit was loaded"),
        (refused(2), 3, 2, "to version 2, and 4 was complete"),
    ],
    ids=["nobody refused it", "it was taken all the same", "the one before was left out"],
)
def test_a_damaged_one_that_was_not_noticed_fails(
    trace: Trace, generation: int, target: int, why: str
) -> None:
    result = built(flipped(trace), generation, target, *SPECS)
    assert result["verdict"] == FAIL
    assert why in result["reason"]


def test_another_ranks_refusal_is_no_notice() -> None:
    trace = flipped(refused())
    for event in trace.events:
        if event["event"] == "refused":
            event["rank"] = 0
    result = built(trace, 3, OLDER, *SPECS)
    assert result["verdict"] == FAIL


def test_a_bit_that_was_never_flipped_is_inconclusive() -> None:
    result = built(refused(), 3, OLDER, *SPECS)
    assert result["verdict"] == INCONCLUSIVE

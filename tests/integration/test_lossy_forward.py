"""Jobs of replicas that finish a step that a loss has cut short: real processes, real SIGKILL.

What the bits must be is computed by plain torch in one process, which knows nothing of the session but what became of
each bucket of the step that was cut short.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shrinking_world import LOST, RANKS, last_bits, named, reference, run
from tests.integration.trainer_world import Run

pytestmark = pytest.mark.timeout(240)

STEP = 6


LEFT = [rank for rank in range(RANKS) if rank != LOST]


def fault(phase: str, *beside: int) -> dict[str, Any]:
    """`beside`: these have come as far when the rank dies."""
    return {"rank": LOST, "step": STEP, "phase": phase, "beside": list(beside)}


def lossy(directory: Path, *faults: dict[str, Any], habit: str = "asks", max_restarts: int = 0) -> Run:
    return run(directory, "drop", list(faults), max_restarts, habit, strategy="lossy-forward")


def buckets(outcome: Run) -> dict[int, list[dict[str, Any]]]:
    """Step -> what all that finished it say of its buckets."""
    told: dict[int, list[dict[str, Any]]] = {}
    for event in named(outcome, "lossy_step"):
        assert told.setdefault(event["step"], event["buckets"]) == event["buckets"], "survivors differ"
    return told


def contributors(outcome: Run, step: int = STEP) -> list[tuple[int, ...]]:
    """Of each bucket; divided by their number."""
    told = buckets(outcome)[step]
    assert all(bucket["divisor"] == len(bucket["contributors"]) for bucket in told)
    return [tuple(bucket["contributors"]) for bucket in told]


def compared(outcome: Run, directory: Path, *left: int) -> None:
    """Every step of every rank has the bits of a calculation by those that contributed to each bucket."""
    cut = directory / "cut.json"
    cut.write_text(json.dumps(buckets(outcome)))
    lost = [
        f"{plan['target_version']}:{rank}"
        for plan, rank in zip(
            sorted(named(outcome, "plan"), key=lambda plan: plan["t"]),
            [e["rank"] for e in sorted(named(outcome, "left_vacant"), key=lambda e: e["t"])],
            strict=False,
        )
    ]
    wanted = reference(directory, *lost, str(cut))
    for rank in left:
        assert last_bits(outcome, rank, wanted)


def test_who_computes_when_the_notice_comes_joins_the_others_in_the_step(tmp_path: Path) -> None:
    """Rank 0 has not begun to compute when rank 1 dies. What it would log is not taken by then."""
    outcome = lossy(tmp_path, fault("reduce", 2), habit="late")

    compared(outcome, tmp_path, *LEFT)
    (plan,) = named(outcome, "plan")
    assert plan["target_version"] == STEP + 1
    assert set(contributors(outcome)) == {(0, 2)}, "nothing could be averaged before it had computed"


def test_whoever_has_not_heard_of_an_average_is_given_it(tmp_path: Path) -> None:
    """All had the first one when rank 1 died, but rank 2."""
    outcome = lossy(tmp_path, habit="deaf")

    compared(outcome, tmp_path, *LEFT)
    (plan,) = named(outcome, "plan")
    assert plan["target_version"] == STEP + 1
    first, *others = contributors(outcome)
    assert first == (0, 1, 2)
    assert set(others) <= {(0, 1, 2), (0, 2)}

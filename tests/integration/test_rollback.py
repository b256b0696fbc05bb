"""Jobs of replicas that take an interrupted step back and do it again without the lost rank: real processes, SIGKILL.

What the bits must be is computed by plain torch in one process, which knows nothing of the session.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.shrinking_world import LOST, RANKS, STEPS, last_bits, named, pids, reference, run

MATRIX = pytest.mark.matrix
STEP = 6
SURVIVORS = [rank for rank in range(RANKS) if rank != LOST]


def strategies(plan: dict[str, Any]) -> dict[int, str]:
    return {entry["rank"]: entry["strategy"].upper() for entry in plan["ranks"]}


def fault(phase: str, rank: int = LOST, step: int = STEP) -> dict[str, Any]:
    return {"rank": rank, "step": step, "phase": phase}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("phase", ["reduce", *(pytest.param(p, marks=MATRIX) for p in ("idle", "optimizer"))])
def test_the_step_is_done_again_with_the_lost_batches(phase: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, "redistribute", [fault(phase)], strategy="rollback")

    (plan,) = named(outcome, "plan")
    assert not named(outcome, "not_exact")
    assert {e["origin"] for e in named(outcome, "adopted_step")} == {LOST}
    assert min(e["step"] for e in named(outcome, "adopted_step")) == plan["target_version"]
    wanted = reference()
    for rank in SURVIVORS:
        assert len(pids(outcome, rank)) == 1, "survivors keep their processes"
        assert last_bits(outcome, rank, wanted)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("phase", ["optimizer", pytest.param("update", marks=MATRIX)])
def test_what_is_applied_is_taken_back_also_where_the_step_could_be_finished(
    phase: str, tmp_path: Path
) -> None:
    """The lost rank has applied all of its buckets, or half of them, and the others as many as they could."""
    outcome = run(tmp_path, "drop", [fault(phase)], habit="hasty", strategy="rollback")

    (plan,) = named(outcome, "plan")
    assert plan["target_version"] == STEP
    assert set(strategies(plan).values()) <= {"KEEP", "UNDO"}
    assert not named(outcome, "roll_forward")
    if phase == "optimizer":
        reports = [e for e in named(outcome, "reported") if e["generation"] == plan["generation"]]
        assert any(report["forward_to"] == STEP + 1 for report in reports), "nobody could have finished it"
        assert set(strategies(plan).values()) == {"UNDO"}
        assert all(undone["exact"] for undone in named(outcome, "undone"))
    wanted = reference(f"{STEP}:{LOST}")
    assert wanted != reference()
    for rank in SURVIVORS:
        assert last_bits(outcome, rank, wanted)


@MATRIX
@pytest.mark.timeout(240)
def test_two_are_lost_one_after_the_other_and_both_come_back(tmp_path: Path) -> None:
    faults = [fault("reduce", rank=1, step=4), fault("reduce", rank=0, step=9)]
    outcome = run(tmp_path, "redistribute", faults, max_restarts=2, habit="waits", strategy="rollback")

    wanted = reference()
    assert not named(outcome, "not_exact")
    for rank in range(RANKS):
        assert last_bits(outcome, rank, wanted)
    assert max(e["step"] for e in named(outcome, "step_end")) == STEPS - 1

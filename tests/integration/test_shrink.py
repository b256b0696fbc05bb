"""Jobs of replicas that go on without a rank, and with it again (trainers/shrinking.py): real processes, real SIGKILL.

What the bits must be is computed by plain torch in one process, which knows nothing of the session.
"""

import json
from pathlib import Path

import pytest

from tests.integration.again_world import Again
from tests.integration.shrinking_world import (
    LOST,
    RANKS,
    STEPS,
    last_bits,
    named,
    pids,
    reference,
    run,
    shrinking,
)
from tests.integration.trainer_world import run_trainer

pytestmark = pytest.mark.timeout(240)


def test_the_others_compute_its_batches_and_the_bits_are_those_of_a_run_that_never_failed(
    tmp_path: Path,
) -> None:
    outcome = run(tmp_path, "redistribute", [{"rank": LOST, "step": 6, "phase": "reduce"}], habit="loader")

    assert [e["rank"] for e in named(outcome, "left_vacant")] == [LOST]
    assert not named(outcome, "not_exact")
    assert {e["origin"] for e in named(outcome, "adopted_step")} == {LOST}
    wanted = reference()
    for rank in (0, 2):
        assert len(pids(outcome, rank)) == 1, "survivors keep their processes"
        assert last_bits(outcome, rank, wanted)
    assert named(outcome, "state")[-1]["state"] == "FINISHED"


def test_its_batches_come_from_its_own_iterators_of_torchs_loaders(tmp_path: Path) -> None:
    """Across the end of an epoch. What another rank makes in its place has its order and its numbers."""
    never = run(tmp_path / "never", "redistribute", [], habit="plain")
    outcome = run(tmp_path, "redistribute", [{"rank": LOST, "step": 5, "phase": "reduce"}], habit="plain")

    assert {e["origin"] for e in named(outcome, "adopted_step")} == {LOST}
    assert not named(outcome, "not_exact")
    for rank in (0, 2):
        assert last_bits(outcome, rank, never["digests"][f"bits-{rank}.json"])


@pytest.mark.matrix
def test_what_is_done_again_in_the_full_world_is_not_compared_with_what_was_logged_without_it(
    tmp_path: Path,
) -> None:
    """The step that its return interrupts has a collective, which has another result then."""
    faults = [{"rank": LOST, "step": 6, "phase": "reduce"}]
    outcome = run(tmp_path, "drop", faults, max_restarts=1, habit="lingers")

    assert not named(outcome, "refused")
    assert [len(pids(outcome, rank)) for rank in range(RANKS)] == [1, 2, 1]
    assert len({outcome["digests"][f"rank{rank}-v{STEPS}.json"]["parameters"] for rank in range(RANKS)}) == 1


def test_without_its_batches_the_mean_is_over_those_that_are_left(tmp_path: Path) -> None:
    outcome = run(tmp_path, "drop", [{"rank": LOST, "step": 6, "phase": "reduce"}])

    (plan,) = named(outcome, "plan")
    assert [entry["rank"] for entry in plan["ranks"]] == [0, 2]
    (inexact,) = named(outcome, "not_exact")
    assert inexact["since"] == plan["target_version"]
    assert "the slot of rank 1 is vacant, and nobody computes its batches" in inexact["reason"]
    complete = [e["version"] for e in named(outcome, "checkpoint_complete")]
    assert {plan["target_version"], 8, 12, STEPS} <= set(complete)
    wanted = reference(f"{plan['target_version']}:{LOST}")
    assert wanted != reference()
    for rank in (0, 2):
        assert last_bits(outcome, rank, wanted)


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (
            "knows",
            "data-parallel rank 0 has computed other gradients for the batch of rank 1 than rank 1 itself",
        ),
        ("talks", "a train_step that communicates before its gradients are reduced"),
    ],
)
def test_what_nobody_could_do_for_another_rank_is_refused_at_the_start(
    habit: str, words: str, tmp_path: Path
) -> None:
    job, settings = ("shrinking.py", "session", STEPS, habit), shrinking("redistribute")
    refused = run_trainer(tmp_path / "job", *job, ranks=RANKS, faults=[], code_wanted=2, settings=settings)
    assert words in refused["output"]
    assert not named(refused, "step_end")


def test_a_job_that_was_left_smaller_can_be_started_again_in_full(tmp_path: Path) -> None:
    """It has finished without rank 1, and goes on with it: that one loads the part of a replica."""
    fault = {"id": "f0", "rank": LOST, "step": 5, "phase": "reduce"}
    settings = {"SWIFT_STRATEGY": "shrink", "SWIFT_FAULTS": json.dumps([fault])}
    with Again(tmp_path / "job", ranks=RANKS, **settings) as job:
        assert job.run("shrinking.py", "session", 8, flags=["--max-restarts", "0"]) == 0, job.said
        assert [e["rank"] for e in job.events("left_vacant")] == [LOST]
        assert job.run("shrinking.py", "session", STEPS) == 0, job.said
        assert not job.events("not_exact")
        wanted = reference()
        for rank in range(RANKS):
            bits = json.loads((job.directory / "digests" / f"bits-{rank}.json").read_text())
            assert set(bits) == {str(step) for step in range(8, STEPS)}
            assert bits.items() <= wanted.items()


@pytest.mark.matrix
def test_where_all_are_lost_the_launcher_says_how_to_go_on(tmp_path: Path) -> None:
    faults = [
        {"id": f"f{rank}", "rank": rank, "step": 5 + n, "phase": "reduce"} for n, rank in enumerate((1, 2, 0))
    ]
    settings = {"SWIFT_STRATEGY": "shrink", "SWIFT_FAULTS": json.dumps(faults)}
    with Again(tmp_path / "job", ranks=RANKS, **settings) as job:
        assert job.run("shrinking.py", "session", STEPS, flags=["--max-restarts", "0"]) == 1, job.said
        assert (
            "no rank is left on this machine: the same command goes on from the newest checkpoint" in job.said
        )
        assert job.run("shrinking.py", "session", STEPS) == 0, job.said
        assert not job.events("not_exact")
        wanted = reference()
        for rank in range(RANKS):
            bits = json.loads((job.directory / "digests" / f"bits-{rank}.json").read_text())
            assert str(STEPS - 1) in bits
            assert bits.items() <= wanted.items()

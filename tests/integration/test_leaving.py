"""SIGTERM of `swift-ft run`, and losses that are not finite: real services, launcher and ranks, every bit compared."""

import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.again_world import Again

pytestmark = pytest.mark.timeout(240)
STEPS = 48
MEETS_SIGTERM = (
    # The checkpoint is agreed on for a version that nobody is past, by the pace of the steps: so this one is soon.
    {"rank": 0, "what": "slow", "times": STEPS},
    {"rank": 0, "step": 5, "what": "terminate"},
)
NAN = {"rank": 1, "step": 7, "what": "nan"}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The digests at the end of a run in which nothing happens, and what it has logged."""
    with Again(tmp_path_factory.mktemp("twin")) as job:
        assert job.unlucky(STEPS) == 0, job.said
        return job.digests(STEPS), job.lines()


def test_sigterm_makes_a_checkpoint_with_which_the_same_command_goes_on(
    twin: tuple[Any, Any], tmp_path: Path
) -> None:
    with Again(tmp_path) as job:
        leave = ["--sigterm-checkpoint-s", "120"]
        code = job.unlucky(STEPS, *MEETS_SIGTERM, every=100, flags=leave)
        assert code == 128 + signal.SIGTERM, job.said
        assert "SIGTERM: a checkpoint is made first" in job.said
        status = job.status()
        assert "STOPPED" in status
        found = re.search(
            r"newest checkpoint: version (\d+); started again it goes on at step (\d+)$", status, re.M
        )
        assert found, status
        version = int(found[1])
        assert int(found[2]) == version
        assert 5 < version < STEPS
        before = {event["pid"] for event in job.events("step_begin")}

        assert job.unlucky(STEPS, *MEETS_SIGTERM, every=100, flags=leave) == 0, job.said
        steps = defaultdict(list)
        for event in job.events("step_begin"):
            if event["pid"] not in before:
                steps[event["pid"]].append(event["step"])
        assert list(steps.values()) == [list(range(version, STEPS))] * 2
        assert "FINISHED" in job.status()
        assert (job.digests(STEPS), job.lines()) == twin
    assert all([line["step"] for line in lines] == list(range(STEPS)) for lines in twin[1])


def test_a_loss_that_is_not_finite_is_said_and_training_goes_on(tmp_path: Path) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, NAN) == 0, job.said
        said = [line for line in job.said.splitlines() if line.startswith("swift: rank 1: the loss of ")]
        assert len(said) == 1, job.said
        assert "of step 7 is nan; training goes on (non_finite_loss='fail' ends the job)" in said[0]
        (event,) = job.events("non_finite_loss")
        assert (event["rank"], event["step"]) == (1, 7)


def test_a_loss_that_is_not_finite_ends_the_job_which_goes_on_from_before_it(
    twin: tuple[Any, Any], tmp_path: Path
) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, NAN, non_finite_loss="fail") == 1
        assert "of step 7 is nan" in job.said
        assert "Traceback" not in job.said
        assert "FAILED" in (status := job.status())
        assert "started again it goes on at step 5" in status
        assert job.unlucky(STEPS, NAN, non_finite_loss="fail") == 0, job.said
        assert (job.digests(STEPS), job.lines()) == twin

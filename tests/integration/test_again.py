"""Jobs that end and are started again, and what happens to trainers in between: real processes, every bit compared."""

from pathlib import Path

import pytest

from tests.integration.again_world import Again

pytestmark = pytest.mark.timeout(240)
STEPS = 12


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The digests at the end of a run in which nothing happens."""
    with Again(tmp_path_factory.mktemp("twin")) as job:
        assert job.unlucky(STEPS) == 0, job.said
        return job.digests(STEPS)


@pytest.mark.matrix
def test_a_reset_connection_between_living_ranks_costs_a_generation(
    twin: list[dict[str, object]], tmp_path: Path
) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, {"rank": 1, "step": 7, "what": "reset"}) == 0, job.said
        assert "connections reset" in job.said
        (plan,) = job.events("plan")
        assert plan["exact"] is True
        assert job.digests(STEPS) == twin


def test_a_job_that_failed_goes_on_where_it_was(twin: list[dict[str, object]], tmp_path: Path) -> None:
    """Although its script has another learning rate by then: each stage says that this is not used."""
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, {"rank": 1, "step": 7, "what": "raise"}) == 1
        assert "ValueError: boom" in job.said
        assert job.unlucky(STEPS, rate=0.02) == 0, job.said
        told = "goes on: lr=0.01 of optimizer 0 (AdamW), not 0.02; to change them, set them in train_step"
        assert job.said.count(told) == 2, job.said
        steps = [event["step"] for event in job.events("step_begin")]
        assert steps.count(0) == 2  # of two ranks, once
        assert job.digests(STEPS) == twin


def test_a_rank_that_dies_behind_the_end_does_what_comes_behind_it_again(
    twin: list[dict[str, object]], tmp_path: Path
) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, {"rank": 1, "at": "after", "what": "kill"}) == 0, job.said
        assert job.digests(STEPS) == twin
        for rank in range(2):
            assert (job.directory / f"saved{rank}").read_text().startswith(f"{STEPS} ")


@pytest.mark.parametrize(("times", "code"), [(2, 0), pytest.param(4, 1, marks=pytest.mark.matrix)])
def test_an_exception_is_tried_again_as_often_as_the_trainer_allows(
    times: int, code: int, twin: list[dict[str, object]], tmp_path: Path
) -> None:
    mishap = {"rank": 1, "step": 7, "what": "raise other", "times": times}
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, mishap, flags=["--retry-exceptions", "3"]) == code, job.said
        if code == 0:
            assert job.digests(STEPS) == twin
        else:
            assert "ValueError: boom no. 3" in job.said


@pytest.mark.matrix
def test_the_same_exception_twice_at_a_step_ends_the_job_with_it(tmp_path: Path) -> None:
    mishap = {"rank": 1, "step": 7, "what": "raise", "times": 9}
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, mishap, flags=["--retry-exceptions", "3"]) == 1
        assert len((job.directory / "mishap0").read_text()) == 2
        assert "ValueError: boom" in job.said


@pytest.mark.matrix
def test_a_death_while_the_job_forms_is_a_death_like_any_other(
    twin: list[dict[str, object]], tmp_path: Path
) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, {"rank": 1, "at": "made", "what": "kill"}) == 0, job.said
        assert job.digests(STEPS) == twin


def test_the_end_of_a_run_outlives_the_rank_that_has_called_it(
    twin: list[dict[str, object]], tmp_path: Path
) -> None:
    """It is killed once the coordinator has heard of it, and before anybody else is through."""
    stops = {"rank": 1, "step": 6, "what": "stop", "times": 99}
    dies = {"rank": 1, "step": 6, "what": "die with the word"}
    with Again(tmp_path) as job:
        assert job.unlucky(10, stops, dies) == 0, job.said
        assert "killed by SIGKILL: replaced" in job.said
        assert "stopped at step 6: enough" in job.status()
        stopped = "stopped at step 6: enough; with more than 10 steps it goes on"
        assert job.said.splitlines()[-1] == f"swift: job drill: {stopped}"
        ended = job.digests(7), job.lines()

        begun = len(job.events("step_begin"))
        assert job.unlucky(10, stops, dies) == 0, job.said
        assert job.said.splitlines()[-1] == f"swift: job drill: {stopped}"
        assert (job.digests(7), job.lines()) == ended
        assert len(job.events("step_begin")) == begun

        assert job.unlucky(STEPS) == 0, job.said
        assert job.digests(STEPS) == twin
        assert [[line["step"] for line in lines] for lines in job.lines()] == [list(range(STEPS))] * 2

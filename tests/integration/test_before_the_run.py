"""Collectives before `session.run`: a rank is lost in between, or later; all have the same results in the end."""

from ast import literal_eval
from pathlib import Path

import pytest

from tests.integration.trainer_world import run_trainer

pytestmark = pytest.mark.timeout(300)

PLACES = ("first", "between", "object", "reduce1", "reduce2", "last", "step")


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        pytest.param(
            victim, place, marks=[] if (victim, place) in ((1, "object"), (0, "step")) else pytest.mark.matrix
        )
        for victim in (0, 1, 2)
        for place in PLACES
    ],
)
def test_all_have_the_same_whoever_is_lost(victim: int, place: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run_trainer(
        tmp_path, "before_the_run.py", 6, tmp_path / "out", victim, place, ranks=4, faults=[], spares=1
    )
    assert (tmp_path / "out" / "died").exists()
    seeds, words, gathered = zip(
        *(literal_eval((tmp_path / "out" / f"end{rank}").read_text()) for rank in range(4)), strict=True
    )
    assert len(set(seeds)) == 1
    assert words[0] == words[1] != words[2] == words[3]
    assert all(each == gathered[0] for each in gathered)
    assert [each["word"] for each in gathered[0]] == [word for (word,) in words]


@pytest.mark.matrix
def test_parameters_that_are_lost_before_there_is_a_state_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    found = run_trainer(
        tmp_path,
        "before_the_run.py",
        6,
        tmp_path / "out",
        1,
        "large",
        ranks=4,
        faults=[],
        spares=1,
        code_wanted=3,
    )
    assert (
        "a rank was lost before the job had begun, and rank 1 cannot get what dist.broadcast gives it"
        in found["output"]
    )

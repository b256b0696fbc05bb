"""Drills in which the place of a lost rank is not fit at first (`--unfit`)."""

from pathlib import Path

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed

pytestmark = pytest.mark.timeout(300)


def test_the_replacement_comes_once_the_place_is_fit(twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "2", "--replicas", "1", "--unfit", "rank=1"]
    report = passed(drill(*words, *kills("rank=1,step=7,phase=backward"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert [check["fit"] for check in report["gate"]["checks"]] == [False, True]
    assert "failure 1 of 1" in report["gate"]["checks"][0]["reason"]


@pytest.mark.matrix
def test_the_others_go_on_without_a_place_that_is_never_fit(twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "1", "--replicas", "2", "--strategy", "shrink", "--unfit", "rank=1,times=6"]
    report = passed(drill(*words, *kills("rank=1,step=7,phase=reduce"), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert report["gate"]["used"] is False
    assert not any(check["fit"] for check in report["gate"]["checks"])

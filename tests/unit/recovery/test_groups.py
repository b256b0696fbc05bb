"""Recovery groups: their text. `tests/golden/planner/groups.txt` has plans that rebuild a group as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.planner import RecoveryGroups

PAIRS = RecoveryGroups.parse("0-1,2-3")


class TestText:
    @pytest.mark.parametrize("text", ["", "0", "0-3", "0-1,2-3", "0,1-2,3", "0,1,2,3"])
    def test_it_comes_back_as_it_went_in(self, text: str) -> None:
        assert str(RecoveryGroups.parse(text)) == text

    def test_runs_of_one_stage_and_spaces_are_written_in_one_way(self) -> None:
        assert str(RecoveryGroups.parse(" 0-0, 1-2 ")) == "0,1-2"
        assert RecoveryGroups.parse("0-0,1-2") == RecoveryGroups.parse("0,1-2")

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    def test_what_crosses_are_the_edges_between_runs(self, sizes: list[int]) -> None:
        number = [run for run, size in enumerate(sizes) for _ in range(size)]
        starts = [number.index(run) for run in range(len(sizes))]
        groups = RecoveryGroups(tuple(starts), len(number))
        assert RecoveryGroups.parse(str(groups)) == groups
        for one, run in enumerate(number):
            assert [stage for stage in range(len(number)) if not groups.crosses(one, stage)] == list(
                groups.stages(one)
            )
            assert {number[stage] for stage in groups.stages(one)} == {run}
        assert groups.logs == (len(sizes) > 1)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("1-2", "1-2 does not begin at 0"),
            ("0-1,3", "3 does not begin at 2"),
            ("0-1,1-2", "1-2 does not begin at 2"),
            ("0,2,1", "2 does not begin at 1"),
            ("0-2,3-1", "3-1 ends before it begins"),
            ("0-", "'0-' is no run of stages"),
            ("0,,1", "'' is no run of stages"),
            ("a-b", "'a-b' is no run of stages"),
            ("-1", "'-1' is no run of stages"),
            ("0-9999999", "is no run of stages"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(self, text: str, why: str) -> None:
        with pytest.raises(ValueError, match=r"^groups ") as said:
            RecoveryGroups.parse(text)
        assert why in str(said.value)
        assert "\n" not in str(said.value)

    @pytest.mark.parametrize(
        ("starts", "stages"), [((1,), 3), ((0, 2, 2), 4), ((0, 4), 4), ((0, 2, 1), 4), ((), 3)]
    )
    def test_one_that_is_not_sane_does_not_exist(self, starts: tuple[int, ...], stages: int) -> None:
        with pytest.raises(ValueError, match="groups"):
            RecoveryGroups(starts, stages)

    def test_without_groups_every_edge_is_logged_and_any_pipeline_will_do(self) -> None:
        none = RecoveryGroups.parse("")
        assert none.logs
        assert none.crosses(0, 1)
        assert none.stages(3) == (3,)
        assert none.problem(7, {0: (0, 6)}) == ""

    def test_it_must_be_of_this_pipeline(self) -> None:
        assert PAIRS.problem(4, {rank: (rank,) for rank in range(4)}) == ""
        assert PAIRS.problem(8, {}) == "groups 0-1,2-3 are of 4 stages, the pipeline has 8"

    @pytest.mark.parametrize("stages", [{0: (0, 2), 1: (1, 3)}, {0: (0, 3), 1: (1, 2)}])
    def test_with_several_stages_on_a_rank_only_one_group_of_all_is_one(
        self, stages: dict[int, tuple[int, ...]]
    ) -> None:
        assert "part stages" in PAIRS.problem(4, stages)
        assert "one group of all (0-3), or none" in PAIRS.problem(4, stages)
        assert RecoveryGroups.parse("0-3").problem(4, stages) == ""

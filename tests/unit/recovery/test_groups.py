"""Recovery groups: their text, and plans that rebuild a group as a whole. test_agreement.py has random ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.log.record import Steps
from swift_ft.planner import (
    Assignment,
    Plan,
    PlanConfig,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
    plan,
)

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, *_ = Strategy
AT_10 = (0, 10)
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


def mesh(stages: int, dp_size: int = 1) -> Assignment:
    return Assignment.from_reports(
        num_stages=stages, stages={rank: (rank // dp_size,) for rank in range(stages * dp_size)}
    )


def log(
    assignment: Assignment, groups: RecoveryGroups, first: int = 10, last: int = 14
) -> dict[str, StreamSummary]:
    """What there is of it: nothing of what passes inside a group."""
    names = []
    dp_size = assignment.dp_size
    for stage in range(assignment.num_stages):
        for dp_rank in range(dp_size):
            name = f"s{stage}" if dp_size == 1 else f"s{stage}c{dp_rank}"
            if stage + 1 < assignment.num_stages and groups.crosses(stage, stage + 1):
                names.append(f"{name}.F")
            if stage and groups.crosses(stage, stage - 1):
                names.append(f"{name}.B")
    return {name: StreamSummary(stream=name, records=9, first_step=first, last_step=last) for name in names}


def decided(
    *versions: int | dict[str, Any] | None,
    groups: RecoveryGroups = PAIRS,
    assignment: Assignment | None = None,
    streams: dict[str, StreamSummary] | None = None,
    checkpoints: tuple[int, ...] = AT_10,
    refused: Refusals = Refusals(),  # noqa: B008
    **config: Any,
) -> Plan:
    assignment = assignment or mesh(len(versions))
    said = [
        Report(rank=rank, **(v if isinstance(v, dict) else {"version": v})) for rank, v in enumerate(versions)
    ]
    streams = log(assignment, groups) if streams is None else streams
    outcome, reason = plan(
        said, assignment, streams, checkpoints, PlanConfig(groups=groups, **config), refused
    )
    assert outcome is not None, reason
    return outcome


def ways(outcome: Plan) -> list[tuple[Strategy, int]]:
    return [(r.strategy, r.from_version) for r in outcome.ranks]


class TestPlans:
    def test_the_loss_of_one_replays_its_group_from_the_checkpoint(self) -> None:
        outcome = decided(15, None, 15, 15)
        assert outcome.target_version == 15
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 15), (KEEP, 15)]
        assert outcome.of(0).reason == (
            "holds version 15, but the ranks of stages 0, 1 reach no version together; "
            "the newest complete checkpoint is of version 10"
        )
        assert outcome.of(1).reason.startswith("holds no state")

    def test_without_groups_its_neighbour_keeps_what_it_holds(self) -> None:
        none = RecoveryGroups()
        assert ways(decided(15, None, 15, 15, groups=none))[0] == (KEEP, 15)
        # With groups nothing of s0.F is in the log, so it could not.
        assert decided(15, None, 15, 15, groups=none, streams=log(mesh(4), PAIRS)).restores

    def test_several_groups_at_once(self) -> None:
        assert ways(decided(15, None, None, 15)) == [(REPLAY, 10)] * 4
        thirds = RecoveryGroups.parse("0-1,2-3,4-5")
        outcome = decided(None, 15, 15, 15, 15, None, groups=thirds)
        assert ways(outcome) == [
            (REPLAY, 10),
            (REPLAY, 10),
            (KEEP, 15),
            (KEEP, 15),
            (REPLAY, 10),
            (REPLAY, 10),
        ]

    @pytest.mark.parametrize("name", ["s1.F", "s2.B"])
    def test_what_comes_in_over_its_ends_must_be_in_the_log(self, name: str) -> None:
        streams = log(mesh(4), PAIRS)
        del streams[name]
        of_the_first, of_the_second = (
            decided(15, None, 15, 15, streams=streams),
            decided(15, 15, None, 15, streams=streams),
        )
        needs, other = (of_the_second, of_the_first) if name == "s1.F" else (of_the_first, of_the_second)
        assert needs.restores
        assert f"{name} is empty" in needs.reason
        assert not other.restores
        streams[name] = StreamSummary(stream=name, records=9, first_step=10, last_step=14, corrupt=True)
        assert decided(15, None, 15, 15, streams=streams).restores

    def test_a_group_that_lags_together_catches_up_together(self) -> None:
        assert ways(decided(14, 14, 15, 15)) == [(CATCH_UP, 14), (CATCH_UP, 14), (KEEP, 15), (KEEP, 15)]

    def test_a_group_whose_ranks_hold_different_versions_goes_back_to_the_checkpoint(self) -> None:
        # What rank 0 would need to do step 14 again was sent to it inside the group.
        outcome = decided(14, 15, 15, 15)
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 15), (KEEP, 15)]

    def test_they_go_to_a_version_that_all_reach(self) -> None:
        undoing = {"version": None, "undo_to": 14, "undo_exact": True, "forward_to": 15}
        assert ways(decided(14, undoing, 16, 16, streams=log(mesh(4), PAIRS, 10, 15))) == [
            (CATCH_UP, 14),
            (UNDO, 14),
            (KEEP, 16),
            (KEEP, 16),
        ]

    def test_a_newer_state_that_is_given_up_anyway_does_not_stop_a_lower_target(self) -> None:
        # Step 14 cannot be replayed on stages 2 and 3; rank 0 holds 15, of no use to anybody.
        outcome = decided(15, None, 14, 14, streams=log(mesh(4), PAIRS, 10, 13))
        assert outcome.target_version == 15
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (CATCH_UP, 14), (CATCH_UP, 14)]
        streams = log(mesh(4), PAIRS, 10, 13)
        streams["s1.F"] = StreamSummary(
            stream="s1.F", records=9, first_step=10, last_step=14, unlogged=Steps(14, 14)
        )
        outcome = decided(15, None, 14, 14, streams=streams)
        assert outcome.target_version == 14
        assert ways(outcome) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 14), (KEEP, 14)]
        # A group that holds it together would have to throw it away.
        outcome = decided(15, 15, 14, None, streams=streams)
        assert outcome.restores

    def test_a_replica_is_copied_and_nobody_gives_anything_up(self) -> None:
        outcome = decided(15, 15, None, 15, 15, 15, 15, 15, assignment=mesh(4, 2))
        assert [r.strategy for r in outcome.ranks] == [KEEP, KEEP, REPLICA, *[KEEP] * 5]

    def test_a_stage_without_a_replica_takes_all_dp_ranks_of_its_group_along(self) -> None:
        outcome = decided(15, 15, None, None, 15, 15, 15, 15, assignment=mesh(4, 2))
        assert ways(outcome) == [(REPLAY, 10)] * 4 + [(KEEP, 15)] * 4

    def test_one_group_of_all_restores_the_checkpoint(self) -> None:
        one = RecoveryGroups.parse("0-3")
        outcome = decided(15, None, 15, 15, groups=one)
        assert ways(outcome) == [(CHECKPOINT, 10)] * 4
        assert "nothing is logged within one recovery group (0-3)" in outcome.reason
        # All of them hold it: nothing to restore. So after the loss of a log server.
        assert ways(decided(15, 15, 15, 15, groups=one)) == [(KEEP, 15)] * 4

    def test_a_refused_replay_is_not_planned_again(self) -> None:
        refused = Refusals().and_of([CATCH_UP, REPLAY], "rank 0 refused REPLAY: bits differ")
        assert ways(decided(15, None, 15, 15, refused=refused)) == [(CHECKPOINT, 10)] * 4

    def test_a_replay_that_was_cut_short_goes_on_where_all_of_its_group_are(self) -> None:
        # Stages 0 and 1 were replaying and hold 12; stage 3 died meanwhile.
        assert ways(decided(12, 12, 15, None)) == [(CATCH_UP, 12), (CATCH_UP, 12), (REPLAY, 10), (REPLAY, 10)]
        assert ways(decided(12, 13, 15, 15)) == [(REPLAY, 10), (REPLAY, 10), (KEEP, 15), (KEEP, 15)]

    def test_without_a_checkpoint_there_is_no_way_back(self) -> None:
        said = [Report(rank=rank, version=15 if rank else None) for rank in range(4)]
        outcome, reason = plan(said, mesh(4), {}, (), PlanConfig(groups=PAIRS))
        assert outcome is None
        assert "rank 0, which holds no state" in reason

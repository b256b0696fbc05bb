"""Who helps a replay, and up to where."""

from dataclasses import replace

from swift_ft.planner import (
    Assignment,
    Help,
    Plan,
    PlanConfig,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    plan,
)
from tests.unit.recovery.test_plan import decided, full_log, one_stage_each

AT_5 = (5,)
THREE = PlanConfig(helpers=3)
NONE = Refusals()


def said(*versions: int | None, unable: tuple[int, ...] = ()) -> list[Report]:
    return [
        Report(rank=rank, version=version, can_help=rank not in unable)
        for rank, version in enumerate(versions)
    ]


def helped(
    reports: list[Report],
    config: PlanConfig = THREE,
    refused: Refusals = NONE,
    assignment: Assignment | None = None,
) -> Plan:
    assignment = assignment or one_stage_each(len(reports))
    return decided(reports, assignment, full_log(range(assignment.num_stages), 0, 14), AT_5, config, refused)


class TestOneReplay:
    def test_the_nearest_that_hold_the_target(self) -> None:
        outcome = helped(said(15, 15, None, 15, 15, 15))
        assert outcome.help == (Help(owner=2, helpers=(1, 3, 0), until=15),)
        assert outcome.reason.endswith("; ranks 1, 3, 0 to help rank 2 up to version 15")
        assert [r.strategy for r in outcome.ranks].count(Strategy.KEEP) == 5

    def test_no_more_than_is_configured(self) -> None:
        (help,) = helped(said(15, 15, None, 15), PlanConfig(helpers=1)).help
        assert list(help.helpers) == [1]
        assert helped(said(15, 15, None, 15), PlanConfig()).help == ()

    def test_only_who_can(self) -> None:
        (help,) = helped(said(15, 15, None, 15, unable=(1, 3))).help
        assert list(help.helpers) == [0]
        assert helped(said(15, 15, None, 15, unable=(0, 1, 3))).help == ()

    def test_not_for_a_single_step(self) -> None:
        reports = [*said(15, 15), Report(rank=2, version=14), *said(15, 15, 15, 15)[3:]]
        assert helped(reports).help == ()
        reports[2] = Report(rank=2, version=13)
        assert helped(reports).help == (Help(owner=2, helpers=(1, 3, 0), until=15),)

    def test_a_plan_without_a_replay_has_no_help(self) -> None:
        assert helped(said(15, 15, 15)).help == ()

    def test_nobody_helps_any_more_once_that_was_refused(self) -> None:
        outcome = helped(said(15, None, 15), refused=Refusals(help=True, reason="rank 0 refused"))
        assert outcome.help == ()
        assert outcome.ranks[1].strategy is Strategy.REPLAY


class TestBesideOthers:
    def test_up_to_where_a_neighbour_replays_too(self) -> None:
        """Rank 1 lags behind by a step: rank 2 feeds it in that step, and is fed by it."""
        outcome = helped(said(15, 14, None, 15))
        assert outcome.help == (Help(owner=2, helpers=(3, 0), until=14),)

    def test_one_further_away_does_not_matter(self) -> None:
        (help,) = helped(said(14, 15, None, 15)).help
        assert help == Help(owner=2, helpers=(1, 3), until=15)

    def test_two_neighbours_that_begin_together_replay_alone(self) -> None:
        assert helped(said(15, None, None, 15)).help == ()

    def test_two_that_are_not_share_the_helpers(self) -> None:
        outcome = helped(said(None, 15, 15, None, 15, 15))
        assert outcome.help == (
            Help(owner=0, helpers=(1, 4), until=15),
            Help(owner=3, helpers=(2, 5), until=15),
        )

    def test_a_replay_that_was_cut_short_is_helped_up_to_it(self) -> None:
        """Its helper, rank 1, was killed: from the checkpoint on it needs what rank 2 has done since."""
        outcome = helped(said(15, None, 9, 15))
        assert outcome.help == (Help(owner=1, helpers=(0, 3), until=9),)
        assert outcome.ranks[2].strategy is Strategy.CATCH_UP


def grouped(text: str) -> PlanConfig:
    return PlanConfig(helpers=3, groups=RecoveryGroups.parse(text))


class TestGroups:
    """Only a group of one stage is helped: what passes inside another is in no log."""

    def test_a_group_of_one_stage_is_helped_as_without_groups(self) -> None:
        (help,) = helped(said(None, 15, 15, 15), grouped("0,1-2,3")).help
        assert help == Help(owner=0, helpers=(1, 2, 3), until=15)

    def test_a_group_of_several_replays_alone(self) -> None:
        outcome = helped(said(15, 15, 15, None, 15, 15), grouped("0-1,2-3,4-5"))
        assert [r.strategy for r in outcome.ranks].count(Strategy.REPLAY) == 2
        assert outcome.help == ()

    def test_beside_a_group_of_several(self) -> None:
        outcome = helped(said(None, 15, 15, 15, None, 15, 15, 15), grouped("0-1,2,3,4,5,6-7"))
        assert outcome.help == (Help(owner=4, helpers=(3, 5, 2), until=15),)

    def test_one_group_of_all_is_never_replayed(self) -> None:
        assert helped(said(None, 15, 15, 15), grouped("0-3")).help == ()


class TestSeveralStages:
    """A rank has as many neighbours as its stages have, on other ranks."""

    LOOP = Assignment.from_reports(num_stages=8, stages={rank: (rank, rank + 4) for rank in range(4)})
    V = Assignment.from_reports(num_stages=8, stages={rank: (rank, 7 - rank) for rank in range(4)})

    def test_all_that_hold_the_target(self) -> None:
        for assignment in (self.LOOP, self.V):
            outcome = helped(said(15, None, 15, 15), assignment=assignment)
            assert outcome.help == (Help(owner=1, helpers=(0, 2, 3), until=15),)

    def test_the_first_and_the_last_rank_of_a_loop_are_neighbours(self) -> None:
        assert helped(said(None, 15, 15, 14), assignment=self.LOOP).help == (
            Help(owner=0, helpers=(1, 2), until=14),
        )
        assert helped(said(None, 15, 15, 14), assignment=self.V).help == (
            Help(owner=0, helpers=(1, 2), until=15),
        )

    def test_at_the_turn_of_a_v_a_rank_is_its_own_neighbour(self) -> None:
        (help,) = helped(said(15, 15, 15, None), assignment=self.V).help
        assert (help.owner, help.until) == (3, 15)

    def test_two_neighbours_in_the_loop_replay_alone(self) -> None:
        assert helped(said(None, 15, 15, None), assignment=self.LOOP).help == ()
        assert len(helped(said(None, 15, 15, None), assignment=self.V).help) == 2


class TestNotYet:
    def test_replicas(self) -> None:
        assignment = Assignment.from_reports(num_stages=2, stages={0: (0,), 1: (0,), 2: (1,), 3: (1,)})
        log = {
            name: replace(summary, stream=name)
            for old, summary in full_log(range(2), 0, 14).items()
            for name in (old.replace(".", "c0."), old.replace(".", "c1."))
        }
        outcome, _ = plan(said(15, 15, None, None), assignment, log, AT_5, THREE)
        assert outcome is not None
        assert outcome.ranks[2].strategy is Strategy.REPLAY
        assert outcome.help == ()

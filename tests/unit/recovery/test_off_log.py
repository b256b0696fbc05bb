"""States that the log does not lead to: when they are kept, what is saved, when the log goes."""

from dataclasses import replace

import pytest

from swift_ft.planner import Checkpoints, Plan, PlanConfig, Refusals, Report, Strategy, plan, plan_off_log
from tests.unit.recovery.test_helping import AT_5, said
from tests.unit.recovery.test_plan import full_log, one_stage_each

HELPED = PlanConfig(helpers=2)
NONE = Refusals()


def off_log(reports: list[Report], *ranks: int) -> list[Report]:
    return [replace(report, off_log=report.rank in ranks) for report in reports]


def planned(
    reports: list[Report],
    config: PlanConfig = HELPED,
    checkpoints: Checkpoints = AT_5,
    refused: Refusals = NONE,
    *,
    log_ends: bool = False,
) -> Plan:
    assignment = one_stage_each(len(reports))
    log = full_log(range(assignment.num_stages), 0, 14)
    found, reason = plan_off_log(reports, assignment, log, checkpoints, config, refused, log_ends=log_ends)
    assert found is not None, reason
    assert found.reason == reason
    return found


def strategies(found: Plan) -> list[str]:
    return [str(entry.strategy) for entry in found.ranks]


class TestOffTheLog:
    def test_all_hold_the_target_but_no_checkpoint_is_complete(self) -> None:
        found = planned(off_log(said(15, 15, 15), 1))
        assert strategies(found) == ["KEEP"] * 3
        assert (found.exact, found.saves, found.gives_up_log) == (False, True, False)
        assert found.reason.endswith(
            "not bit for bit: rank 1 came off the log; every rank saves version 15, and the log ends there"
        )

    def test_the_checkpoint_is_complete(self) -> None:
        found = planned(
            off_log(said(15, 15, 15), 1), checkpoints=Checkpoints(versions=(5, 15)), log_ends=True
        )
        assert strategies(found) == ["KEEP"] * 3
        assert (found.exact, found.saves, found.gives_up_log) == (False, False, True)
        assert found.reason.endswith("the log does not lead to version 15, and begins anew")

    def test_the_owner_is_lost_with_the_checkpoint_complete(self) -> None:
        """Nobody says that he is off the log; the checkpoint is, all the same."""
        found = planned(said(15, None, 15), checkpoints=Checkpoints(versions=(5, 15)), log_ends=True)
        assert strategies(found) == ["KEEP", "REPLAY", "KEEP"]
        assert not found.reads_log
        assert found.gives_up_log

    def test_nothing_is_read_of_a_log_that_ends(self) -> None:
        found = planned(said(17, None, 17), checkpoints=Checkpoints(versions=(5, 15)), log_ends=True)
        assert strategies(found) == ["CHECKPOINT"] * 3
        assert found.target_version == 15

    def test_another_one_is_replayed_far_from_it(self) -> None:
        found = planned(off_log(said(15, 15, 15, None), 1), PlanConfig(helpers=0))
        assert strategies(found) == ["KEEP", "KEEP", "KEEP", "REPLAY"]
        assert (found.exact, found.saves) == (False, True)

    @pytest.mark.parametrize("lost", [0, 2])
    def test_another_one_is_replayed_beside_it(self, lost: int) -> None:
        """Records that the log lacks of it are made again only where it is replayed as it was."""
        reports = off_log(said(15, 15, 15, 15), 1)
        reports[lost] = replace(reports[lost], version=None)
        found = planned(reports)
        assert found.of(1).strategy is Strategy.REPLAY
        assert found.of(lost).strategy is Strategy.REPLAY
        assert found.exact
        assert not found.saves

    def test_one_that_stopped_half_way_goes_on(self) -> None:
        found = planned(off_log(said(15, 9, 15, 15, None), 1))
        assert found.of(1).strategy is Strategy.CATCH_UP
        assert found.of(1).from_version == 9
        assert {help.owner for help in found.help} == {1, 4}
        assert found.saves

    def test_and_one_that_stopped_half_way_beside_another_begins_again(self) -> None:
        found = planned(off_log(said(15, 9, None, 15), 1))
        assert [found.of(rank).strategy for rank in (1, 2)] == [Strategy.REPLAY] * 2
        assert found.exact

    def test_help_was_refused(self) -> None:
        """It is replayed exactly, and the log stays."""
        found = planned(off_log(said(15, 15, 15), 1), refused=Refusals(help=True, reason="rank 0 refused"))
        assert strategies(found) == ["KEEP", "REPLAY", "KEEP"]
        assert found.exact
        assert found.help == ()

    def test_a_checkpoint_of_the_target_says_what_the_state_is(self) -> None:
        found = planned(off_log(said(15, 15, 15), 1), checkpoints=Checkpoints(versions=(5, 15)))
        assert found.of(1).strategy is Strategy.REPLAY
        assert found.of(1).from_version == 15
        assert found.exact

    def test_a_plan_in_which_nobody_is_off_the_log_is_as_it_was(self) -> None:
        for reports in (said(15, 15, 15), said(15, None, 15), said(None, None, None)):
            assignment = one_stage_each(3)
            log = full_log(range(3), 0, 14)
            assert planned(reports) == plan(reports, assignment, log, AT_5, HELPED)[0]

    def test_a_rank_that_holds_nothing_is_on_no_log(self) -> None:
        reports = off_log(said(15, None, 15), 1)
        assert planned(reports, PlanConfig()).exact

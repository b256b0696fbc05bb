"""States that the log does not lead to: when they are kept, what is saved, when the log goes."""

from dataclasses import replace

import pytest

from swift.recovery import (
    Checkpoints,
    Help,
    Plan,
    PlanConfig,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    plan,
    plan_off_log,
)
from tests.unit.recovery.test_helping import AT_5, said
from tests.unit.recovery.test_plan import full_log, one_stage_each

FAST = PlanConfig(helpers=2, fast_help=True)
NONE = Refusals()


def off_log(reports: list[Report], *ranks: int) -> list[Report]:
    return [replace(report, off_log=report.rank in ranks) for report in reports]


def planned(
    reports: list[Report],
    config: PlanConfig = FAST,
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


class TestFastHelp:
    def test_it_is_named_and_ends_the_log(self) -> None:
        found = planned(said(15, None, 15, 15))
        assert found.help == (Help(owner=1, helpers=(0, 2), until=15, fast=True),)
        assert not found.exact
        assert found.saves
        assert not found.gives_up_log
        assert "not bit for bit: gradients of the replay of rank 1 are added in another order" in found.reason
        assert found.reason.endswith("every rank saves version 15, and the log ends there")

    def test_never_unless_it_was_allowed(self) -> None:
        reports = said(15, None, 15, 15)
        found = planned(reports, PlanConfig(helpers=2))
        assert (found.exact, found.saves) == (True, False)
        assert found.help == (Help(owner=1, helpers=(0, 2), until=15),)

    @pytest.mark.parametrize("other", [0, 2])
    @pytest.mark.parametrize("version", [14, None])
    def test_not_where_a_stage_beside_is_replayed_too(self, other: int, version: int | None) -> None:
        """What the two feed each other must be what the log has."""
        reports = said(15, None, 15, 15)
        reports[other] = replace(reports[other], version=version)
        found = planned(reports)
        assert found.exact
        assert not found.saves
        assert not any(help.fast for help in found.help)

    def test_two_that_are_no_neighbours(self) -> None:
        found = planned(said(None, 15, None, 15, 15))
        assert [(help.owner, help.fast) for help in found.help] == [(0, True), (2, True)]
        assert "the replay of ranks 0, 2" in found.reason

    def test_a_plan_without_replay_is_as_it_was(self) -> None:
        for reports in (said(15, 15, 15), said(None, None, None)):
            assignment = one_stage_each(3)
            log = full_log(range(3), 0, 14)
            assert planned(reports) == plan(reports, assignment, log, AT_5, FAST)[0]

    def test_not_where_a_newer_checkpoint_is_complete(self) -> None:
        """Nothing older can become complete, and it is not known which state the newer one belongs to."""
        found = planned(said(15, None, 15), checkpoints=Checkpoints(versions=(5, 20)))
        assert found.exact
        assert not any(help.fast for help in found.help)

    def test_alone_in_its_recovery_group_or_not_at_all(self) -> None:
        config = replace(FAST, groups=RecoveryGroups.parse("0,1-2,3"))
        assert planned(said(15, None, 15, 15), config).exact
        assert not planned(said(None, 15, 15, 15), config).exact


class TestOffTheLog:
    def test_all_hold_the_target_but_no_checkpoint_is_complete(self) -> None:
        found = planned(off_log(said(15, 15, 15), 1))
        assert strategies(found) == ["KEEP"] * 3
        assert (found.exact, found.saves, found.gives_up_log) == (False, True, False)
        assert "rank 1 came off the log in a fast replay" in found.reason

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
        found = planned(off_log(said(15, 15, 15, None), 1), PlanConfig(helpers=0, fast_help=True))
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
        assert {help.owner for help in found.help if help.fast} == {1, 4}
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

    def test_a_rank_that_holds_nothing_is_on_no_log(self) -> None:
        reports = off_log(said(15, None, 15), 1)
        assert planned(reports, PlanConfig()).exact

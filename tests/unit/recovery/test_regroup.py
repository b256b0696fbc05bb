"""What a rank logs while recovery groups change, and that no replay begins before they did."""

from swift.recovery import (
    Assignment,
    Checkpoints,
    PlanConfig,
    RecoveryGroups,
    Report,
    Strategy,
    StreamSummary,
    plan,
)
from swift.recovery.regroup import LoggedGroups

OLD, NEW, THIRD = (RecoveryGroups.parse(text) for text in ("0-1,2-3", "0,1,2,3", "0-2,3"))


def rank(number: int = 1) -> LoggedGroups:
    return LoggedGroups(number, OLD)


def test_from_its_next_checkpoint_on_a_rank_logs_for_both() -> None:
    mine = rank()
    assert mine.saving(4) == (0, 0)
    mine.learn("0-1,2-3", "0,1,2,3", 7, {})
    assert mine.at(6) == (OLD,)
    assert mine.saving(8) == (7, 8)
    assert (mine.at(7), mine.at(8)) == ((OLD,), (OLD, NEW))
    mine.learn("0-1,2-3", "0,1,2,3", 7, {0: 4, 1: 8})
    assert mine.saving(12) == (7, 8), "it says so again, from when on it does"
    mine.learn("0,1,2,3", "", 0, {})
    assert mine.at(13) == (NEW,)
    assert mine.saving(16) == (0, 0)


def test_who_replaces_a_rank_is_told_since_when_it_logs_for_both() -> None:
    mine = rank()
    mine.learn("0-1,2-3", "0,1,2,3", 7, {0: 4, 1: 8})
    assert (mine.at(7), mine.at(8)) == ((OLD,), (OLD, NEW))
    assert mine.saving(12) == (7, 8)
    other = rank(2)
    other.learn("0-1,2-3", "0,1,2,3", 7, {0: 4, 1: 8})
    assert other.at(8) == (OLD,)


def test_another_wish_begins_anew_even_for_the_same_groups() -> None:
    mine = rank()
    mine.learn("0-1,2-3", "0,1,2,3", 7, {})
    mine.saving(8)
    mine.learn("0-1,2-3", "0-2,3", 8, {})
    assert mine.at(9) == (OLD,)
    assert mine.saving(12) == (8, 12)
    mine.learn("0-1,2-3", "0,1,2,3", 9, {})
    assert mine.at(13) == (OLD,)
    assert mine.saving(16) == (9, 16)


def test_a_replay_feeds_those_beside_it_by_the_groups_of_its_plan() -> None:
    mine = rank()
    mine.learn("0,1,2,3", "", 0, {})
    assert mine.at(5, [THIRD]) == (NEW, THIRD)
    assert mine.at(5, [NEW]) == (NEW,)


def planned(
    since: int, checkpoints: tuple[int, ...], *versions: int | None
) -> tuple[int, set[Strategy], str]:
    assignment = Assignment.told(num_stages=4, stages={rank: (rank,) for rank in range(4)})
    names = [f"s{stage}.{kind}" for stage in range(4) for kind in "FB"]
    log = {name: StreamSummary(stream=name, records=9, first_step=0, last_step=20) for name in names}
    reports = [Report(rank=number, version=version) for number, version in enumerate(versions)]
    config = PlanConfig(groups=NEW, groups_since=since)
    found, reason = plan(reports, assignment, log, Checkpoints(versions=checkpoints), config)
    assert found is not None
    if any(entry.strategy is Strategy.REPLAY for entry in found.ranks):
        assert found.groups == "0,1,2,3"
    return min(entry.from_version for entry in found.ranks), {entry.strategy for entry in found.ranks}, reason


def test_no_replay_begins_before_the_groups_did() -> None:
    assert planned(8, (4, 8), 9, None, 9, 9)[:2] == (8, {Strategy.KEEP, Strategy.REPLAY})
    # Whoever held version 8 is dead; the log of the steps before was for other groups.
    lowest, strategies, reason = planned(8, (4, 8), 6, None, 6, 6)
    assert (lowest, strategies) == (8, {Strategy.CHECKPOINT})
    assert "recovery groups are 0,1,2,3 since version 8, and no complete checkpoint from there to 6" in reason
    assert planned(0, (4, 8), 6, None, 6, 6)[:2] == (4, {Strategy.KEEP, Strategy.REPLAY})
    # Cut short in a replay by the groups before.
    assert planned(8, (4, 8), 9, 6, 9, 9)[:2] == (8, {Strategy.KEEP, Strategy.REPLAY})
    assert planned(8, (4,), 9, 6, 9, 9)[1] == {Strategy.CHECKPOINT}

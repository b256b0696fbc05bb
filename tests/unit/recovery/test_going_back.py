"""Back to the newest snapshot that is left of every rank, or to a checkpoint; and who keeps whose copy."""

from collections.abc import Sequence

import pytest

from swift_ft.planner import (
    Assignment,
    HeldSnapshot,
    Plan,
    PlanConfig,
    Refusals,
    Report,
    Strategy,
    plan,
)
from swift_ft.train.snapshots import in_order, partners

RANKS = 4
NOTHING = Refusals()
CONFIG = PlanConfig(strategy="snapshot")


def assignment() -> Assignment:
    return Assignment.from_reports(num_stages=RANKS, stages={rank: [rank] for rank in range(RANKS)})


def said(
    versions: Sequence[int | None], *, taken: Sequence[int] = (8,), lost: Sequence[int] = ()
) -> list[Report]:
    """Every rank keeps its own copies and those of the rank before it; `lost` ranks are fresh processes."""
    return [
        Report(
            rank=rank,
            version=None if rank in lost else version,
            snapshots=()
            if rank in lost
            else tuple(HeldSnapshot(of, at) for at in taken for of in (rank, (rank - 1) % RANKS)),
        )
        for rank, version in enumerate(versions)
    ]


def decided(
    reports: Sequence[Report], checkpoints: Sequence[int] = (0, 5), refused: Refusals = NOTHING
) -> tuple[Plan, str]:
    outcome, reason = plan(reports, assignment(), {}, tuple(checkpoints), CONFIG, refused)
    assert outcome is not None
    return outcome, reason


def test_survivors_take_their_own_copies_and_a_replacement_its_neighbours() -> None:
    outcome, _ = decided(said([11, 10, 11, 11], lost=[1]))
    assert outcome.target_version == 8
    assert {r.rank: r.sources for r in outcome.ranks} == {0: (), 1: (2,), 2: (), 3: ()}
    assert {r.strategy for r in outcome.ranks} == {Strategy.SNAPSHOT}
    assert outcome.restores
    assert outcome.gives_up_log
    assert outcome.exact
    assert [copy.rank for copy in outcome.copies] == [1]


def test_nobody_goes_back_if_nobody_is_lost_and_all_hold_one_version() -> None:
    outcome, _ = decided(said([11, 11, 11, 11]))
    assert {r.strategy for r in outcome.ranks} == {Strategy.KEEP}


def test_a_version_of_which_a_copy_is_missing_does_not_count() -> None:
    reports = said([11, 11, 11, 11], taken=(8,), lost=[1])
    # Two ranks had the next one already when rank 1 was lost in it.
    reports[3] = Report(rank=3, version=11, snapshots=(*reports[3].snapshots, HeldSnapshot(3, 12)))
    assert decided(reports)[0].target_version == 8


def test_one_that_is_whole_without_anybody_knowing_it_counts() -> None:
    reports = said([12, 12, 12, 12], taken=(8, 12), lost=[1])
    assert decided(reports)[0].target_version == 12


def test_a_rank_and_its_keeper_lost_at_once_the_checkpoint_stands_behind() -> None:
    outcome, reason = decided(said([11, 11, 11, 11], lost=[1, 2]))
    assert {r.strategy for r in outcome.ranks} == {Strategy.CHECKPOINT}
    assert outcome.target_version == 5
    assert "no snapshot of rank 1 is left" in reason


def test_a_newer_checkpoint_is_taken() -> None:
    outcome, reason = decided(said([11, 11, 11, 11], lost=[1]), checkpoints=(0, 10))
    assert outcome.target_version == 10
    assert "the newest whole snapshot is of version 8" in reason
    assert (
        decided(said([11, 11, 11, 11], lost=[1]), checkpoints=(0, 8))[0].ranks[0].strategy
        is Strategy.SNAPSHOT
    )


def test_one_that_was_refused_leads_to_the_checkpoint() -> None:
    refused = (
        Refusals().and_everything("went back").and_of([Strategy.SNAPSHOT], "rank 1 refused SNAPSHOT: damaged")
    )
    outcome, reason = decided(said([11, 11, 11, 11], lost=[1]), refused=refused)
    assert outcome.target_version == 5
    assert "rank 1 refused SNAPSHOT" in reason


def test_whoever_has_gone_back_goes_back_again_if_another_rank_is_lost_meanwhile() -> None:
    """The log is given up by then."""
    first, _ = decided(said([11, 11, 11, 11], lost=[1]))
    refused = Refusals().and_everything(first.ranks[0].reason)
    outcome, _ = decided(said([8, 8, 8, 11], lost=[3]), refused=refused)
    assert (outcome.target_version, outcome.ranks[3].sources) == (8, (0,))


def test_the_reason_does_not_grow_with_every_plan_of_a_recovery() -> None:
    reports = said([11, 11, 11, 11], lost=[1, 2])
    first, reason = decided(reports)
    assert decided(reports, refused=Refusals().and_everything(first.ranks[0].reason))[1] == reason


class TestPartners:
    def hosts(self, *names: str) -> dict[int, str]:
        return dict(enumerate(names))

    def apart(self, ranks: int) -> dict[int, int]:
        return {rank: -1 - rank for rank in range(ranks)}

    def test_without_hosts_a_ring(self) -> None:
        assert partners(range(3), self.hosts("", "", ""), self.apart(3)) == {0: 1, 1: 2, 2: 0}

    def test_on_another_host(self) -> None:
        assert partners(range(4), self.hosts("a", "a", "b", "b"), self.apart(4)) == {0: 2, 1: 3, 2: 0, 3: 1}
        chosen = partners(range(4), self.hosts("a", "a", "a", "b"), self.apart(4))
        assert chosen == {0: 3, 1: 3, 2: 3, 3: 0}, "whatever they keep for others"

    def test_in_another_recovery_group(self) -> None:
        assert partners(range(4), self.hosts("", "", "", ""), {0: 0, 1: 0, 2: 2, 3: 2}) == {
            0: 2,
            1: 3,
            2: 0,
            3: 1,
        }

    def test_nobody_keeps_for_one_that_is_alone(self) -> None:
        assert partners([0], {0: ""}, {0: -1}) == {}

    @pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
    def test_transfers_come_in_rounds_in_which_no_rank_is_twice(self, ranks: int) -> None:
        chosen = partners(range(ranks), dict.fromkeys(range(ranks), "a"), self.apart(ranks))
        ordered = in_order(chosen)
        assert sorted(ordered) == sorted(chosen.items())
        first = {rank for transfer in ordered[: ranks // 2] for rank in transfer}
        assert len(first) == 2 * (ranks // 2)

"""Views as changes of the one before: all transcripts go through them as well (tests/unit/coordinator)."""

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import applied, between, whole
from swift_ft.text import WORLD_SIZE_MAX

RANKS = 1024


def view_of(revision: int, *, lost: int | None = None, plan: pb.Plan | None = None) -> pb.View:
    view = pb.View(job="j", revision=revision, generation=2, state=pb.RUNNING, world_size=RANKS, plan=plan)
    for rank in range(RANKS):
        if rank != lost:
            view.members.add(rank=rank, incarnation=f"{rank:032x}", pid=rank, host="h")
        view.log_copies.add(rank=rank, servers=["l0:1", "l1:1"])
    return view


def plan_of(replayed: int) -> pb.Plan:
    ranks = [pb.RankPlan(rank=rank, strategy=pb.KEEP, from_version=9) for rank in range(RANKS)]
    ranks[replayed] = pb.RankPlan(rank=replayed, strategy=pb.REPLAY)
    sources = [pb.StreamSources(stream=f"s{stage}.F", servers=["l0:1", "l1:1"]) for stage in range(RANKS)]
    return pb.Plan(generation=2, target_version=9, ranks=ranks, reason="why", sources=sources)


def test_what_is_told_of_a_loss_does_not_grow_with_the_job() -> None:
    before, after = view_of(5), view_of(7, lost=3)
    update = between(before, after)
    assert applied(update, before) == after
    assert update.ByteSize() < 64
    assert whole(after).ByteSize() > 32 * RANKS
    back = between(after, before)
    assert [member.rank for member in back.view.members] == [3]
    assert applied(back, after) == before


def test_a_plan_is_told_by_what_it_says_and_not_by_ranks() -> None:
    before, after = view_of(5), view_of(6, plan=plan_of(3))
    update = between(before, after, reads_log=False)
    assert update.ByteSize() < 128
    assert [list(together.ranges) for together in update.planned] == [[0, 3, 4, RANKS - 4], [3, 1]]
    seen = applied(update, before)
    assert seen is not None
    assert list(seen.plan.ranks) == list(after.plan.ranks)
    assert not seen.plan.sources
    assert applied(between(before, after), before) == after
    # It is not told again, and it ends.
    later = view_of(8, plan=plan_of(3))
    assert between(after, later).ByteSize() < 32
    assert applied(between(after, later), after) == later
    assert applied(between(later, before), later) == before


@pytest.mark.parametrize("known", [None, view_of(4), view_of(6)])
def test_a_change_of_another_view_is_not_applied(known: pb.View | None) -> None:
    assert applied(between(view_of(5), view_of(7)), known) is None


@pytest.mark.parametrize("ranges", [[0], [0, WORLD_SIZE_MAX + 1], [0, 1, 5], [0, -(1 << 31)]])
def test_ranks_that_cannot_be_are_no_update(ranges: list[int]) -> None:
    update = whole(view_of(5, plan=plan_of(3)))
    update.planned.add(plan=pb.RankPlan(strategy=pb.KEEP), ranges=ranges)
    assert applied(update, None) is None

"""Which spare gets a place, and when one is warmed up. The nursery and its children are made up."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch import spares as spares_module
from swift.launch.spares import AGAIN_S, SPARE_FAILURES_MAX, WARM_UP_FAILURES_MAX, WARM_UP_S_MAX, Spares
from swift.launch.worker import Assignment

RUNNING = pb.View(state=pb.RUNNING, checkpoints=[0])
RANKS = [4, 5, 6]


class FakeChild:
    def __init__(self, pid: int) -> None:
        self.pid, self.incarnation, self.forked = pid, f"i{pid}", True
        self.warm, self.said, self.killed = False, b"", False
        self.warming_for: int | None = None
        self.warmed_for: int | None = None
        self.rank: int | None = None
        self.exit_code: int | None = None

    def warm_up(self, rank: int, assignment: Assignment) -> None:
        assert assignment.env["PLACE"] == str(RANKS.index(rank))
        self.warming_for = rank

    def kill_group(self) -> None:
        self.killed = True


class FakeNursery:
    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.ready = True

    def spawn(self) -> FakeChild:
        self.children.append(FakeChild(len(self.children)))
        return self.children[-1]

    def tend(self) -> bool:
        return self.ready

    @property
    def spares(self) -> list[FakeChild]:
        return [child for child in self.children if child.rank is None and child.exit_code is None]


@pytest.fixture
def nursery() -> FakeNursery:
    return FakeNursery()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(spares_module, "tell", lines.append)
    return lines


def made(place: int, incarnation: str) -> Assignment:
    return Assignment(env={"PLACE": str(place)}, script="", module=False, args=[], cwd="", warm_up=True)


def spares_of(
    nursery: Any, count: int, warm_up: Callable[[int, str], Assignment] | None = made, view: Any = RUNNING
) -> Spares:
    """All of them imported."""
    spares = Spares(nursery, count, warm_up=warm_up)
    for _ in range(count):
        spares.tend(view, RANKS)
        hear(spares, nursery.children[-1])
    return spares


def hear(spares: Spares, child: FakeChild, why_not: str | None = None, *, passing: bool = False) -> None:
    """It has imported what ranks need; or its warm-up is over."""
    if why_not is None:
        child.warm = True
    else:
        child.said = json.dumps({"why_not": why_not, "passing": passing}).encode() + b"\n"
    spares.heard(child)  # type: ignore[arg-type]


def test_one_after_the_other_is_warmed_up_as_another_rank(nursery: FakeNursery) -> None:
    spares, as_rank = spares_of(nursery, 4), []
    for _ in range(4):
        spares.tend(RUNNING, RANKS)
        (child,) = [child for child in nursery.children if child.warming_for is not None]
        as_rank.append(child.warming_for)
        hear(spares, child, "")
        assert child.warmed_for == as_rank[-1]
    assert as_rank == [4, 5, 6, 4]
    spares.tend(RUNNING, RANKS)
    assert not [child for child in nursery.children if child.warming_for is not None]


def test_who_was_warmed_up_as_it_gets_the_place_and_nobody_who_was_as_another(nursery: FakeNursery) -> None:
    spares = spares_of(nursery, 3)
    for child in nursery.children[:2]:  # as ranks 4 and 5
        spares.tend(RUNNING, RANKS)
        hear(spares, child, "")

    for rank, wanted in ((5, 1), (6, 2), (5, 3)):
        taken: Any = spares.take(rank)
        assert taken is nursery.children[wanted]
        taken.rank = rank
    assert nursery.children[0].rank is None
    spares.tend(RUNNING, RANKS)
    another = nursery.children[-1]
    hear(spares, another)
    spares.tend(RUNNING, RANKS)
    assert another.warming_for == 5, "there is one for rank 4 still"


def test_a_loss_ends_the_warm_up_and_does_not_wait_for_it(nursery: FakeNursery) -> None:
    spares = spares_of(nursery, 1)
    spares.tend(RUNNING, RANKS)
    (child,) = nursery.children

    assert spares.take(4) is nursery.children[1]
    assert child.killed
    child.exit_code = -9
    spares.ended(child)  # type: ignore[arg-type]
    for _ in range(WARM_UP_FAILURES_MAX):  # it was no failure
        spares.tend(RUNNING, RANKS)
    hear(spares, nursery.children[-1])
    spares.tend(RUNNING, RANKS)
    assert nursery.children[-1].warming_for == 4


@pytest.mark.parametrize(
    "view",
    [None, pb.View(state=pb.RUNNING), pb.View(state=pb.FORMING, checkpoints=[0]), pb.View(state=pb.FINISHED)],
)
def test_nobody_is_warmed_up_before_there_is_something_to_compute(view: Any, nursery: FakeNursery) -> None:
    spares = spares_of(nursery, 1, view=view)
    spares.tend(view, RANKS)
    assert nursery.children[0].warming_for is None
    assert spares.take(4) is nursery.children[0]


def test_after_failures_in_a_row_nobody_is_warmed_up(nursery: FakeNursery, told: list[str]) -> None:
    spares = spares_of(nursery, 1)
    (child,) = nursery.children
    for why_not in ["a", "", *["b"] * WARM_UP_FAILURES_MAX]:
        child.warmed_for = None
        spares.tend(RUNNING, RANKS)
        assert child.warming_for == 4
        hear(spares, child, why_not)
    assert [line.endswith(": b") for line in told] == [True]
    spares.tend(RUNNING, RANKS)
    assert child.warming_for is None
    assert spares.take(5) is child, "it is a spare as any other"


def test_a_result_that_comes_in_parts_is_heard_once_it_is_whole(nursery: FakeNursery) -> None:
    spares = spares_of(nursery, 1)
    spares.tend(RUNNING, RANKS)
    (child,) = nursery.children
    for part in (b'{"why_not": "", ', b'"passing": false}'):
        child.said += part
        spares.heard(child)  # type: ignore[arg-type]
        assert child.warming_for == 4
    child.said += b"\n"
    spares.heard(child)  # type: ignore[arg-type]
    assert (child.warming_for, child.warmed_for) == (None, 4)


def test_a_warm_up_that_takes_too_long_is_ended(
    nursery: FakeNursery, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(spares_module.events, "now", lambda: now)
    spares = spares_of(nursery, 1)
    for number in range(WARM_UP_FAILURES_MAX):
        spares.tend(RUNNING, RANKS)
        child = nursery.spares[0]
        assert child.warming_for == 4
        now += WARM_UP_S_MAX - 1.0
        spares.tend(RUNNING, RANKS)
        assert not child.killed
        now += 2.0
        spares.tend(RUNNING, RANKS)
        assert child.killed
        child.exit_code = -9
        spares.ended(child)  # type: ignore[arg-type]
        spares.tend(RUNNING, RANKS)
        hear(spares, nursery.children[-1])
        assert len(told) == (number == WARM_UP_FAILURES_MAX - 1)
    assert "took longer" in told[0]


def test_what_the_job_was_in_the_way_of_is_tried_again_and_does_not_count(
    nursery: FakeNursery, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(spares_module.events, "now", lambda: now)
    spares = spares_of(nursery, 1)
    (child,) = nursery.children
    for _ in range(WARM_UP_FAILURES_MAX + 1):
        spares.tend(RUNNING, RANKS)
        assert child.warming_for == 4
        hear(spares, child, "a recovery is under way", passing=True)
        spares.tend(RUNNING, RANKS)
        assert child.warming_for is None, "not at once"
        now += AGAIN_S
    assert not told


def test_without_the_option_nobody_is_warmed_up(nursery: FakeNursery) -> None:
    spares = spares_of(nursery, 1, warm_up=None)
    spares.tend(RUNNING, RANKS)
    assert nursery.children[0].warming_for is None


def test_spares_that_die_while_they_start_are_made_so_often(nursery: FakeNursery, told: list[str]) -> None:
    spares = Spares(nursery, 1, warm_up=None)  # type: ignore[arg-type]
    for _ in range(SPARE_FAILURES_MAX + 2):
        spares.tend(RUNNING, RANKS)
        for child in nursery.spares:
            child.exit_code = 1
            spares.ended(child)  # type: ignore[arg-type]
    assert len(nursery.children) == SPARE_FAILURES_MAX
    assert len(told) == 1

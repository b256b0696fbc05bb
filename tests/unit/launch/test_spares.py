"""Which spare gets a place, and when one is warmed up. The nursery and its children are made up."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch import spares as spares_module
from swift_ft.launch.children import StartFailed
from swift_ft.launch.spares import AGAIN_S, FAILURES_MAX, SCRIPT_S_MAX, Spares
from swift_ft.launch.worker import Program

RUNNING = pb.View(state=pb.RUNNING, checkpoints=[0])
RANKS = [4, 5, 6]


class FakeChild:
    def __init__(self, pid: int) -> None:
        self.pid, self.incarnation, self.forked = pid, f"i{pid}", True
        self.warm = self.warming = self.warmed_up = self.unwanted = self.prepared = False
        self.said = b""
        self.kept_for: int | None = None
        self.rank: int | None = None
        self.exit_code: int | None = None
        self.assigned: Program | None = None

    def rehearse(self, assignment: Program) -> None:
        assert self.assigned is None
        self.assigned = assignment

    def prepare(self) -> None:
        assert self.warm
        assert not self.warming
        assert not self.prepared
        self.prepared = True

    def warm_up(self, assignment: Program) -> None:
        assert self.kept_for is not None
        assert assignment.env["PLACE"] == str(RANKS.index(self.kept_for))
        self.warming = True

    def discard(self) -> None:
        self.unwanted = True


class FakeNursery:
    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.ready = True
        self.full = False
        self.tried = 0

    def spawn(self) -> FakeChild:
        self.tried += 1
        if self.full:
            raise StartFailed("no process can be started")
        self.children.append(FakeChild(len(self.children)))
        return self.children[-1]

    def tend(self) -> bool:
        return self.ready

    @property
    def spares(self) -> list[FakeChild]:
        return [
            child
            for child in self.children
            if child.rank is None and child.exit_code is None and not child.unwanted
        ]


class World:
    """A launcher's turns: whoever is spawned imports at once, who is discarded goes at once."""

    def __init__(self, count: int, warm_up: Callable[[int, str], Program] | None) -> None:
        self.nursery: Any = FakeNursery()
        self.spares = Spares(self.nursery, count, warm_up=warm_up)

    def turn(self, view: Any = RUNNING) -> None:
        self.spares.on_view(view)
        self.spares.tend(view, RANKS)
        for child in self.nursery.children:
            if child.unwanted and child.exit_code is None:
                self.end(child, -9)
            elif not child.warm and child.exit_code is None:
                child.warm = True
                self.spares.handle_output(child)

    def end(self, child: Any, code: int) -> None:
        child.exit_code = code
        self.spares.ended(child)

    def warming(self) -> Any:
        """The one that is being warmed up, after a few turns."""
        for _ in range(5):
            self.turn()
        found = [child for child in self.nursery.spares if child.warming]
        return found[0] if found else None

    def hear(self, child: Any, why_not: str = "", *, passing: bool = False) -> None:
        child.said += json.dumps({"why_not": why_not, "passing": passing}).encode() + b"\n"
        self.spares.handle_output(child)

    def take(self, rank: int, *, on_its_device: bool = True) -> Any:
        child: Any = self.spares.assign(rank, on_its_device=on_its_device)
        child.rank = rank
        return child


def made(place: int, incarnation: str) -> Program:
    return Program(env={"PLACE": str(place)}, script="", module=False, args=[], cwd="", warm_up=True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(spares_module, "tell", lines.append)
    return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(spares_module.events, "now", lambda: now[0])
    return now


def test_one_after_the_other_is_warmed_up_beside_the_plain_ones() -> None:
    world = World(2, made)
    as_rank = []
    while (child := world.warming()) is not None:
        as_rank.append(child.kept_for)
        world.hear(child)
        assert child.warmed_up
    assert as_rank == RANKS
    assert [child.kept_for for child in world.nursery.spares] == [None, None, *RANKS]


def test_who_was_warmed_up_gets_the_place_of_its_rank_and_no_other() -> None:
    world = World(1, made)
    for _ in RANKS:
        world.hear(world.warming())
    plain, fourth, fifth, sixth = world.nursery.children

    assert world.take(5) is fifth
    assert world.take(5) is plain
    fresh = world.take(5)
    assert fresh not in (plain, fourth, sixth)
    assert world.take(6, on_its_device=False) not in (fourth, sixth), "it has moved: another device"
    assert world.take(4) is fourth
    again = world.warming()
    assert again.kept_for == 4


def test_a_loss_ends_the_warm_up_and_does_not_wait_for_it(told: list[str]) -> None:
    world = World(1, made)
    child = world.warming()
    assert world.take(4) is world.nursery.children[0]
    assert child.unwanted
    for _ in range(FAILURES_MAX):  # that is no failure
        child = world.warming()
        world.spares.on_view(pb.View(state=pb.FENCING, checkpoints=[0]))
        assert child.unwanted, "nor is a loss on another machine"
    assert world.warming() is not None
    assert not told


@pytest.mark.parametrize(
    "view",
    [
        None,
        pb.View(state=pb.RUNNING),
        pb.View(state=pb.FORMING, checkpoints=[0]),
        pb.View(state=pb.FINISHED),
    ],
)
def test_nobody_is_warmed_up_before_there_is_something_to_compute(view: Any) -> None:
    world = World(1, made)
    for _ in range(4):
        world.turn(view)
    (child,) = world.nursery.children
    assert world.take(4) is child


@pytest.mark.parametrize("how", ["says so", "ends", "is killed"])
def test_who_has_failed_is_ended_and_after_three_in_a_row_there_are_no_more(
    how: str, told: list[str]
) -> None:
    world = World(0, made)

    def fail() -> None:
        child = world.warming()
        if how == "says so":
            world.hear(child, "b")
            assert child.unwanted, "nobody knows what is left in it"
        else:
            world.end(child, 7 if how == "ends" else -9)

    fail()
    world.hear(world.warming())
    world.hear(world.warming())
    for _ in range(FAILURES_MAX):
        assert not told
        fail()
    assert len(told) == 1
    assert world.warming() is None
    assert [child.kept_for for child in world.nursery.spares] == [4, 5]


def test_what_the_job_was_in_the_way_of_is_tried_again_later(told: list[str], clock: list[float]) -> None:
    world = World(0, made)
    for _ in range(9):
        world.hear(world.warming(), "a recovery is under way", passing=True)
        clock[0] += AGAIN_S - 0.1
        assert world.warming() is None
        clock[0] += 0.2
    assert world.warming() is not None
    assert not told


def test_a_spare_that_cannot_be_started_is_tried_again_later(told: list[str], clock: list[float]) -> None:
    """Also at the start, where the ranks' own processes are needed at once."""
    world = World(2, made)
    world.nursery.full = True
    with pytest.raises(StartFailed):
        world.spares.begin(1)
    world.spares.begin(0)
    tried = world.nursery.tried
    for _ in range(3):
        clock[0] += AGAIN_S - 0.1
        world.turn()
        assert world.nursery.tried == tried
        clock[0] += 0.2
        world.turn()
        tried += 1
        assert world.nursery.tried == tried
    assert told == ["a spare is missing, and tried again later: no process can be started"]
    world.nursery.full = False
    clock[0] += AGAIN_S
    assert world.warming() is not None
    assert [child.kept_for for child in world.nursery.spares] == [None, None, RANKS[0]]
    world.nursery.full = True
    assert [world.take(rank).pid for rank in RANKS[1:]] == [0, 1]
    with pytest.raises(StartFailed):
        world.take(RANKS[2])


def test_a_warm_up_that_takes_too_long_is_ended(told: list[str], clock: list[float]) -> None:
    world = World(0, made)
    for _ in range(FAILURES_MAX):
        child = world.warming()
        clock[0] += SCRIPT_S_MAX - 1.0
        assert world.warming() is child
        clock[0] += 2.0
        world.turn()
        assert child.unwanted
        assert world.take(4) is not child
    assert world.warming() is None
    assert "took longer" in told[0]


def test_a_result_that_comes_in_parts_is_heard_once_it_is_whole() -> None:
    world = World(0, made)
    child = world.warming()
    for part in (b'{"why_not": "", ', b'"passing": false}'):
        child.said += part
        world.spares.handle_output(child)
        assert child.warming
    child.said += b"\n"
    world.spares.handle_output(child)
    assert (child.warming, child.warmed_up) == (False, True)


def test_without_the_option_nobody_is_warmed_up() -> None:
    world = World(1, None)
    assert world.warming() is None
    assert len(world.nursery.children) == 1


def test_spares_that_die_while_they_start_are_made_so_often(told: list[str]) -> None:
    world = World(1, None)
    for _ in range(FAILURES_MAX + 2):
        world.spares.tend(RUNNING, RANKS)
        for child in world.nursery.spares:
            world.end(child, 1)
    assert len(world.nursery.children) == FAILURES_MAX
    assert len(told) == 1


def test_a_spare_starts_a_ranks_sidecar_once_the_job_is_known_to_have_a_log() -> None:
    world = World(2, None)
    world.turn()
    world.turn()
    assert not any(child.prepared for child in world.nursery.spares)
    logged = pb.View(state=pb.RUNNING, checkpoints=[0], log_places=[pb.LogServerPlace(address="127.0.0.1:1")])
    for _ in range(3):  # a second time, the child would object
        world.turn(logged)
    assert all(child.prepared for child in world.nursery.spares)

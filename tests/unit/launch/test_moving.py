"""A rank's place that becomes another one's, without processes (`swift.launch.moving`)."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch import moving
from swift.launch.moving import Moving


class Machine:
    """Ranks 4, 5, 6 and 7, of which 5 was lost."""

    def __init__(self) -> None:
        self.workers: Any = [SimpleNamespace(global_rank=4 + place, local_rank=place) for place in range(4)]
        self.living: dict[int, Any] = {place: self.child(4 + place) for place in (0, 2, 3)}
        self.hosts: dict[int, int] = {}
        self.killed: list[int] = []
        self.moving = Moving()

    def child(self, rank: int) -> Any:
        return SimpleNamespace(
            rank=rank,
            pid=100 + rank,
            incarnation=f"a{rank}",
            kill_group=lambda: self.killed.append(rank),
        )

    def give(self, place: int) -> Any:
        self.living[place] = child = self.child(4 + place)
        child.incarnation = f"b{child.rank}"
        return child

    def see(self, view: pb.View) -> list[str]:
        return self.moving.follow(view, self.workers, self.living, self.hosts, self.give)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(moving, "room_for_one_more", lambda _pids: "")
    return Machine()


def view(rank: int, to: int, *joined: str, generation: int = 3) -> pb.View:
    members = [pb.Member(rank=int(each[1:]), incarnation=each) for each in joined]
    return pb.View(generation=generation, move=pb.Move(rank=rank, to=to), members=members)


def test_it_ends_once_the_other_has_joined(machine: Machine) -> None:
    (line,) = machine.see(view(7, 5, "a4", "a6", "a7"))
    assert line.startswith("rank 7 gives its place to rank 5, which was lost: process 105")
    assert machine.hosts == {1: 3}, "the new process of place 1 runs on the device of place 3"
    assert machine.see(view(7, 5, "a4", "a6", "a7")) == [], "it is under way"
    assert not machine.killed
    came = pb.View(generation=4, members=[pb.Member(rank=5, incarnation="b5")])
    machine.see(came)
    machine.see(came)
    assert machine.killed == [7], "once"
    gave = machine.living.pop(3)
    assert machine.moving.ended(gave)
    machine.see(came)
    assert machine.killed == [7]
    assert not machine.moving.ended(machine.living[2])


def test_a_process_that_never_joins_changes_nothing(machine: Machine) -> None:
    machine.see(view(7, 5))
    assert not machine.moving.ended(machine.living.pop(1)), "its death is judged as any other"
    assert machine.see(view(7, 5)) == [], "not again in this generation"
    assert not machine.killed
    assert machine.see(view(7, 5, generation=8))


def test_a_rank_that_is_lost_before_it_is_told_was_lost_by_itself(machine: Machine) -> None:
    machine.see(view(7, 5))
    assert not machine.moving.ended(machine.living.pop(3))
    machine.see(pb.View(generation=4, members=[pb.Member(rank=5, incarnation="b5")]))
    assert not machine.killed


@pytest.mark.parametrize(("rank", "to"), [(1, 5), (7, 2), (5, 5), (7, 6), (5, 7)])
def test_other_machines_moves_are_not_its_own(machine: Machine, rank: int, to: int) -> None:
    assert machine.see(view(rank, to)) == []
    assert machine.see(pb.View(generation=3)) == []


def test_where_there_is_no_room_nothing_moves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "room_for_one_more", lambda _pids: "1 MiB are free")
    assert machine.see(view(7, 5)) == ["rank 5 was lost, and cannot have the place of rank 7: 1 MiB are free"]
    assert machine.see(view(7, 5)) == []
    assert 1 not in machine.living


def test_a_place_that_has_moved_before_moves_with_its_device(machine: Machine) -> None:
    machine.hosts[3] = 0
    machine.see(view(7, 5))
    assert machine.hosts == {3: 0, 1: 0}

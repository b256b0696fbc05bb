"""A rank's place that becomes another one's, without processes (`swift.launch.moving`)."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch import moving
from swift.launch.children import StartFailed
from swift.launch.moving import Moving


class Machine:
    """Ranks 4, 5, 6 and 7, of which 5 was lost."""

    def __init__(self) -> None:
        self.workers: Any = [SimpleNamespace(global_rank=4 + place, local_rank=place) for place in range(4)]
        self.living: dict[int, Any] = {place: self.child(4 + place, "a") for place in (0, 2, 3)}
        self.hosts: dict[int, int] = {}
        self.waiting: list[int] = []
        self.killed: list[str] = []
        self.moving = Moving(self.hosts, self.waiting, self.give)

    def child(self, rank: int, letter: str) -> Any:
        name = f"{letter}{rank}"
        return SimpleNamespace(
            rank=rank, pid=100 + rank, incarnation=name, kill_group=lambda: self.killed.append(name)
        )

    def give(self, place: int) -> Any:
        self.living[place] = self.child(4 + place, "b")
        return self.living[place]

    def see(
        self, move: tuple[int, int] | None, *joined: str, state: Any = pb.RUNNING, generation: int = 3
    ) -> list[str]:
        view = pb.View(generation=generation, state=state)
        view.members.extend(pb.Member(rank=int(each[1:]), incarnation=each) for each in joined)
        if move is not None:
            view.move.rank, view.move.to = move
        return self.moving.follow(view, self.workers, self.living)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(moving, "room_for_one_more", lambda _pids: "")
    return Machine()


def test_it_ends_once_the_job_runs_with_the_other(machine: Machine) -> None:
    (line,) = machine.see((7, 5), "a4", "a6", "a7")
    assert line.startswith("rank 7 gives its place to rank 5, which was lost: process 105")
    assert machine.hosts == {1: 3}, "the new process of place 1 runs on the device of place 3"
    assert machine.see((7, 5), "a4", "a6", "a7") == [], "it is under way"
    for state in (pb.FENCING, pb.PLANNING, pb.RECOVERING):
        machine.see((7, 5), "a4", "a6", "a7", "b5", state=state, generation=4)
    assert not machine.killed, "it may be needed: the other has no state yet"
    for _ in range(2):
        machine.see((7, 5), "a4", "a6", "a7", "b5", generation=4)
    assert machine.killed == ["a7"], "once"
    assert machine.moving.ended(machine.living.pop(3))
    assert machine.hosts == {1: 3}, "there it stays"
    assert not machine.moving.ended(machine.living[2])
    assert not machine.moving.ended(machine.living[1]), "from here on it is a rank as any other"


@pytest.mark.parametrize("state", [pb.FENCING, pb.FINISHED, pb.RUNNING])
def test_what_is_not_wanted_any_more_is_let_go(machine: Machine, state: Any) -> None:
    """Another rank was lost before it has joined, or the job has ended."""
    machine.see((7, 5))
    machine.see(None, "a4", "a7", state=state, generation=4)
    assert machine.killed == ["b5"], "who was to give its place keeps it"
    assert machine.moving.ended(machine.living.pop(1))
    assert machine.hosts == {}


def test_a_rank_that_is_needed_by_then_keeps_its_place(machine: Machine) -> None:
    """The other has joined, and the coordinator does not want the end of this one any more."""
    machine.see((7, 5))
    machine.see((7, 5), "a7", "b5", state=pb.FENCING, generation=4)
    machine.see(None, "a7", "b5", generation=5)
    assert not machine.killed
    assert not machine.moving.ended(machine.living[1])


def test_a_process_that_never_joins_changes_nothing(machine: Machine) -> None:
    machine.see((7, 5))
    assert machine.moving.ended(machine.living.pop(1)), "whatever its exit code"
    assert machine.hosts == {}
    assert machine.see((7, 5)) == [], "not again in this generation"
    assert not machine.killed
    assert machine.see((7, 5), generation=8)


def test_a_rank_that_is_lost_before_it_is_told_was_lost_by_itself(machine: Machine) -> None:
    machine.see((7, 5))
    assert not machine.moving.ended(machine.living.pop(3))
    machine.see((7, 5), "b5", generation=4)
    assert not machine.killed


@pytest.mark.parametrize(("rank", "to"), [(1, 5), (7, 2), (5, 5), (7, 6), (5, 7)])
def test_other_machines_moves_are_not_its_own(machine: Machine, rank: int, to: int) -> None:
    assert machine.see((rank, to)) == []
    assert machine.see(None) == []


@pytest.mark.parametrize("place", [1, 3])
def test_a_place_that_gets_a_process_anyway_has_no_part_in_it(machine: Machine, place: int) -> None:
    machine.waiting.append(place)
    assert machine.see((7, 5)) == []
    machine.waiting.clear()
    assert machine.see((7, 5))


@pytest.mark.parametrize("state", [pb.FORMING, pb.FENCING, pb.RECOVERING, pb.FINISHED, pb.FAILED])
def test_nothing_begins_unless_the_job_runs(machine: Machine, state: Any) -> None:
    assert machine.see((7, 5), state=state) == []


def test_where_there_is_no_room_nothing_moves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "room_for_one_more", lambda _pids: "1 MiB are free")
    assert machine.see((7, 5)) == ["rank 5 was lost, and cannot have the place of rank 7: 1 MiB are free"]
    assert machine.see((7, 5)) == []
    assert 1 not in machine.living
    assert machine.hosts == {}


def test_a_place_that_has_moved_before_moves_with_its_device(machine: Machine) -> None:
    machine.hosts.update({3: 0, 1: 2})
    machine.see((7, 5))
    assert machine.hosts == {3: 0, 1: 0}
    machine.moving.ended(machine.living.pop(1))
    assert machine.hosts == {3: 0, 1: 2}


def test_one_for_which_no_process_can_be_started_changes_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(_place: int) -> Any:
        raise StartFailed("no process can be started")

    monkeypatch.setattr(machine.moving, "_give_rank", give)
    assert machine.see((7, 5), "a4", "a6", "a7") == [
        "rank 5 was lost, and cannot have the place of rank 7: no process can be started"
    ]
    assert machine.hosts == {}
    assert machine.see((7, 5), "a4", "a6", "a7") == [], "once in a generation"

"""A rank of this machine gives its place to one that was lost, because the coordinator has found that this pays.

    (a View)  names both → a process joins for the lost rank, on the device of the other, which goes on training →
    (a View)  RUNNING, has it as a member and still names both → the other one is ended

So there is never a rank less than before. The process is let go if the View names both no more before it has joined.
One that ends before it has joined changes nothing, however it ends, and is not tried again in that generation.
"""

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.launch.beside import room_for_one_more
from swift.launch.children import Child, StartFailed
from swift.launch.torch_names import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    gives: Child
    takes: Child
    place: int
    """Local rank of the one that takes."""
    before: int | None
    """On whose device that place was; None: on its own."""


class Moving:
    """Of one launcher. Its main thread."""

    def __init__(
        self, hosts: MutableMapping[int, int], waiting: Container[int], give_rank: Callable[[int], Child]
    ) -> None:
        """`hosts`: by local rank, on whose device it is if not on its own. `waiting`: the local ranks that get a
        process anyway. `give_rank` starts a process for the rank of a place."""
        self._hosts = hosts
        self._waiting = waiting
        self._give_rank = give_rank
        self._under_way: dict[str, _Move] = {}
        """By the incarnation of the process that takes a place, until it is a member of a job that runs."""
        self._given: list[Child] = []
        """Those that were ended, because their place has been taken."""
        self._tried: set[tuple[int, int]] = set()
        """(generation, lost rank)"""

    def follow(self, view: pb.View, workers: Sequence[Worker], living: Mapping[int, Child]) -> list[str]:
        """Does what this View asks for. What it has done, for people. `workers`: the places of this machine; `living`:
        their processes, by local rank."""
        asked = (view.move.rank, view.move.to) if view.HasField("move") else None
        joined, runs = {member.incarnation for member in view.members}, view.state == pb.RUNNING
        for incarnation, move in list(self._under_way.items()):
            holds = asked == (move.gives.rank, move.takes.rank) and move.gives in living.values()
            if incarnation not in joined:
                if not holds:
                    move.takes.kill_group()
            elif runs:
                del self._under_way[incarnation]
                if holds:
                    self._given.append(move.gives)
                    events.emit("gave_place", rank=move.gives.rank, to=move.takes.rank, pid=move.gives.pid)
                    move.gives.kill_group()
        return self._begin(view, asked, workers, living) if runs and asked is not None else []

    def _begin(
        self, view: pb.View, asked: tuple[int, int], workers: Sequence[Worker], living: Mapping[int, Child]
    ) -> list[str]:
        places = {worker.global_rank: worker.local_rank for worker in workers}
        rank, lost = asked
        if rank not in places or lost not in places or (view.generation, lost) in self._tried:
            return []
        source, place = places[rank], places[lost]
        if source not in living or place in living or source in self._waiting or place in self._waiting:
            return []
        self._tried.add((view.generation, lost))
        if why := room_for_one_more(child.pid for child in living.values()):
            return [f"rank {lost} was lost, and cannot have the place of rank {rank}: {why}"]
        gives, before = living[source], self._hosts.get(place)
        self._hosts[place] = self._hosts.get(source, source)
        try:
            takes = self._give_rank(place)
        except StartFailed as error:
            self._put_back(place, before)
            return [f"rank {lost} was lost, and cannot have the place of rank {rank}: {error}"]
        self._under_way[takes.incarnation] = _Move(gives=gives, takes=takes, place=place, before=before)
        return [
            f"rank {rank} gives its place to rank {lost}, which was lost: process {takes.pid}; losses at two stages "
            "cost less"
        ]

    def ended(self, child: Child) -> bool:
        """A rank's process has. Whether its place stays vacant, whatever its exit code says: it was ended here, or it
        was to take another one's place and has not come so far."""
        move = self._under_way.pop(child.incarnation, None)
        if move is not None:
            self._put_back(move.place, move.before)
            return True
        if child in self._given:
            self._given.remove(child)
            return True
        return False

    def _put_back(self, place: int, before: int | None) -> None:
        del self._hosts[place]
        if before is not None:
            self._hosts[place] = before

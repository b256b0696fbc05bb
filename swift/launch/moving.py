"""A rank of this machine gives its place to one that was lost, because the coordinator has found that this pays.

    (a View)  names both → (agent) a process joins for the lost rank, on the device of the other, which still trains →
    (a View)  has it as a member: the step under way is cut short anyway → (agent) the other one is ended

So there is never a rank less than before, and the job loses one step at most. A process that ends before it has joined
changes nothing, and is not tried again in that generation.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.launch.beside import room_for_one_more
from swift.launch.children import Child
from swift.launch.torch_names import Worker


class Moving:
    """Of one launcher. Its main thread."""

    def __init__(self) -> None:
        self._under_way: dict[str, Child] = {}
        """By the incarnation of the process that takes a place: who gives it."""
        self._ended: list[Child] = []
        """Those whose place has been taken: they were told to end."""
        self._tried: set[tuple[int, int]] = set()
        """(generation, lost rank)"""

    def follow(
        self,
        view: pb.View,
        workers: Sequence[Worker],
        living: Mapping[int, Child],
        hosts: MutableMapping[int, int],
        give_rank: Callable[[int], Child],
    ) -> list[str]:
        """Does what this View asks for. What it has done, for people.

        `workers`: the places of this machine; `living`: their processes, by local rank; `hosts`: by local rank, on
        whose device it is if not on its own; `give_rank`: starts a process for the rank of a place."""
        said = []
        if (move := self._wanted(view, workers, living)) is not None:
            gives, lost = living[move[0]], view.move.to
            if why := room_for_one_more(child.pid for child in living.values()):
                said.append(f"rank {lost} was lost, and cannot have the place of rank {gives.rank}: {why}")
            else:
                hosts[move[1]] = hosts.get(move[0], move[0])
                takes = give_rank(move[1])
                self._under_way[takes.incarnation] = gives
                said.append(
                    f"rank {gives.rank} gives its place to rank {lost}, which was lost: process {takes.pid}; losses "
                    "at two stages cost less"
                )
        for takes_place in sorted({member.incarnation for member in view.members} & self._under_way.keys()):
            gives = self._under_way[takes_place]
            if gives not in self._ended:
                self._ended.append(gives)
                events.emit("gave_place", rank=gives.rank, pid=gives.pid)
                gives.kill_group()
        return said

    def _wanted(
        self, view: pb.View, workers: Sequence[Worker], living: Mapping[int, Child]
    ) -> tuple[int, int] | None:
        """(the local rank that gives its place, the lost one) of a move that has not been tried."""
        move, places = view.move, {worker.global_rank: worker.local_rank for worker in workers}
        if not view.HasField("move") or (view.generation, move.to) in self._tried:
            return None
        if places.get(move.rank) not in living or move.to not in places or places[move.to] in living:
            return None
        self._tried.add((view.generation, move.to))
        return places[move.rank], places[move.to]

    def ended(self, child: Child) -> bool:
        """A rank's process has. Whether it was ended here, because its place is another one's."""
        self._under_way = {
            takes: gives
            for takes, gives in self._under_way.items()
            if gives is not child and takes != child.incarnation
        }
        if child in self._ended:
            self._ended.remove(child)
            return True
        return False

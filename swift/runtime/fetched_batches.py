"""Batches of a lost rank, fetched from a rank of its pipeline that is left (`fetch_batches`).

A loader may read what only the machines of its own pipeline have. So no rank is asked to make another pipeline's
loader. All ranks of a pipeline make the same one instead, and draw the same from it in each step. Before a step that
others compute for a lost rank, the first one of its pipeline that is left begins its own step, as far as the call of
the schedule. What its loaders have given until then goes to whoever computes microbatches of that pipeline. The step it
has begun is taken back.

The first step is a trial: each rank is given what those of the next pipeline have drawn, and the ranks of a pipeline
compare what they draw.
"""

from collections.abc import Callable, Collection, Mapping

import torch

from swift.recovery import Assignment
from swift.runtime.draws import Drawn, digest, message, read
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.origin_loaders import OriginLoaders
from swift.runtime.tags import BATCHES, BATCHES_SIZE

Wanted = Mapping[int, Collection[int]]
"""Origin -> the slots that compute steps of it, besides its own."""


class FetchedBatches:
    """At one rank. Trainer's thread. Its calls raise RuntimeError if a rank is lost."""

    def __init__(
        self,
        slot: int,
        assignment: Callable[[], Assignment],
        world: ReconfigurableGroup,
        loaders: OriginLoaders,
    ) -> None:
        """`assignment`: of this generation. `world`: all ranks, for the session itself."""
        self._slot = slot
        self._assignment = assignment
        self._world = world
        self._loaders = loaders

    def fetch(self, wanted: Wanted, draw: Callable[[], Drawn]) -> list[str]:
        """(all ranks, with the same `wanted`) `draw`: what this rank's loaders give in its own step. Returns what is
        wrong with what has come: loaders elsewhere are not where this rank's are, so they give other batches than a
        lost rank of this stage would have had."""
        assignment, sends, wrong = self._assignment(), [], []
        own, position = assignment.slots[self._slot].dp_rank, self._loaders.position() if wanted else b""
        if own in wanted and self._giver(own) == self._slot:
            data = torch.frombuffer(bytearray(position + message(draw())), dtype=torch.uint8)
            for to in wanted[own]:
                size = torch.tensor([len(data)])
                sends += [self._world.send([size], to, BATCHES_SIZE), self._world.send([data], to, BATCHES)]
        for origin in sorted(wanted):
            if self._slot in wanted[origin]:
                giver = self._giver(origin)
                told = self._received(giver)
                self._loaders.take(origin, read(told[len(position) :]))
                if told[: len(position)] != position:
                    wrong.append(
                        f"loaders of rank {giver}, which gives the batches of data-parallel rank {origin}, have "
                        f"another state than those of rank {self._slot}: with fetch_batches=True all ranks draw the "
                        "same from them in each step"
                    )
        for send in sends:
            send.wait()
        return wrong

    def apart(self, drawn: Drawn) -> tuple[int, int] | None:
        """(all ranks) Two ranks of a pipeline whose loaders have given different things. None: there are none."""
        assignment = self._assignment()
        told = self._world.gathered(torch.frombuffer(bytearray(digest(drawn)), dtype=torch.uint8))
        first: dict[int, tuple[int, torch.Tensor]] = {}
        for slot, mine in zip(assignment.occupied, told, strict=True):
            other, theirs = first.setdefault(assignment.slots[slot].dp_rank, (slot, mine))
            if not torch.equal(mine, theirs):
                return other, slot
        return None

    def _giver(self, origin: int) -> int:
        """The first of its pipeline that is left. (Without one the coordinator lets nobody go on.)"""
        assignment = self._assignment()
        return min(slot for slot in assignment.occupied if assignment.slots[slot].dp_rank == origin)

    def _received(self, source: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        self._world.recv([size], source, BATCHES_SIZE).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._world.recv([data], source, BATCHES).wait()
        return bytes(data.numpy())


def adopters(assignment: Assignment) -> Wanted:
    """Of a world that lacks ranks."""
    wanted: dict[int, list[int]] = {}
    for slot in assignment.occupied:
        for origin in assignment.adopted_by(slot):
            wanted.setdefault(origin, []).append(slot)
    return wanted


def neighbours(assignment: Assignment, next_to: Mapping[int, int]) -> Wanted:
    """Of a trial in a full world: the ranks of each origin compute a step of another one."""
    return {
        other: [slot for slot in assignment.occupied if assignment.slots[slot].dp_rank == origin]
        for origin, other in next_to.items()
    }

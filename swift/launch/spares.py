"""The spares of one machine: how many there are, which of them are warmed up, and which one gets a lost rank's place.

    (agent)  ``take`` for a place → … → ``heard`` and ``ended`` of children → ``tend`` when nothing is to be recovered

A spare is *warm* once it has imported what ranks need. With ``--warm-up`` it is *warmed up* besides: it has run the
script as a rank would (`swift.warm_up`). While it does so it takes no place: whoever is needed then is a new process,
and the warm-up is ended, so that it takes neither time nor memory from the recovery.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.launch.children import Child, Nursery
from swift.launch.worker import Assignment
from swift.words import tell

SPARE_FAILURES_MAX = 3
"""Spares that may die in a row before they are warm; then there are none any more."""
WARM_UP_FAILURES_MAX = 3
"""Warm-ups that may fail in a row; then there are none any more."""


AGAIN_S = 2.0
"""A warm-up that the job was in the way of is tried again after this time."""
WARM_UP_S_MAX = 900.0
"""A warm-up that takes longer is ended: it may wait for something that does not come."""


class Spares:
    """Those of one launcher. Its main thread."""

    def __init__(
        self, nursery: Nursery, count: int, *, warm_up: Callable[[int, str], Assignment] | None
    ) -> None:
        """`warm_up(local_rank, incarnation)`: what is to be run as the rank of that place would; None: spares are not
        warmed up."""
        self._nursery = nursery
        self.count = count
        self._warm_up = warm_up
        self._failures = 0
        self._warm_up_failures = 0
        self._warm_up_began = 0.0
        self._next_warm_up = 0.0
        """Not before."""

    def spawn(self) -> Child:
        child = self._nursery.spawn()
        events.emit("worker_spawned", pid=child.pid, incarnation=child.incarnation, forked=child.forked)
        return child

    def take(self, rank: int) -> Child:
        """The one that is to become this rank; a new process if there is none.

        One that was warmed up as another rank is not taken: what modules and torch's caches keep of that rank (its
        number, its place in a mesh) would be in the way.
        """
        spares = self._nursery.spares
        for child in spares:
            if child.warming_for is not None:
                child.kill_group()
        fit = [child for child in spares if child.warming_for is None and child.warmed_for in (rank, None)]
        return next(iter(fit), None) or self.spawn()

    def tend(self, view: pb.View | None, ranks: Sequence[int]) -> None:
        """(nothing is to be recovered) Makes what is missing, and warms up what is not. `ranks`: of this machine, by
        place."""
        wanted = self.count if self._failures < SPARE_FAILURES_MAX else 0
        # Also without spares: the next replacement should find a fork server.
        if self._nursery.tend() and len(self._nursery.spares) < wanted:
            self.spawn()
        if view is not None and view.state == pb.RUNNING and view.checkpoints:
            self._warm_up_next(ranks)

    def _warm_up_next(self, ranks: Sequence[int]) -> None:
        """One at a time, as the rank for which there are the fewest."""
        spares = self._nursery.spares
        under_way = next((child for child in spares if child.warming_for is not None), None)
        if under_way is not None and events.now() - self._warm_up_began > WARM_UP_S_MAX:
            under_way.warming_for = None
            under_way.kill_group()
            self._count_warm_up_failure(f"one took longer than {WARM_UP_S_MAX:g} s")
        if self._warm_up is None or under_way is not None or events.now() < self._next_warm_up:
            return
        child = next((child for child in spares if child.warm and child.warmed_for is None), None)
        if child is None or self._warm_up_failures >= WARM_UP_FAILURES_MAX:
            return
        there = Counter(child.warmed_for for child in spares)
        rank = min(ranks, key=lambda rank: there[rank])
        child.warm_up(rank, self._warm_up(ranks.index(rank), child.incarnation))
        self._warm_up_began = events.now()
        events.emit("warm_up_begin", rank=rank, pid=child.pid)

    def heard(self, child: Child) -> None:
        """It has said something."""
        if child.warming_for is None:
            self._failures = 0
            events.emit("worker_warm", pid=child.pid, rank=child.rank)
            return
        line, end, child.said = child.said.partition(b"\n")
        if not end:
            child.said = line
            return
        rank, child.warming_for = child.warming_for, None
        warmed = json.loads(line)
        events.emit("warmed_up", rank=rank, pid=child.pid, **warmed)
        if warmed["passing"]:
            self._next_warm_up = events.now() + AGAIN_S
        elif warmed["why_not"]:
            self._count_warm_up_failure(warmed["why_not"])
        else:
            child.warmed_for, self._warm_up_failures = rank, 0

    def ended(self, child: Child) -> None:
        """A spare of these."""
        events.emit("spare_exit", pid=child.pid, code=child.exit_code)
        if child.warming_for is not None and child.exit_code != -9:
            self._count_warm_up_failure(f"the script has ended its process (exit code {child.exit_code})")
        if not child.warm:
            self._failures += 1
            if self._failures == SPARE_FAILURES_MAX:
                tell(f"{SPARE_FAILURES_MAX} spares died while they started: no more of them are made")

    def _count_warm_up_failure(self, why: str) -> None:
        self._warm_up_failures += 1
        if self._warm_up_failures == WARM_UP_FAILURES_MAX:
            tell(f"spares are not warmed up any more, after {WARM_UP_FAILURES_MAX} that could not be: {why}")

"""Processes of one machine that are no ranks: spares, warmed up or not, and rehearsals.

The rehearsals of one machine's ranks: a process that is no rank recovers as one of them would, from a checkpoint and
the log, and compares (`swift_ft.train.rehearsal`).

    (agent)  ``tend`` when nothing is to be recovered: starts the next one, of a rank whose steps are recorded
             → ``heard`` and ``ended`` of its process → the coordinator is told
             ``on_view`` at each View: a recovery ends the process at once

It is a process of its own, with the lowest priority, and one at a time. A spare takes a lost rank's place as if there
were no rehearsals.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.children import Child, Nursery, StartFailed
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.worker import Program
from swift_ft.text import tell

# The spares of one machine: how many there are, which of them are warmed up, and which one gets a lost rank's place.
#
#     (agent)  ``assign`` to a rank → … → ``heard`` and ``ended`` of children → ``on_view`` at each View → ``tend`` when
#              nothing is to be recovered
#
# A spare is *warm* once it has imported what ranks need; it takes any rank's place. With ``--warm-up`` there is one
# more for each rank, which is *warmed up*: it has run the script as that rank would (`swift_ft.warm_up`), and takes
# that place only. What modules and torch's caches keep of a rank (its number, its place in a mesh) would be in
# another one's way.
#
# While a spare is being warmed up it takes no place. It is ended when the job has something to recover, so that it
# takes neither time nor memory from that. One whose warm-up has failed is ended too: nobody knows what is left in it.

SPARE_FAILURES_MAX = 3
"""Spares that may die in a row before they are warm; then there are none any more."""
WARM_UP_FAILURES_MAX = 3
"""Warm-ups that may fail in a row; then there are none any more."""
AGAIN_S = 2.0
AGAIN_S_MAX = 60.0
"""A warm-up that the job was in the way of is tried again after this time; longer, if that comes again. So is the start
of a spare that failed."""
WARM_UP_S_MAX = 900.0
"""A warm-up that takes longer is ended: it may wait for something that does not come."""


class Spares:
    """Those of one launcher. Its main thread."""

    def __init__(
        self, nursery: Nursery, count: int, *, warm_up: Callable[[int, str], Program] | None
    ) -> None:
        """`count`: of those for any rank. `warm_up(local_rank, incarnation)`: what is to be run as the rank of that
        place would; None: spares are not warmed up."""
        self._nursery = nursery
        self.count = count
        self._warm_up = warm_up
        self._failures = 0
        self._warm_up_failures = 0
        self._warm_up_began = 0.0
        self._next_warm_up = 0.0
        """Not before."""
        self._again_s = AGAIN_S
        self._next_start = 0.0
        """Of a spare; not before."""
        self._start_again_s = AGAIN_S

    def begin(self, ranks: int) -> None:
        """The first processes: one for each rank, and the spares. Raises StartFailed: not even those of the ranks."""
        for _ in range(ranks):
            self.spawn()
        for _ in range(self.count):
            self._start()

    def _start(self) -> Child | None:
        """A spare. None: there can be none now; nobody needs it yet, so that is tried again later."""
        if events.now() < self._next_start:
            return None
        try:
            child = self.spawn()
        except StartFailed as error:
            events.emit("spare_not_started", reason=str(error))
            if self._start_again_s == AGAIN_S:
                tell(f"a spare is missing, and tried again later: {error}")
            self._next_start = events.now() + self._start_again_s
            self._start_again_s = min(AGAIN_S_MAX, 2 * self._start_again_s)
            return None
        self._start_again_s = AGAIN_S
        return child

    def spawn(self) -> Child:
        """Raises StartFailed."""
        child = self._nursery.spawn()
        events.emit("worker_spawned", pid=child.pid, incarnation=child.incarnation, forked=child.forked)
        return child

    def assign(self, rank: int, *, on_its_device: bool) -> Child:
        """The one that is to become this rank; a new process if there is none. `on_its_device`: of its own place; else
        what was warmed up is of no use. Raises StartFailed."""
        self._end_warm_up()
        spares = self._nursery.spares
        warmed_up = [
            child for child in spares if child.warmed_up and child.kept_for == rank and on_its_device
        ]
        plain = [child for child in spares if child.kept_for is None]
        return next(iter([*warmed_up, *plain]), None) or self.spawn()

    def on_view(self, view: pb.View | None) -> None:
        """No warm-up goes on beside a recovery."""
        if view is not None and view.state != pb.RUNNING:
            self._end_warm_up()

    def _end_warm_up(self) -> None:
        for child in self._nursery.spares:
            if child.warming:
                child.discard()

    def tend(self, view: pb.View | None, ranks: Sequence[int]) -> None:
        """(nothing is to be recovered) Makes what is missing, and warms up what is not. `ranks`: of this machine, by
        place."""
        if self._failures >= SPARE_FAILURES_MAX:
            return
        # Also without spares: the next replacement should find a fork server.
        forks = self._nursery.tend()
        plain = sum(child.kept_for is None for child in self._nursery.spares)
        if forks and plain < self.count:
            self._start()
        elif view is not None and view.state == pb.RUNNING and view.checkpoints:
            self._warm_up_next(ranks, spawns=forks)

    def _warm_up_next(self, ranks: Sequence[int], *, spawns: bool) -> None:
        """One at a time."""
        kept = [child for child in self._nursery.spares if child.kept_for is not None]
        under_way = next((child for child in kept if not child.warmed_up), None)
        if under_way is not None and under_way.warming:
            if events.now() - self._warm_up_began > WARM_UP_S_MAX:
                under_way.discard()
                self._count_warm_up_failure(f"one took longer than {WARM_UP_S_MAX:g} s")
            return
        if self._warm_up is None or self._warm_up_failures >= WARM_UP_FAILURES_MAX:
            return
        if under_way is None:
            rank = next((rank for rank in ranks if rank not in {child.kept_for for child in kept}), None)
            due = spawns and events.now() >= self._next_warm_up
            if rank is not None and due and (child := self._start()) is not None:
                child.kept_for = rank
        elif under_way.warm and under_way.kept_for is not None:
            place = ranks.index(under_way.kept_for)
            under_way.warm_up(self._warm_up(place, under_way.incarnation))
            self._warm_up_began = events.now()
            events.emit("warm_up_begin", rank=under_way.kept_for, pid=under_way.pid)

    def heard(self, child: Child) -> None:
        """It has said something."""
        if not child.warming:
            self._failures = 0
            events.emit("worker_warm", pid=child.pid, rank=child.rank)
            return
        line, end, child.said = child.said.partition(b"\n")
        if not end:
            child.said = line
            return
        warmed = json.loads(line)
        child.warming = False
        events.emit("warmed_up", rank=child.kept_for, pid=child.pid, **warmed)
        if not warmed["why_not"]:
            child.warmed_up, self._warm_up_failures, self._again_s = True, 0, AGAIN_S
            return
        child.discard()
        if warmed["passing"]:
            self._next_warm_up = events.now() + self._again_s
            self._again_s = min(AGAIN_S_MAX, 2 * self._again_s)
        else:
            self._count_warm_up_failure(warmed["why_not"])

    def ended(self, child: Child) -> None:
        """A spare of these."""
        events.emit("spare_exit", pid=child.pid, code=child.exit_code)
        if child.unwanted:
            return
        if child.warming:
            self._count_warm_up_failure(f"its process has ended (exit code {child.exit_code})")
        if not child.warm:
            self._failures += 1
            if self._failures == SPARE_FAILURES_MAX:
                tell(f"{SPARE_FAILURES_MAX} spares died while they started: no more of them are made")

    def _count_warm_up_failure(self, why: str) -> None:
        self._warm_up_failures += 1
        if self._warm_up_failures == WARM_UP_FAILURES_MAX:
            events.emit("warm_ups_given_up", reason=why)
            tell(f"spares are not warmed up any more, after {WARM_UP_FAILURES_MAX} that could not be: {why}")


FAILURES_MAX = 3
"""Rehearsals of a rank that may fail in a row; then it is not rehearsed any more."""
REHEARSAL_S_MAX = 900.0
"""One that takes longer is ended."""


class Rehearsals:
    """Those of one launcher. Its main thread."""

    def __init__(
        self, nursery: Nursery, link: CoordinatorLink, program: Callable[[int, str, int], Program]
    ) -> None:
        """`program(local_rank, incarnation, version)`: what is to be run as the rank of that place would, from that
        version on."""
        self._nursery = nursery
        self._link = link
        self._program = program
        self._child: Child | None = None
        self._rank = self._version = 0
        self._generation = 0
        self._known = False
        """The View has said that it is under way."""
        self._until = 0.0
        self._tried: dict[int, int] = {}
        """rank -> the version of its last rehearsal: what the coordinator says of it may be older."""
        self._failures: Counter[int] = Counter()

    def give_way(self) -> None:
        """A rank of this machine was lost: the View says so later."""
        if self._child is not None:
            self._end("")

    def on_view(self, view: pb.View | None) -> None:
        """None goes on beside a recovery."""
        if self._child is None:
            return
        if view is None or view.state != pb.RUNNING or view.generation != self._generation:
            self._end("")
            return
        known = any(each.rank == self._rank and each.HasField("under_way") for each in view.rehearsals)
        if self._known and not known:
            self._end("")  # its log is not kept any more
        self._known = known

    def tend(self, view: pb.View | None, ranks: Sequence[int]) -> None:
        """(nothing is to be recovered) `ranks`: of this machine, by place."""
        if self._child is not None:
            if events.now() > self._until:
                self._fail(f"it took longer than {REHEARSAL_S_MAX:g} s")
            return
        if view is None or view.state != pb.RUNNING or not self._nursery.tend():
            return
        due = [
            known
            for known in view.rehearsals
            if known.rank in ranks
            and known.HasField("recorded")
            and known.recorded == max(view.checkpoints, default=None)  # the log is trimmed below it
            and known.recorded > self._tried.get(known.rank, -1)
            and self._failures[known.rank] < FAILURES_MAX
        ]
        if due:
            chosen = min(due, key=lambda known: (known.done, known.rank))
            self._begin(ranks.index(chosen.rank), chosen, view.generation)

    def _begin(self, place: int, chosen: pb.Rehearsal, generation: int) -> None:
        try:
            child = self._nursery.spawn()
        except StartFailed:
            return  # it is tried again; a spare that cannot be started is said
        self._tried[chosen.rank] = chosen.recorded
        self._child, self._rank, self._version = child, chosen.rank, chosen.recorded
        self._generation, self._until = generation, events.now() + REHEARSAL_S_MAX
        self._known = False
        child.rehearse(self._program(place, child.incarnation, chosen.recorded))
        events.emit("rehearsal_begin", rank=chosen.rank, version=chosen.recorded, pid=child.pid)
        self._link.notify_rehearsed(chosen.rank, chosen.recorded, under_way=True)

    def heard(self, child: Child) -> None:
        """It has said something."""
        line, end, _ = child.said.partition(b"\n")
        if child is not self._child or not end:
            return
        found = json.loads(line)
        events.emit("rehearsal_end", rank=self._rank, version=self._version, pid=child.pid, **found)
        if found.pop("passing"):
            self._end(found["why_not"])
        elif found["why_not"]:
            self._fail(found["why_not"])
        else:
            self._failures[self._rank] = 0
            self._child = None
            self._link.notify_rehearsed(
                self._rank, self._version, steps=found["steps"], difference=found["difference"]
            )

    def ended(self, child: Child) -> None:
        """A process of these."""
        if child is self._child:
            self._fail(f"its process has ended (exit code {child.exit_code})")

    def _fail(self, why: str) -> None:
        self._failures[self._rank] += 1
        if self._failures[self._rank] == FAILURES_MAX:
            why = f"{why}; no more are tried, after {FAILURES_MAX}"
        self._end(why)

    def _end(self, why: str) -> None:
        """`why`: what the coordinator is told; empty: it knows."""
        child, self._child = self._child, None
        assert child is not None
        child.discard()
        if why:
            self._link.notify_rehearsed(self._rank, self._version, why_not=why)

"""Processes of one machine that are no ranks: spares, warmed up or not, and rehearsals.

In a rehearsal, a process that is no rank recovers as one of the machine's ranks would, from a checkpoint and the log,
and compares (`swift_ft.train.rehearsal`).

    (agent)  ``tend`` while there is no recovery: starts the next one, of a rank whose steps are recorded
             → ``handle_output`` and ``ended`` of its process → a notice to the coordinator
             ``on_view`` at each View: a recovery ends the process at once

It is a separate process, with the lowest priority, and one at a time. A spare takes a lost rank's place as if there
were no rehearsals.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.children import Child, Nursery, StartFailed
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.worker import Program
from swift_ft.text import tell

# The spares of one machine: their number, their warm-up, and the choice of one for a lost rank's place.
#
#     (agent)  ``assign`` to a rank → … → ``handle_output`` and ``ended`` of children → ``on_view`` at each View →
#              ``tend`` while there is no recovery
#
# A spare is *warm* once it has imported the modules of ranks; it takes any rank's place. With ``--warm-up`` there is
# one more for each rank, which is *warmed up*: it has run the script as that rank would (`swift_ft.warm_up`), and takes
# that place only. The values of a rank that modules and torch's caches keep (its number, its place in a mesh) would be
# wrong for another rank.
#
# While a spare is being warmed up it takes no place. It is ended when the job has to recover, so that it takes neither
# time nor memory from the recovery. A spare whose warm-up has failed is ended too, because its state is unknown.

FAILURES_MAX = 3
"""Spares that may die in a row before they are warm, warm-ups, and rehearsals of a rank, that may fail in a row; then
no more are started."""
AGAIN_S = 10.0
"""Seconds until a warm-up that the job has interrupted is tried again, and the failed start of a spare."""
SCRIPT_S_MAX = 900.0
"""Seconds after which a warm-up or a rehearsal is ended: it may wait for an event that does not come."""


class Spares:
    def __init__(
        self, nursery: Nursery, count: int, *, warm_up: Callable[[int, str], Program] | None
    ) -> None:
        """Initializes without spares. `count`: spares for any rank. `warm_up(local_rank, incarnation)`: the program
        that the rank of that place would run; None: spares are not warmed up."""
        self._nursery = nursery
        self.count = count
        self._warm_up = warm_up
        self._failures = 0
        self._warm_up_failures = 0
        self._warm_up_began = 0.0
        self._next_warm_up = 0.0
        """The earliest time of the next warm-up."""
        self._next_start = 0.0
        """The earliest time of a spare's next start, after one that has failed; 0: none has."""

    def begin(self, ranks: int) -> None:
        """Starts the first processes: one for each rank, and the spares. Raises StartFailed if a rank's process cannot
        be started."""
        for _ in range(ranks):
            self.spawn()
        for _ in range(self.count):
            self._start()

    def _start(self) -> Child | None:
        """Starts a spare. Returns None if that is impossible now; a later call tries again."""
        if events.now() < self._next_start:
            return None
        try:
            child = self.spawn()
        except StartFailed as error:
            events.emit("spare_not_started", reason=str(error))
            if not self._next_start:
                tell(f"a spare is missing, and tried again later: {error}")
            self._next_start = events.now() + AGAIN_S
            return None
        self._next_start = 0.0
        return child

    def spawn(self) -> Child:
        child = self._nursery.spawn()
        events.emit("worker_spawned", pid=child.pid, incarnation=child.incarnation, forked=child.forked)
        return child

    def assign(self, rank: int, *, on_its_device: bool) -> Child:
        """Returns the spare that is to become this rank, or else a new process. `on_its_device`: the rank runs on its
        own place's device; else a warmed-up spare is of no use. Raises StartFailed."""
        self._end_warm_up()
        spares = self._nursery.spares
        warmed_up = [
            child for child in spares if child.warmed_up and child.kept_for == rank and on_its_device
        ]
        plain = [child for child in spares if child.kept_for is None]
        return next(iter([*warmed_up, *plain]), None) or self.spawn()

    def on_view(self, view: pb.View | None) -> None:
        if view is not None and view.state != pb.RUNNING:
            self._end_warm_up()

    def _end_warm_up(self) -> None:
        for child in self._nursery.spares:
            if child.warming:
                child.discard()

    def tend(self, view: pb.View | None, ranks: Sequence[int]) -> None:
        """Starts missing spares, and warms up others; called while there is no recovery. `ranks`: of this machine, by
        place."""
        if self._failures >= FAILURES_MAX:
            return
        # Also without spares, so that the next replacement finds a fork server.
        forks = self._nursery.tend()
        spares = self._nursery.spares
        if view is not None and view.log_places:
            for child in spares:
                if child.warm and not child.prepared and not child.warming:
                    child.prepare()
        plain = sum(child.kept_for is None for child in spares)
        if forks and plain < self.count:
            self._start()
        elif view is not None and view.state == pb.RUNNING and view.checkpoints:
            self._warm_up_next(ranks, spawns=forks)

    def _warm_up_next(self, ranks: Sequence[int], *, spawns: bool) -> None:
        kept = [child for child in self._nursery.spares if child.kept_for is not None]
        under_way = next((child for child in kept if not child.warmed_up), None)
        if under_way is not None and under_way.warming:
            if events.now() - self._warm_up_began > SCRIPT_S_MAX:
                under_way.discard()
                self._count_warm_up_failure(f"one took longer than {SCRIPT_S_MAX:g} s")
            return
        if self._warm_up is None or self._warm_up_failures >= FAILURES_MAX:
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

    def handle_output(self, child: Child) -> None:
        if not child.warming:
            self._failures = 0
            events.emit("worker_warm", pid=child.pid, rank=child.rank)
            return
        line, end, _ = child.said.partition(b"\n")
        if not end:
            return
        child.said = b""
        warmed = json.loads(line)
        child.warming = False
        events.emit("warmed_up", rank=child.kept_for, pid=child.pid, **warmed)
        if not warmed["why_not"]:
            child.warmed_up, self._warm_up_failures = True, 0
            return
        child.discard()
        if warmed["passing"]:
            self._next_warm_up = events.now() + AGAIN_S
        else:
            self._count_warm_up_failure(warmed["why_not"])

    def ended(self, child: Child) -> None:
        events.emit("spare_exit", pid=child.pid, code=child.exit_code)
        if child.unwanted:
            return
        if child.warming:
            self._count_warm_up_failure(f"its process has ended (exit code {child.exit_code})")
        if not child.warm:
            self._failures += 1
            if self._failures == FAILURES_MAX:
                tell(f"{FAILURES_MAX} spares died while they started: no more of them are made")

    def _count_warm_up_failure(self, why: str) -> None:
        self._warm_up_failures += 1
        if self._warm_up_failures == FAILURES_MAX:
            events.emit("warm_ups_given_up", reason=why)
            tell(f"spares are not warmed up any more, after {FAILURES_MAX} that could not be: {why}")


class Rehearsals:
    def __init__(
        self, nursery: Nursery, link: CoordinatorLink, program: Callable[[int, str, int], Program]
    ) -> None:
        """Initializes without a rehearsal. `program(local_rank, incarnation, version)`: the program that the rank of
        that place would run, from that version on."""
        self._nursery = nursery
        self._link = link
        self._program = program
        self._child: Child | None = None
        self._rank = self._version = 0
        self._generation = 0
        self._known = False
        """The View has shown the rehearsal as under way."""
        self._until = 0.0
        self._tried: dict[int, int] = {}
        """rank -> the version of its last rehearsal: the coordinator's record of it may be older."""
        self._failures: Counter[int] = Counter()

    def give_way(self) -> None:
        """Ends a rehearsal because a rank of this machine was lost, which the View shows only later."""
        if self._child is not None:
            self._end("")

    def on_view(self, view: pb.View | None) -> None:
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
        """Starts the next rehearsal; called while there is no recovery. `ranks`: of this machine, by place."""
        if self._child is not None:
            if events.now() > self._until:
                self._fail(f"it took longer than {SCRIPT_S_MAX:g} s")
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
            return  # a later call tries again; missing spares are reported elsewhere
        self._tried[chosen.rank] = chosen.recorded
        self._child, self._rank, self._version = child, chosen.rank, chosen.recorded
        self._generation, self._until = generation, events.now() + SCRIPT_S_MAX
        self._known = False
        child.rehearse(self._program(place, child.incarnation, chosen.recorded))
        events.emit("rehearsal_begin", rank=chosen.rank, version=chosen.recorded, pid=child.pid)
        self._notify(under_way=True)

    def handle_output(self, child: Child) -> None:
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
            self._notify(steps=found["steps"], difference=found["difference"])

    def ended(self, child: Child) -> None:
        if child is self._child:
            self._fail(f"its process has ended (exit code {child.exit_code})")

    def _fail(self, why: str) -> None:
        self._failures[self._rank] += 1
        if self._failures[self._rank] == FAILURES_MAX:
            why = f"{why}; no more are tried, after {FAILURES_MAX}"
        self._end(why)

    def _end(self, why: str) -> None:
        """Ends the process. `why`: reported to the coordinator; empty: it knows already."""
        child, self._child = self._child, None
        assert child is not None
        child.discard()
        if why:
            self._notify(why_not=why)

    def _notify(self, **fields: Any) -> None:
        self._link.notify(pb.RehearsedRequest(rank=self._rank, version=self._version, **fields))

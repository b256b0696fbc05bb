"""The generation that this rank is in, and its members: from the coordinator's View to process groups.

    (trainer's thread) ``form`` → the generation's groups are built; `view`, `plan` and `assignment` are set
    (notice thread)    ``interrupt``: a newer generation is published

A member makes no decision alone. It repeats its report in a state until the View changes, because the coordinator may
have been restarted.
"""

import threading
from collections.abc import Callable

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.process_groups import Interrupted
from swift_ft.coordinator_messages import PublishedPlan, of_view
from swift_ft.errors import LogInterrupted
from swift_ft.planner import Assignment
from swift_ft.train.coordinator_session import is_filled
from swift_ft.train.failures import Failures
from swift_ft.train.log_session import OwnLog
from swift_ft.train.participants import Site

_ANY = -1
"""Key, in place of an origin, of the route of the stages' representatives; minus their shard."""


class Membership:
    def __init__(
        self, site: Site, log: OwnLog, failures: Failures, report: Callable[[pb.View], None]
    ) -> None:
        """`report(view)` sends this rank's recovery offer to the planner."""
        self._site = site
        self._log = log
        self._failures = failures
        self._report = report
        self.assignment = site.assignment
        """Assignment of the generation whose groups are built; before the first, that of the full world."""
        self.slot = site.assignment.slots[site.rank]
        """Slot that this process holds, the same in every generation."""
        self._view: pb.View | None = None
        self.plan: PublishedPlan | None = None
        """Plan that led to this generation; None at the start of the job."""
        self._entering = threading.Lock()

    @property
    def generation(self) -> int:
        """Returns the generation whose groups are built; 0 before the first."""
        return 0 if self._view is None else self._view.generation

    @property
    def view(self) -> pb.View:
        """Returns the View that the groups were built from, which may be older than the newest."""
        assert self._view is not None, "no generation was formed yet"
        return self._view

    @property
    def hosts(self) -> dict[int, str]:
        return {member.rank: member.host for member in self.view.members}

    @property
    def finished(self) -> bool:
        return self._view is not None and self._view.state == pb.FINISHED

    @property
    def has_run(self) -> bool:
        return self.view.state != pb.FORMING

    def members(self) -> set[int]:
        return {member.id for member in self.view.members}

    def join_newest(self) -> None:
        """Forms the newest generation, unless this rank is in it."""
        if self._site.member.noticed:
            self.form()

    def form(self) -> None:
        """Blocks until this rank is in a generation whose groups are built (FORMING or RECOVERING).

        If the job has finished, it has no peers: the View's state is FINISHED then.
        """
        while True:
            view = self._site.member.watcher.wait_for(lambda _view: True, None)
            with self._entering:
                self._site.member.enter(view.generation)
            try:
                self._site.member.check()
                if self._site.rank in view.vacant and view.state != pb.FINISHED:
                    # Its cell lacks a rank: others go on, and it is a spare.
                    self._site.member.await_change(view)
                elif view.state == pb.PLANNING:
                    self._report(view)
                    self._site.communicator.disconnect()  # while others report: it takes a while
                    self._site.member.await_change(view)
                elif view.state == pb.FINISHED:
                    self._view = view
                    self._site.communicator.stand_alone()
                    return  # this process replaces one that was lost after the end
                elif view.state in (pb.FORMING, pb.RECOVERING) and is_filled(view):
                    self._build(view)
                    return
                else:
                    self._site.member.await_change(view)
            except (Interrupted, LogInterrupted):
                continue  # a newer generation came meanwhile
            except RuntimeError as error:  # a peer was lost while the groups were being built
                self._failures.await_notice(error, view.generation)

    def _build(self, view: pb.View) -> None:
        self._log.open(view)
        assignment = self.assignment.held_by({member.rank: member.id for member in view.members})
        if self._site.config.redistributes:
            assignment = assignment.rerouted() if self._site.config.reroutes else assignment.redistributed()
        self._site.communicator.build(view.generation, assignment.occupied, self._routes(assignment))
        self._view, self.plan, self.assignment = view, of_view(view), assignment

    def _routes(self, assignment: Assignment) -> dict[int, tuple[int, ...]]:
        """Returns origin -> ranks of the pipelines that this rank is in, its own first; empty if all are complete.

        With rerouting, the stages' representatives form one route, and each other rank has a route of its own."""
        if assignment.stage_groups == 1 or not assignment.adopted:
            return {}
        if self._site.config.reroutes:
            first = assignment.representatives(self.slot.shard)
            # A rank that is no representative runs no pipeline collective itself
            # (`swift_ft.train.batch_redistribution`).
            represents = self._site.rank in first
            key = _ANY - (self.slot.shard if represents else assignment.shards + self._site.rank)
            return {key: first if represents else (self._site.rank,)}
        origins = (self.slot.dp_rank, *assignment.adopted_by(self._site.rank))
        return {origin: assignment.pipeline(origin) for origin in origins}

    def interrupt(self, generation: int) -> None:
        """(notice thread) Interrupts the trainer's thread in any wait."""
        with self._entering:  # an interrupt that is already handled must not stop the new generation
            if self._site.member.noticed:
                self._log.interrupt()
        self._site.communicator.interrupt(generation, lambda: not self._site.member.noticed)

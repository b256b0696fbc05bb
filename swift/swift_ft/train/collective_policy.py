"""Policy for the trainer's own communication, over the session's groups and over its own.

    before session.run   collectives: run once, and told to a process that comes later (`train.set_up`)
    in train_step        over ranks that replay together (one stage's): anything, also in a replay
                         over others: one result for all ranks, which is recorded, and answered from the log in a replay
    after session.run    anything

Anything else is refused: messages before the run and between stages, and whatever an error's handler sends in the run.
A replay has no peers but the ranks of its own stage. A communication that is neither answered nor refused would wait
forever.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from swift_ft.comm.backend import Backend, Collective
from swift_ft.comm.groups import ReconfigurableGroup, finished
from swift_ft.errors import UsageError
from swift_ft.train.boundary_log import Channel
from swift_ft.train.participants import Participant
from swift_ft.train.updates import Updates

_INSTEAD = "session.all_reduce, dist.all_reduce, dist.broadcast or dist.all_gather"


class Gate:
    """Check of all communication over the groups that a trainer may use.

    It is created before the groups, which are created before the parts that communicate over them. So the session sets
    these parts later, and no communication is possible before.

    (session) ``around`` the trainer's function, ``passing`` around communication of torch or the session in it
    (groups) ``collective``, ``message``, ``used``, ``messaged``, ``launched``, ``reducing``; (schedules)
    ``scheduled``; (default group) ``new_group``
    """

    def __init__(
        self, stage_group: Iterable[int] = (), cell: Iterable[int] = (), moves_batches: str = ""
    ) -> None:
        """`stage_group`: the ranks that replay together with this one; `cell`: those that are lost with it.
        `moves_batches`: the strategy, if ranks of it compute the batches of others; then only the communication in a
        cell is theirs alone."""
        self._together, self._cell = frozenset(cell if moves_batches else stage_group), frozenset(cell)
        self._moves_batches = moves_batches
        self.set_up: Callable[..., Any]
        """Begins a collective before `session.run`, and returns its Work."""
        self.made: list[str] = []
        """Names and ranks of the trainer's groups, of whichever ranks, in order."""
        self.channel: Channel
        self.updates: Updates
        self.participants: Sequence[Participant]
        self._in_step = False
        self._begun = False
        self._passing = False
        self.over = False
        """Set once `session.run` has returned."""

    def around(self, train_step: Callable[[int], object]) -> Callable[[int], object]:
        """(session.run) Returns the trainer's function wrapped so that its communication is checked."""
        self._begun = True

        def step(number: int) -> object:
            rank = os.getpid()
            with self.step():
                try:
                    result = train_step(number)
                except Exception:
                    if os.getpid() == rank:
                        raise
                    # A child that the step has forked is no rank: its end does not concern the job.
                    with suppress(Exception):
                        sys.excepthook(*sys.exc_info())
                    raise SystemExit(1) from None
            if os.getpid() != rank:
                raise SystemExit
            return result

        step.__wrapped__ = train_step  # type: ignore[attr-defined]
        return step

    @contextmanager
    def step(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def collective(
        self,
        group: ReconfigurableGroup,
        name: str,
        results: list[torch.Tensor],
        run: Collective,
        *,
        alike: bool,
    ) -> Any:
        """Runs and records a collective, or answers it from the log; `results` hold its result. Returns torch's Work,
        or None if the caller is to run it itself. Raises UsageError if it is refused.

        `alike`: all ranks of the group get the same result.
        """
        if self._passing or self.over:
            return None
        if not self._in_step:
            if self._begun:
                raise UsageError(
                    f"dist.{name} outside of train_step, while session.run goes on: the others are in a step or in a "
                    "recovery, and would not come; do it in train_step, or when session.run has returned"
                )
            return self.set_up(group, name, results, run, alike=alike)
        if group.live:
            return None
        if not alike:
            if self._replays_with(group):
                return None
            raise UsageError(
                f"dist.{name} in train_step: every rank gets something else from it, so a replay cannot take it from "
                f"a survivor; use {_INSTEAD}"
            )

        with self.updates.spoiling():
            self.channel.collective_into(name, results, lambda: group.run_into(results, run), group.ranks)
        return finished(results)

    def _replays_with(self, group: ReconfigurableGroup) -> bool:
        return self._together.issuperset(group.ranks)

    def used(self, group: ReconfigurableGroup) -> None:
        """Notifies the parts of a collective that torch or the trainer runs over `group`."""
        self.updates.communicates()
        if self._in_step and not (self.channel.replaying or self._cell.issuperset(group.ranks)):
            for participant in self.participants:
                participant.communicated(self.channel.step, of_pipeline=group.is_pipeline)

    def messaged(self) -> None:
        self.updates.communicates()

    def launched(self) -> None:
        self.channel.launched()

    def scheduled(self) -> None:
        for participant in self.participants:
            participant.scheduled()

    def reducing(self) -> None:
        self.updates.fault("reduce")  # of DDP or FSDP

    def message(self, group: ReconfigurableGroup, name: str) -> None:
        """Raises UsageError for a point-to-point message of the trainer's own that a replay could not repeat."""
        if self._passing or self.over:
            return
        if not self._in_step:
            raise UsageError(
                f"dist.{name} outside of train_step: a process that replaces a lost rank comes there alone, and would "
                "wait for ever; use dist.broadcast there"
            )
        if not self._replays_with(group):
            raise UsageError(
                f"dist.{name} in train_step: what ranks of two stages send each other by hand is not logged, and a "
                f"replay would wait for it for ever; use {_INSTEAD} (messages of a schedule pass if it is registered: "
                "session.register)"
            )

    def new_group(self, ranks: Sequence[int], name: str) -> bool:
        """Returns whether a new group of the trainer's is `live`: all its ranks replay together. Raises UsageError if
        it would not outlive a failure."""
        where = f"dist.new_group({list(ranks)})"
        if self._in_step:
            raise UsageError(f"{where} in train_step: make process groups before session.run, and keep them")
        if self._moves_batches and len({rank // len(self._cell) for rank in ranks}) > 1:
            raise UsageError(
                f"{where} with strategy={self._moves_batches!r}: while a rank is missing, others compute its batches, "
                "and no such group of the trainer's own has all its ranks; use session.groups"
            )
        if not name.isdigit():  # torch has named it by its ranks
            raise UsageError(
                f"{where} with use_local_synchronization=True: all ranks make the same groups in the same order; leave "
                "it out"
            )
        self.made.append(f"{name}: {','.join(map(str, ranks))}")
        return self._together.issuperset(ranks)

    def check_in_step(self, name: str) -> None:
        """Raises UsageError outside of a step, for a call that is only valid in one."""
        if not self._in_step:
            raise UsageError(f"{name} outside of train_step: call it in the step that is to be the last one")


def groups_behind(
    gate: Gate, rank: int, ranks_of: Mapping[str, tuple[int, ...]], backend: Backend
) -> dict[str, ReconfigurableGroup]:
    """Returns the session's groups over which the trainer and torch communicate, by name. "world" and "pipeline" are
    recorded, the others have ranks of one stage only. DDP's reducer must not see an error, so its group ("data")
    swallows them."""
    return {
        name: ReconfigurableGroup(
            name,
            ranks,
            ranks.index(rank),
            backend,
            gate=gate,
            live=name not in ("world", "pipeline"),
            swallow=name == "data",
        )
        for name, ranks in ranks_of.items()
    }

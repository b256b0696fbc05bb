"""Policy for the trainer's own communication, over the default group and over those of the session.

    outside of train_step    refused: a process that replaces a lost rank gets there alone
    in train_step            one result for all ranks: recorded, and answered from the log in a replay, like the
                             session's own collectives; anything else (point-to-point, scatter, objects): refused
    after session.run        allowed

A replay has no peers. A communication that is neither answered nor refused would wait forever.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from swift_ft.comm.backend import Backend, Collective
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.train.boundary_log import Channel
from swift_ft.train.participants import Participant
from swift_ft.train.updates import Updates

_INSTEAD = "session.all_reduce, dist.all_reduce, dist.broadcast or dist.all_gather"


class Gate:
    """Check of all communication over the groups that a trainer may use.

    It is created before the groups, which are created before the parts that communicate over them. So these parts are
    bound later, once, and no communication is possible before.

    (session) ``bind`` → ``around`` the trainer's function, ``passing`` around communication of torch or the session
    in it
    (groups) ``collective``, ``message``, ``used``, ``messaged``, ``launched``, ``reducing``; (schedules)
    ``scheduled``; (torch, before it pickles) ``pickles``; (default group) ``new_group``
    """

    def __init__(self) -> None:
        self._bound: tuple[Channel, Updates, Sequence[Participant]] | None = None
        self._in_step = False
        self._passing = False
        self.over = False
        """Set once `session.run` has returned."""

    def bind(self, channel: Channel, updates: Updates, participants: Sequence[Participant]) -> None:
        if self._bound is not None:
            raise AssertionError("Gate.bind was called before")
        self._bound = channel, updates, participants

    def _parts(self) -> tuple[Channel, Updates, Sequence[Participant]]:
        if self._bound is None:
            raise AssertionError(
                "Gate.bind was not called: what passes a group would be neither known nor recorded"
            )
        return self._bound

    def around(self, train_step: Callable[[int], object]) -> Callable[[int], object]:
        """Returns the trainer's function wrapped so that its communication is checked."""

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
    ) -> bool:
        """Runs and records a collective, or answers it from the log; `results` hold its result. Returns False if the
        caller is to run it itself. Raises UsageError if it is refused.

        `alike`: all ranks of the group get the same result.
        """
        if self._passing or self.over:
            return False
        self._check_place(name)
        if not alike:
            raise UsageError(
                f"dist.{name} in train_step: every rank gets something else from it, so a replay cannot take it from "
                f"a survivor; use {_INSTEAD}"
            )

        channel, updates, _ = self._parts()
        with updates.spoiling():
            channel.collective_into(name, results, lambda: group.run_into(results, run), group.ranks)
        return True

    def used(self, group: ReconfigurableGroup) -> None:
        """Notifies the parts of a collective that torch or the trainer runs over `group`."""
        channel, updates, participants = self._parts()
        updates.communicates()
        if len(group.ranks) > 1 and self._in_step and not channel.replaying:
            for participant in participants:
                participant.communicated(channel.step, of_pipeline=group.is_pipeline)

    def messaged(self) -> None:
        self._parts()[1].communicates()

    def launched(self) -> None:
        """(a message has been sent) Records it."""
        self._parts()[0].launched()

    def scheduled(self) -> None:
        """(a schedule is called) Raises UsageError where that is not possible."""
        for participant in self._parts()[2]:
            participant.scheduled()

    def reducing(self) -> None:
        self._parts()[1].reducing()

    def message(self, name: str) -> None:
        """Raises UsageError for a point-to-point message of the trainer's own."""
        if self._passing or self.over:
            return
        self._check_place(name)
        raise UsageError(
            f"dist.{name} in train_step: what two ranks send each other by hand is not logged, and a replay would wait "
            f"for it for ever; use {_INSTEAD} (messages of a schedule pass if it is registered: session.register)"
        )

    def pickles(self) -> None:
        """(an object collective begins) Raises UsageError in a step."""
        if self._in_step:
            raise UsageError(
                "a collective of Python objects in train_step: a replay would unpickle what it reads from the log, "
                f"which is never done; put it into a tensor and use {_INSTEAD}"
            )

    def new_group(self) -> None:
        raise UsageError(
            "dist.new_group: a group of the trainer's own is not made again after a failure; use session.groups, or "
            "session.all_reduce"
        )

    def check_in_step(self, name: str) -> None:
        """Raises UsageError outside of a step, for a call that is only valid in one."""
        if not self._in_step:
            raise UsageError(f"{name} outside of train_step: call it in the step that is to be the last one")

    def _check_place(self, name: str) -> None:
        if not self._in_step:
            raise UsageError(
                f"dist.{name} outside of train_step: a process that replaces a lost rank comes there alone, and would "
                "wait for ever; do it in train_step, or leave it out (DistributedDataParallel: use session.ddp)"
            )


def groups_behind(
    gate: Gate, rank: int, ranks_of: Mapping[str, tuple[int, ...]], backend: Backend
) -> dict[str, ReconfigurableGroup]:
    """Returns the groups over which the trainer and torch communicate, by name. The step is notified of all
    communication; the trainer's own is checked in "world" and "pipeline", the groups meant for it. DDP's reducer must
    not see an error, so its group ("data") swallows them."""
    return {
        name: ReconfigurableGroup(
            name,
            ranks,
            ranks.index(rank),
            backend,
            gate=gate,
            checked=name in ("world", "pipeline"),
            swallow=name == "data",
        )
        for name, ranks in ranks_of.items()
    }

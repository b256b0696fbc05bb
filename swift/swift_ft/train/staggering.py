"""Staggered steps: a rank begins the next step once its own stage has stepped, and does not wait for other stages.

A step needs something of all stages: that they have it done (the vote), the norm of all gradients if the trainer clips,
and whether a gradient scaler has found inf or nan there. A rank that staggers goes on as if the vote were passed,
nothing had to be clipped and nothing was found. It learns whether that was so in the next step, once its gradients are
reduced and before it updates anything (ReCycle, arXiv 2405.14009; what zero-bubble pipelines call post-validation,
arXiv 2401.10241)::

    step k    forward, backward, reduced → stepped → its vote is under way
    step k+1  forward, backward, reduced → the vote over k, and its norms: settled → stepped → …

So a rank is one step ahead of its vote at most. Until then it keeps a copy of the state before step k, and what a loss
finds of it can be either version: it goes back to the copy, or stays where it is. If the norm demands clipping (or is
inf or nan), or a scaler has found something, all ranks go back, in a generation of its own, and do step k again, in
which they wait.

**When it waits.** The first step of a generation; a step that leads to a version that is saved, or is the last one; any
step of a trainer that needs its peers behind an update (`swift_ft.train.updates`); and after a norm that has clipped,
until so many in a row have not: ten at first, and twice as many each time that a step was taken back. All ranks agree
on it in the vote of the step before.

Memory: two copies of this rank's state.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from swift_ft import events
from swift_ft.comm.backend import Misspeculated
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.worker_thread import Task
from swift_ft.planner import Assignment
from swift_ft.state.checkpoint_file import Snapshot
from swift_ft.state.tree import split
from swift_ft.train.boundary_log import Channel
from swift_ft.train.errors import Hook
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Standing

# A number that several ranks compute together, and for which nobody waits before somebody uses it.


class Later(torch.Tensor):
    """A tensor whose value is asked for by the first operation on it. To torch it is that value."""

    _value: Callable[[], torch.Tensor]

    @staticmethod
    def of(form: torch.Tensor, value: Callable[[], torch.Tensor]) -> "Later":
        """`form`: has its shape and dtype. `value`: waits, and raises what has broken the computation."""
        later: Later = torch.Tensor._make_subclass(Later, torch.zeros_like(form))
        later._value = value
        return later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _now(value: Any) -> Any:
    return value._value() if isinstance(value, Later) else value


CALM_STEPS = 10
"""Norms in a row that have not clipped, before a rank goes on without waiting for one."""


_FOUND_INFINITE = 0.5
"""A maximum norm of flags: one that is 1.0 is above it. So what a gradient scaler has found is treated as a norm is."""


class Norm:
    """Of the gradients of all stages, on its way."""

    def __init__(
        self,
        task: Task,
        parts: list[torch.Tensor],
        places: list[int],
        norm_type: float,
        max_norm: float,
        *,
        of_flags: bool = False,
    ) -> None:
        """`parts`: what each rank gives, once `task` is done; `places`: of one rank for each stage, in their order.
        `of_flags`: it is of what a gradient scaler has found at the stages."""
        self._of_flags = of_flags
        self._task = task
        self._parts = parts
        self._places = places
        self._norm_type = norm_type
        self._max_norm = max_norm
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """Waits for it. Raises RuntimeError if a rank is lost."""
        if self._value is None:
            self._task.wait()
            self._value = norm_of([self._parts[place] for place in self._places], self._norm_type)
        return self._value

    def give_up(self) -> None:
        """Its step was cut short. Who has kept it has a number that never was."""
        if self._value is None:
            self._value = torch.full_like(self._parts[0], torch.nan)

    def clips(self) -> bool:
        """As `value`."""
        return clips(self.value(), self._max_norm)

    def why(self) -> str:
        """(it clips) What is the matter with the gradients."""
        if self._of_flags:
            return "gradients of a stage have inf or nan"
        return f"the norm of its gradients is {float(self.value()):g}"

    @property
    def known_not_to_clip(self) -> bool:
        """Waits for nothing."""
        return self._task.done and self._task.error is None and not self.clips()


class _Pending(NamedTuple):
    """A step that is done here, and of which nobody knows yet whether all have it."""

    step: int
    ballot: torch.Tensor
    task: Task
    norms: tuple[Norm, ...]

    def known_valid(self) -> bool:
        return all(norm.known_not_to_clip for norm in self.norms)


class Holder(Protocol):
    """This process, as a member of the job."""

    version: int


class Staggering:
    """One rank's. Trainer's thread.

    (steps) ``begin_step`` → (clipping) ``norm`` → (vote) ``voted`` → (in the next step, or where a version is saved)
    ``wait_vote``
    (recovery) ``standing`` → ``take_back`` → ``forget``
    """

    def __init__(
        self,
        wanted: bool,
        rank: int,
        member: Holder,
        state: TrainerState,
        world: ReconfigurableGroup,
        assignment: Callable[[], Assignment],
        channel: Channel,
    ) -> None:
        """`world`: all ranks, for the session itself. `assignment`: of this generation."""
        self.wanted = wanted
        self._rank = rank
        self._member = member
        self._state = state
        self._world = world
        self._assignment = assignment
        self._channel = channel
        self.lasts: Hook[[int], bool] = Hook("Staggering.lasts")
        """(engine) That version is saved, or the run ends with it."""
        self._pending: _Pending | None = None
        self._copies: dict[int, Snapshot] = {}
        """Of the state, by version; at most two."""
        self._spare: list[Snapshot] = []
        self._norms: list[Norm] = []
        """Of the step under way, which does not wait for them."""
        self._clips = False
        """The trainer clips."""
        self._calm = 0
        self._calm_wanted = CALM_STEPS
        self._waits_next = True
        """As all ranks have agreed for the step behind the last one whose vote is settled."""
        state.updates.reduced.bind(self.wait_vote)

    # --- one step ---

    def begin_step(self) -> None:
        """(the state is that of a version) The step may go on without its vote."""
        updates = self._state.updates
        self._norms = []
        self._channel.unsettled = self._pending is not None and bool(self._pending.norms)
        waits = self._pending is None and (updates.hold_next or self._waits_next)
        updates.ahead = self.wanted and not waits
        if updates.ahead:
            spare = self._spare.pop() if self._spare else None
            into = {} if spare is None else split(spare.state())[0]
            self._copies[self._state.version] = Snapshot(self._state.state_dict(), into=into)

    def norm(self, part: torch.Tensor, norm_type: float, max_norm: float) -> torch.Tensor:
        """(the step goes on without its vote) The norm of all gradients, for which nobody waits. `part`: this rank's
        share of it (`swift_ft.state.fsdp.part_of_norm`)."""
        norm = self._under_way(part, norm_type, max_norm)
        return Later.of(part, norm.value)

    def _under_way(
        self, part: torch.Tensor, norm_type: float, max_norm: float, *, of_flags: bool = False
    ) -> Norm:
        task, parts = self._world.gathering(part)
        slots, first = self._assignment().slots, dict[int, int]()
        for place, slot in enumerate(self._world.present):
            first.setdefault(slots[slot].stage_group, place)
        places = [place for _, place in sorted(first.items())]
        norm = Norm(task, parts, places, norm_type, max_norm, of_flags=of_flags)
        self._norms.append(norm)
        return norm

    def found_infinite(self, own: torch.Tensor) -> None:
        """(the step goes on without its vote) `own`: 1.0 if a gradient scaler has found inf or nan here."""
        self._under_way(own, math.inf, _FOUND_INFINITE, of_flags=True)

    def told_infinite(self, found: torch.Tensor) -> None:
        """(a step that waits) `found`: 1.0 if a gradient scaler of some stage has found inf or nan."""
        self._count(bool(found))

    def clipped(self, norm: torch.Tensor, max_norm: float) -> None:
        """(a step that waits) Its norm."""
        self._count(clips(norm, max_norm))

    def waits(self) -> bool:
        """(a vote) This rank wants the next step to wait for its own."""
        restless = self._clips and self._calm < self._calm_wanted
        return self.wanted and (restless or self.lasts(self._state.version + 2))

    def voted(self, ballot: torch.Tensor, task: Task) -> None:
        """The step under way is done here. `ballot` has what came of the vote, once `task` is done."""
        assert self._pending is None
        self._pending = _Pending(self._state.version, ballot, task, tuple(self._norms))

    def agreed(self, waits_next: bool) -> None:
        """What came of a vote."""
        self._waits_next = waits_next

    @property
    def committed(self) -> int:
        """The newest version that all ranks have, or get to."""
        return self._state.version if self._pending is None else self._pending.step

    def wait_vote(self) -> None:
        """Waits for the vote over the step before, if it is under way. Raises Misspeculated; RuntimeError if a rank is
        lost; UsageError if replicas do not step alike."""
        pending = self._pending
        if pending is None:
            return
        began = time.monotonic()
        pending.task.wait()
        self._channel.settling(pending.step)
        if any(norm.clips() for norm in pending.norms):
            raise self._misspeculated(pending)
        self._pending = None
        self._let_go(pending.step)
        for _ in pending.norms:
            self._count(False)
        self._member.version = pending.step + 1
        updates = self._state.updates
        self.agreed(updates.heard(pending.ballot, pending.step).waits_next)
        events.emit("settled", rank=self._rank, step=pending.step, waited_s=time.monotonic() - began)
        if updates.ahead and (updates.hold_next or self._waits_next):
            updates.wait_for_vote()
            self._let_go(self._state.version)

    def blamed(self, error: Exception) -> Exception:
        """(a step is cut short) The error, or that the step before should have been taken back."""
        pending = self._pending
        if pending is None or isinstance(error, Misspeculated):
            return error
        try:
            clipped = any(norm.clips() for norm in pending.norms)
        except RuntimeError:  # a rank is lost, which is dealt with
            return error
        if not clipped:
            return error
        wrong = self._misspeculated(pending)
        wrong.__cause__ = error
        return wrong

    # --- after a failure ---

    def standing(self, own: Standing) -> Standing:
        """What this rank can offer, if `own` is what it holds by itself."""
        pending = self._pending
        if pending is None:
            if own.version is None and own.undo_to is None and self._copies:
                return replace(own, undo_to=max(self._copies), undo_exact=True)
            return own
        if own.version not in (None, pending.step + 1):
            return own  # it has gone elsewhere since
        # It is in the vote over that step, as one that waits there is.
        onward = own.version is not None and pending.known_valid()
        return Standing(
            version=None,
            undo_to=pending.step,
            undo_exact=True,
            forward_to=pending.step + 1 if onward else None,
            forward_by_all=self._state.updates.lines,
        )

    def take_back(self, version: int) -> dict[str, Any] | None:
        """The state that it has gone back to; None: there is no copy of it. ServiceError: the trainer's objects do not
        take it."""
        copy = self._copies.get(version)
        if copy is None:
            return None
        self._channel.taking_back(version)
        self._state.present = False
        # Optimizers keep the tensors that they are given.
        loaded: dict[str, Any] = Snapshot(copy.state()).state()
        self._state.load_state_dict(loaded)
        self._state.present = True
        pending = self._pending
        if pending is not None and not pending.known_valid() and self._channel.witness is not None:
            self._channel.witness.forget()  # what came behind it was of a state that never was
        return loaded

    def forget(self) -> None:
        """All ranks go on from one version."""
        for norm in (*self._norms, *(self._pending.norms if self._pending is not None else ())):
            norm.give_up()
        self._pending, self._waits_next = None, True
        for version in list(self._copies):
            self._let_go(version)

    # --- ---

    def _count(self, clipped: bool) -> None:
        self._clips = True
        self._calm = 0 if clipped else self._calm + 1

    def _misspeculated(self, pending: _Pending) -> Misspeculated:
        self._calm, self._calm_wanted = 0, 2 * self._calm_wanted
        why = next(norm for norm in pending.norms if norm.clips()).why()
        return Misspeculated(
            f"step {pending.step} is done again: {why}, and it had gone on before that was known"
        )

    def _let_go(self, version: int) -> None:
        copy = self._copies.pop(version, None)
        if copy is not None:
            self._spare = [*self._spare, copy][-2:]


def norm_of(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of the shares of all stages, in their order."""
    if norm_type == float("inf"):
        return torch.stack(parts).max()
    return summed(parts) ** (1.0 / norm_type)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """In their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def clips(norm: torch.Tensor, max_norm: float) -> bool:
    """`torch.nn.utils.clip_grads_with_norm_` would change gradients; also for inf and nan."""
    return not bool(max_norm / (norm + 1e-6) >= 1.0)

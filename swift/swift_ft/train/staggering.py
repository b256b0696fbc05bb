"""Staggered steps: a rank begins the next step once its own stage has stepped, and does not wait for other stages.

A step needs three results from all stages: that all have completed it (the vote), the norm of all gradients if the
trainer clips, and whether a gradient scaler has found inf or nan. A rank that staggers speculates that the vote passes,
that no gradient is clipped and that no inf or nan is found. It validates that in the next step, after its gradients
are reduced and before it updates (ReCycle, arXiv 2405.14009; zero-bubble pipelines call it post-validation,
arXiv 2401.10241)::

    step k    forward, backward, reduced → stepped → its vote is under way
    step k+1  forward, backward, reduced → the vote over k, and its norms: settled → stepped → …

So a rank is at most one step ahead of its vote. Until the vote it keeps a copy of the state before step k, so after a
loss it can provide either version: it goes back to the copy, or keeps its state. If the norm demands clipping (or is
inf or nan), or a scaler has found inf or nan, all ranks go back, in a new generation, and do step k again, in which
they wait.

**Steps that wait.** The first step of a generation; a step that leads to a saved version or to the last one; any step
of a trainer that needs its peers after an update (`swift_ft.train.updates`); and, after a norm that has clipped, steps
until enough norms in a row have not: ten at first, twice as many each time that a step was taken back. All ranks agree
in the vote of the step before.

Memory: two copies of this rank's state.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from swift_ft import events
from swift_ft.comm.backend import Misspeculated
from swift_ft.comm.worker_thread import Task
from swift_ft.device import Arrivals
from swift_ft.planner import Assignment
from swift_ft.state.checkpoint_file import Snapshot, restored
from swift_ft.train.participants import Participant, Site, Step
from swift_ft.train.pipeline_collectives import clips, norm_of
from swift_ft.train.updates import Standing

# A number that several ranks compute together and that is awaited only when it is used.


class Later(torch.Tensor):
    """A lazy tensor: the first operation on it waits for its value. torch functions see the value."""

    _value: Callable[[], torch.Tensor]

    @staticmethod
    def of(form: torch.Tensor, value: Callable[[], torch.Tensor]) -> "Later":
        """Creates a lazy tensor. `form`: has its shape and dtype. `value`: waits for it, and raises if it failed."""
        later: Later = torch.zeros_like(form).as_subclass(Later)
        later._value = value
        return later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _now(value: Any) -> Any:
    return value._value() if isinstance(value, Later) else value


CALM_STEPS = 10
"""Consecutive norms without clipping after which a rank no longer waits for the norm."""


_FOUND_INFINITE = 0.5
"""Maximum norm for a gradient scaler's flags: a flag of 1.0 exceeds it, so a found inf or nan counts as clipping."""


@dataclass(eq=False)
class Norm:
    """The norm of the gradients of all stages, computed asynchronously."""

    task: Task
    parts: list[torch.Tensor]
    """Each rank's part, valid once `task` is done."""
    places: list[int]
    """Places of one rank per stage group, in their order."""
    norm_type: float
    max_norm: float
    of_flags: bool = False
    """The parts are a gradient scaler's inf flags instead of gradient norms."""
    arrivals: Arrivals | None = None
    """Of the generation in which they are exchanged."""
    _clips: bool | None = None
    _value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """Waits for the norm and returns it. Raises RuntimeError if a rank is lost."""
        if self._value is None:
            self.task.wait()
            self._value = norm_of([self.parts[place] for place in self.places], self.norm_type)
        return self._value

    def give_up(self) -> None:
        """Sets the norm to nan if it is not known: its step was interrupted, and the trainer may still hold it."""
        if self._value is None:
            self._value = torch.full_like(self.parts[0], torch.nan)

    def clips(self) -> bool:
        """Returns whether the norm clips. Waits and raises like `value`."""
        if self._clips is None:
            clipped = clips(self.value(), self.max_norm)  # waits for a device
            if self.arrivals is not None:
                self.arrivals.check_arrived()  # not before: an abort may end the wait
            self._clips = clipped
        return self._clips

    def why(self) -> str:
        if self.of_flags:
            return "gradients of a stage have inf or nan"
        return f"the norm of its gradients is {float(self.value()):g}"

    @property
    def known_not_to_clip(self) -> bool:
        """The norm has arrived and does not clip. Does not wait."""
        if not self.task.done or self.task.error is not None:
            return False
        try:
            return not self.clips()
        except RuntimeError:  # a rank is lost
            return False


class _Pending(NamedTuple):
    """A step that is done on this rank and whose vote is not settled yet."""

    step: int
    ballot: torch.Tensor
    task: Task
    norms: tuple[Norm, ...]

    def known_valid(self) -> bool:
        return all(norm.known_not_to_clip for norm in self.norms)


class Staggering(Participant):
    """Staggered steps of one rank. Used on the trainer's thread.

    (steps) ``begin_step`` → (clipping) ``norm`` → (vote) ``voted`` → (in the next step, or where a version is saved)
    ``wait_vote``
    (recovery) ``offer`` → ``take_back`` → ``resume``
    """

    def __init__(self, site: Site, assignment: Callable[[], Assignment]) -> None:
        """`assignment`: returns this generation's."""
        self._site = site
        self._assignment = assignment
        self.lasts: Callable[[int], bool]
        """(engine) Returns whether that version is saved or is the run's last one."""
        self._pending: _Pending | None = None
        self._copies: dict[int, Snapshot] = {}
        """Version -> copy of its state; at most two."""
        self._spare: list[Snapshot] = []
        """Unused copies, whose memory is reused."""
        self._norms: list[Norm] = []
        """Norms of the step under way, which does not wait for them."""
        self._clips = False
        """The trainer clips gradients or uses a gradient scaler."""
        self._calm = 0
        """Norms in a row that have not clipped."""
        self._calm_wanted = CALM_STEPS
        """Value of `_calm` from which on this rank does not wait."""
        self._waits_next = True
        """All ranks have agreed that the step after the last settled one waits for its vote."""

    # --- one step ---

    def begin_step(self, step: Step) -> None:
        """Decides whether the step waits for its vote. Copies the state if it does not."""
        updates = self._site.state.updates
        self._norms = []
        self._site.channel.unsettled = self._pending is not None and bool(self._pending.norms)
        waits = self._pending is None and (updates.hold_next or self._waits_next)
        updates.ahead = not waits
        if updates.ahead:
            spare = self._spare.pop() if self._spare else None
            self._copies[self._site.state.version] = Snapshot(
                self._site.state.state_dict(),
                into={} if spare is None else spare.named(),
                late=self._site.state.changed_by_updates(),
            )

    def norm(self, part: torch.Tensor, norm_type: float, max_norm: float) -> torch.Tensor:
        """(a step that does not wait) Returns the norm of all gradients as a lazy tensor. `part`: this rank's part of
        it (`swift_ft.state.fsdp.part_of_norm`)."""
        norm = self._under_way(part, norm_type, max_norm)
        return Later.of(part, norm.value)

    def _under_way(
        self, part: torch.Tensor, norm_type: float, max_norm: float, *, of_flags: bool = False
    ) -> Norm:
        task, parts = self._site.world.gathering(part)
        slots, first = self._assignment().slots, dict[int, int]()
        for place, slot in enumerate(self._site.world.present):
            first.setdefault(slots[slot].stage_group, place)
        places = [place for _, place in sorted(first.items())]
        arrivals = self._site.channel.readings.arrivals()
        norm = Norm(task, parts, places, norm_type, max_norm, of_flags, arrivals)
        self._norms.append(norm)
        return norm

    def found_infinite(self, own: torch.Tensor) -> None:
        """(a step that does not wait) Starts the exchange of a gradient scaler's flags. `own`: 1.0 if it has found inf
        or nan on this rank."""
        self._under_way(own, math.inf, _FOUND_INFINITE, of_flags=True)

    def count_infinite(self, found: torch.Tensor) -> None:
        """(a step that waits) Counts the flag as a norm. `found`: 1.0 if some stage's scaler has found inf or nan."""
        self._count(bool(found))

    def clipped(self, norm: torch.Tensor, max_norm: float) -> None:
        self._count(clips(norm, max_norm))

    def waits(self) -> bool:
        """(in a vote) Returns whether this rank wants the next step to wait for its vote."""
        restless = self._clips and self._calm < self._calm_wanted
        return restless or self.lasts(self._site.state.version + 2)

    def voted(self, ballot: torch.Tensor, task: Task) -> None:
        """Registers the step under way as done on this rank. `ballot`: the vote's result, valid once `task` is done."""
        assert self._pending is None
        self._pending = _Pending(self._site.state.version, ballot, task, tuple(self._norms))

    def agreed(self, waits_next: bool) -> None:
        self._waits_next = waits_next

    def committed(self, version: int) -> int:
        return version if self._pending is None else self._pending.step

    def wait_vote(self) -> None:
        """Waits for the vote on the previous step, if it is under way. Raises Misspeculated if that step must be done
        again, RuntimeError if a rank is lost, UsageError if replicas do not step alike."""
        pending = self._pending
        if pending is None:
            return
        began = time.monotonic()
        pending.task.wait()
        self._site.channel.faults.at("settle", pending.step)
        if any(norm.clips() for norm in pending.norms):
            raise self._misspeculated(pending)
        self._pending = None
        self._drop_copy(pending.step)
        for _ in pending.norms:
            self._count(False)
        self._site.member.version = pending.step + 1
        updates = self._site.state.updates
        self.agreed(updates.apply_outcome(pending.ballot, pending.step).waits_next)
        events.emit("settled", rank=self._site.rank, step=pending.step, waited_s=time.monotonic() - began)
        if updates.ahead and (updates.hold_next or self._waits_next):
            updates.wait_for_vote()
            self._drop_copy(self._site.state.version)

    def blamed(self, error: Exception) -> Exception:
        """(a step has failed) Returns `error`, or Misspeculated if the step before has to be taken back anyway."""
        pending = self._pending
        if pending is None or isinstance(error, Misspeculated):
            return error
        try:
            clipped = any(norm.clips() for norm in pending.norms)
        except RuntimeError:  # a rank is lost; the recovery handles it
            return error
        if not clipped:
            return error
        wrong = self._misspeculated(pending)
        wrong.__cause__ = error
        return wrong

    # --- after a failure ---

    def offer(self, own: Standing) -> Standing:
        """Returns this rank's recovery offer. `own`: its offer without the copies and the pending vote."""
        pending = self._pending
        if pending is None:
            if own.version is None and own.undo_to is None and self._copies:
                return replace(own, undo_to=max(self._copies), undo_exact=True)
            return own
        if own.version not in (None, pending.step + 1):
            return own  # the state has moved to another version since
        # The rank counts as in the vote on that step, like one that waits there.
        onward = own.version is not None and pending.known_valid()
        return Standing(
            version=None,
            undo_to=pending.step,
            undo_exact=True,
            forward_to=pending.step + 1 if onward else None,
            forward_by_all=self._site.state.updates.lines,
        )

    def take_back(self, version: int) -> bool:
        """Goes back to a version. Returns False if there is no copy of it. Raises ServiceError if the trainer's objects
        cannot load it."""
        copy = self._copies.get(version)
        if copy is None:
            return False
        self._site.channel.faults.at("take_back", version)
        self._site.state.present = False
        # Loads a copy of the copy, because optimizers keep the tensors that they load.
        self._site.state.load_state_dict(restored(copy.skeleton, copy.named()))
        self._site.state.present = True
        pending = self._pending
        if pending is not None and not pending.known_valid():
            self._site.witness.forget()  # later digests are of a state that is discarded
        return True

    def resume(self, *, at_start: bool) -> None:
        """(all ranks go on from one version) Discards the pending vote, its norms and all copies."""
        for norm in (*self._norms, *(self._pending.norms if self._pending is not None else ())):
            norm.give_up()
        self._pending, self._waits_next = None, True
        for version in list(self._copies):
            self._drop_copy(version)

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

    def _drop_copy(self, version: int) -> None:
        copy = self._copies.pop(version, None)
        if copy is not None:
            self._spare = [*self._spare, copy][-2:]

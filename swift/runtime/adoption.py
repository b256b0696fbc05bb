"""Batches of data-parallel ranks whose slots are vacant, computed by those that are left.

Before its own step a rank carries out the trainer's step once for each origin that it has adopted, up to the first
reduction of gradients. Then it takes that step back, as a failure would, and keeps the gradients. In the reduction of
its own step they are added in the order of origins (`swift.runtime.reducer`). So the mean has the bits that it has in a
full world.

    (engine)  ``check`` once → ``arm`` in each generation
    (steps)   ``before`` every step → (reducer) ``shares`` → ``after`` it

That works if a step takes from `session.dp_rank`, and from loaders made by `session.loader`, whatever belongs to one
data-parallel rank alone. It is tried out before the first step, and in a generation with a process that is new: each
rank computes its own gradients and those of the next data-parallel rank, and all compare what they have. Memory: a copy
of the gradients for each origin that is adopted.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
import xxhash

from swift import events
from swift.errors import UsageError
from swift.recovery import Assignment
from swift.runtime.channel import Channel
from swift.runtime.differences import Differences
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.origin_loaders import OriginLoaders
from swift.runtime.reducer import Shares
from swift.runtime.state import TrainerState
from swift.runtime.tensors import byte_view, plain
from swift.runtime.witness import Witness

Gradients = Mapping[torch.nn.Parameter, torch.Tensor]
_DIGEST_BYTES = 16


class _Computed(Exception):
    """The gradients of that origin are there, and not yet reduced."""


class Adoption:
    """One rank's. Trainer's thread."""

    def __init__(
        self,
        wanted: bool,
        slot: int,
        channel: Channel,
        state: TrainerState,
        assignment: Callable[[], Assignment],
        data: ReconfigurableGroup,
        witness: Witness,
        differences: Differences,
    ) -> None:
        """`wanted`: the job redistributes. `assignment`: of this generation. `data`: the ranks of this stage."""
        self._wanted = wanted
        self._slot = slot
        self._channel = channel
        self._state = state
        self.loaders = OriginLoaders()
        self._assignment = assignment
        self._data = data
        self._witness = witness
        self._differences = differences
        self._begins = False
        """A generation does, and nobody has asked yet whether all have tried it out."""
        self._tried = False
        self._named = False
        self.under_way = False
        """A step that is taken back, for the gradients of one origin."""
        self._gradients: list[Gradients] = []
        """Of this step, by adopted origin, ascending."""
        state.updates.before_reduction.bind(self._before_reduction)

    def check(self) -> None:
        """(all is registered) Raises UsageError for a trainer whose steps cannot be carried out for another rank."""
        updates = self._state.updates
        if not self._wanted:
            return
        if len(updates.optimizers) > 1:
            raise UsageError(
                "lost_shard='redistribute' with several optimizers: only what comes before the first reduction is "
                "computed for a lost rank; use one optimizer with several param_groups, or lost_shard='drop'"
            )
        if any(journal.whole for journal in updates.journals):
            raise UsageError(
                "lost_shard='redistribute' with an optimizer that computes gradients in its step (LBFGS): use "
                "lost_shard='drop'"
            )

    def arm(self) -> None:
        """Another generation goes on, perhaps with a process that is new."""
        self._begins = self._wanted

    def shares(self) -> Shares | None:
        """What is reduced in this step. None: each rank has its own gradients alone."""
        assignment = self._assignment()
        if not assignment.adopted:
            return None
        origins = [
            (assignment.slots[slot].dp_rank, *adopted_by(assignment, slot))
            for slot in assignment.group(self._slot)
        ]
        return Shares(origins, self._gradients)

    def before(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """Computes what this rank has adopted in this step. `drop` takes a step back."""
        self._gradients = []
        if not self._wanted or self._channel.replaying:
            return
        if self._begins:
            tried = self._data.gathered(torch.tensor([self._tried]))
            if not all(bool(each) for each in tried):
                self._try_out(train_step, step, drop)
            self._begins = False
        for origin in adopted_by(self._assignment(), self._slot):
            self._gradients.append(self._computed(origin, train_step, step, drop))
            events.emit("adopted_step", rank=self._slot, step=step, origin=origin)

    def after(self) -> None:
        """(the step is done) Raises UsageError for one that nobody could have carried out for another rank."""
        if self._wanted and self._state.updates.stepped > 1:
            raise UsageError(
                "lost_shard='redistribute' and a train_step that updates twice: only what comes before the first "
                "update is computed for a lost rank; make two steps of it, or use lost_shard='drop'"
            )

    def communicated(self, step: int) -> None:
        """The trainer communicates over several ranks in its step."""
        if self.under_way:
            raise UsageError(
                "lost_shard='redistribute' and a train_step that communicates before its gradients are reduced: for a "
                "lost rank it is carried out by one rank alone; do it behind optimizer.step(), or use lost_shard='drop'"
            )
        if self._wanted and not self._named and self._assignment().adopted:
            self._named = True
            self._differences.say(step, "a collective of train_step lacked the part of a rank that was lost")

    # --- ---

    def _before_reduction(self) -> None:
        if self.under_way:
            raise _Computed

    def _computed(
        self, origin: int, train_step: Callable[[int], object], step: int, drop: Callable[[], None]
    ) -> Gradients:
        """Parameter -> its gradient, for this origin's batch; of those that have one."""
        quiet, self._witness.quiet = self._witness.quiet, True
        self._channel.rehearsing = self.under_way = True
        try:
            with self._channel.as_origin(origin):
                self._channel.begin_step(step)
                self._state.begin_step()
                self.loaders.begin(origin)
                try:
                    train_step(step)
                except _Computed:
                    pass
                gradients = {
                    p: p.grad.detach().clone()
                    for p in chain.from_iterable(stage.submod.parameters() for stage in self._state.stages)
                    if p.grad is not None and p.requires_grad
                }
        finally:
            self._witness.quiet = quiet
            self._channel.rehearsing = self.under_way = False
        drop()
        return gradients

    def _try_out(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> None:
        """Whether others can compute this rank's gradients, before anybody has to."""
        assignment = self._assignment()
        ranks = [assignment.slots[slot].dp_rank for slot in assignment.group(self._slot)]
        if len(ranks) == 1:
            self._differences.say(
                step, "nobody was left to try out whether one rank can compute another's batches"
            )
            self._tried = True
            return
        next_to = dict(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        own = self._channel.origin
        told = b"".join(
            self._digest(self._computed(origin, train_step, step, drop)) for origin in (own, next_to[own])
        )
        gathered = dict(
            zip(ranks, self._data.gathered(torch.frombuffer(bytearray(told), dtype=torch.uint8)), strict=True)
        )
        for rank, other in next_to.items():
            if not torch.equal(gathered[rank][_DIGEST_BYTES:], gathered[other][:_DIGEST_BYTES]):
                raise UsageError(
                    f"lost_shard='redistribute': data-parallel rank {rank} has computed other gradients for the batch "
                    f"of rank {other} than rank {other} itself; ask session.dp_rank inside of train_step, make "
                    "loaders with session.loader(lambda dp_rank: ...), or use lost_shard='drop'"
                )
        self._tried = True

    def _digest(self, gradients: Gradients) -> bytes:
        state = xxhash.xxh3_128()
        for stage in self._state.stages:
            for parameter in stage.submod.parameters():
                gradient = gradients.get(parameter)
                state.update(b"-" if gradient is None else byte_view(plain(gradient).contiguous()).data)
        return state.digest()


def adopted_by(assignment: Assignment, slot: int) -> Sequence[int]:
    """The origins whose batches this slot computes besides its own, ascending."""
    return sorted({origin for (_, origin), owners in assignment.adopted.items() if slot in owners})

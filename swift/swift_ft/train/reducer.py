"""Averages gradients over the data-parallel ranks of a stage, bucket by bucket."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from swift_ft.comm.backend import Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import operation
from swift_ft.comm.worker_thread import Task
from swift_ft.errors import UsageError
from swift_ft.state.journal import Journal
from swift_ft.state.transfer import local

# A collective that fails leaves its buffer partly reduced on some ranks (tests/integration/test_groups.py). So a
# bucket is reduced in a flat copy, and gradients are written only after the collective has succeeded on this rank.
# The commit vote decides whether it has succeeded on all ranks.
#
# Where ranks have adopted the batches of others (`swift_ft.train.batch_redistribution`), gradients are summed in the
# order of origins (the data-parallel ranks of the batches), independent of the ranks that hold them.
#
# Two ways to sum: *ordered* by data-parallel rank (`swift_ft.comm`), with bits independent of the layout, and
# *fast*, the backend's all_reduce, in the backend's order of additions (equal for equal layouts).

Bucket = Sequence[torch.nn.Parameter]


def is_ordered(reduction: str, dp_size: int) -> bool:
    """Returns whether sums are ordered. "auto" is ordered from three ranks on: a sum of two has only one order."""
    return reduction == "ordered" or (reduction == "auto" and dp_size > 2)


class Row(NamedTuple):
    """Batch, or part of a batch, whose gradients a rank holds."""

    origin: int
    part: int | None = None
    """None: the origin's whole batch, as on its own rank. Otherwise the index of one of the parts whose sum, in this
    order, gives the batch; not divided yet."""


class Contribution(Protocol):
    """Gradients that a rank contributes in one row."""

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether the parameter has a gradient in the origin's batch."""

    def numbers(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns the parameter's gradient, with its number of elements. It is -0.0, which changes no bit of a sum,
        if only other parts of the origin have a gradient."""


class Whole:
    """`Contribution` with all gradients of an origin's batch."""

    def __init__(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        self._gradients = gradients

    def has(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._gradients

    def numbers(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns the gradient; zeros for a parameter without one, as in a reduction between ranks."""
        gradient = self._gradients.get(parameter)
        return (
            torch.zeros(local(parameter).numel(), dtype=parameter.dtype, device=parameter.device)
            if gradient is None
            else local(gradient)
        )


class Shares(NamedTuple):
    """Distribution of gradients over the ranks of a group when some slots are vacant."""

    rows: Sequence[Sequence[Row]]
    """Rows of each rank of the group, by its place; the rank's own batch is the first."""
    place: int
    """This rank's place in the group."""
    gradients: Sequence[Contribution]
    """This rank's contributions to its rows after the first."""
    scale: int = 1
    """Divisor of the sum of an origin's microbatches."""


class Reduction(NamedTuple):
    """Asynchronous reduction of one bucket's gradients."""

    bucket: Bucket
    flat: torch.Tensor
    """[rows, n]: this rank's contributions. The first row becomes the sum."""
    contributions: int
    """Divisor of the sum."""
    task: Task


class Reducer:
    """Reductions over one data-parallel group, launched in the same order on all its ranks."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        contributions: Callable[[], int],
        *,
        ordered: bool,
        shares: Callable[[], Shares | None],
    ):
        """`contributions` returns the divisor of a sum in this generation (`Assignment.contributions`). `shares`
        returns the distribution of adopted batches, or None if there are none."""
        self._shares = shares
        self.group = group
        self._ordered = ordered
        self._contributions = contributions
        self._buffers: dict[tuple[torch.dtype, torch.device, int, int], list[torch.Tensor]] = {}
        self.seconds = 0.0
        """Seconds that the trainer's thread has spent in reductions."""

    def launch(self, bucket: Bucket) -> Reduction:
        """Starts averaging the bucket's gradients. Raises RuntimeError if a peer is gone."""
        began = time.monotonic()
        # Unused parameters have no gradient. A parameter that some data-parallel rank has used is averaged with zeros.
        # One that no rank has used keeps no gradient, or the optimizer would decay it.
        used = _flags([p.grad is not None for p in bucket], bucket)
        grads = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in bucket]
        check_dense(grads)
        parts = [grad.detach().reshape(-1) for grad in grads] + [used]
        sizes = _sizes(bucket)
        shares = self._shares()
        rows = 1 if shares is None else 1 + len(shares.gradients)
        # New memory of a bucket's size is slow (the kernel clears it page by page), so buffers are reused.
        kept = self._buffers.get((used.dtype, used.device, rows, sum(sizes)))
        flat = kept.pop() if kept else used.new_empty(rows, sum(sizes))
        torch.cat(parts, out=flat[0])
        for row, contribution in enumerate([] if shares is None else shares.gradients, start=1):
            torch.cat(parts_of(bucket, contribution), out=flat[row])
        add = operation(None)

        def run(collectives: Collectives) -> None:
            if shares is not None:
                flat[0].copy_(summed_by_origin(collectives, flat, shares.rows, shares.scale))
            elif self._ordered:
                collectives.all_reduce(flat[0], add)
            else:
                collectives.unordered_sum(flat[0])

        reduction = Reduction(bucket, flat, self._contributions(), self.group.submit(run))
        self.seconds += time.monotonic() - began
        return reduction

    def finish(self, reduction: Reduction, *, kept: bool = False) -> None:
        """Waits, then writes the averages into the gradients, which are unchanged until then. `kept`: the averages also
        stay in `Reduction.flat` until `reuse`. Raises the reduction's error."""
        began = time.monotonic()
        reduction.task.wait()
        self.write(reduction.bucket, reduction.flat, reduction.contributions)
        # After an error the buffer is not reused: an operation may still write into it.
        if not kept:
            self.reuse(reduction.flat)
        self.seconds += time.monotonic() - began

    def reuse(self, flat: torch.Tensor) -> None:
        """Releases this buffer for later reductions."""
        self._buffers.setdefault((flat.dtype, flat.device, *flat.shape), []).append(flat)

    def given(self, bucket: Bucket, average: torch.Tensor | None, source: int) -> torch.Tensor:
        """(all ranks) Broadcasts the averages of this bucket kept by the rank at place `source` and returns them.
        `average`: these averages on that rank, None elsewhere. Raises RuntimeError if a peer is gone."""
        if average is None:
            average = torch.empty(1, sum(_sizes(bucket)), dtype=bucket[0].dtype, device=bucket[0].device)
        row = average[0]
        self.group.run(lambda collectives: collectives.broadcast(row, source))
        return average

    def write(self, bucket: Bucket, flat: torch.Tensor, divisor: int | None = None) -> None:
        """Writes the first row of `flat` into the gradients. `divisor`: None if the row is divided already."""
        *parts, used = torch.split(flat[0], _sizes(bucket))
        targets, values = [], []
        # A parameter with a gradient here is used: only for others the host has to read what a device has summed.
        everywhere = all(parameter.grad is not None for parameter in bucket)
        users_of = [1] * len(bucket) if everywhere else used.tolist()
        for parameter, part, users in zip(bucket, parts, users_of, strict=True):
            if users == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            targets.append(local(parameter.grad))
            values.append(part.view_as(local(parameter)))
        if targets:
            with torch.no_grad():
                if divisor is not None:
                    torch._foreach_div_(values, divisor)
                torch._foreach_copy_(targets, values)

    def mean(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """(all ranks) Returns the mean of a number over the data-parallel ranks, summed in their order."""
        number = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
        total = number.detach().clone().reshape(1)
        add = operation(None)
        self.group.run(lambda collectives: collectives.all_reduce(total, add))
        average = (total / self._contributions()).reshape(number.shape)
        return average if isinstance(value, torch.Tensor) else float(average)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Overwrites `tensors` on all data-parallel ranks with the first rank's values, bit for bit."""

        def run(collectives: Collectives) -> None:
            for tensor in tensors:
                collectives.broadcast(tensor, 0)

        self.group.run(run)


def check_dense(gradients: Iterable[torch.Tensor]) -> None:
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise UsageError(
            "a sparse gradient cannot be averaged over replicas: give the embedding sparse=False (and Adam in the "
            "place of SparseAdam), or train it on one replica"
        )


def _sizes(bucket: Bucket) -> list[int]:
    """Returns the sizes of a flat copy's sections: one per gradient, then one for the counts of ranks that used it."""
    return [*(local(parameter).numel() for parameter in bucket), len(bucket)]


def _flags(values: list[bool], bucket: Bucket) -> torch.Tensor:
    """Returns one flag per parameter of the bucket, in its dtype and on its device."""
    flags = torch.tensor(values, dtype=bucket[0].dtype)
    return (
        flags
        if bucket[0].device.type == "cpu"
        else flags.pin_memory().to(bucket[0].device, non_blocking=True)
    )


def parts_of(bucket: Bucket, contribution: Contribution) -> list[torch.Tensor]:
    """Returns a contribution's sections of a flat copy, in the layout of `Reducer.launch`."""
    used = _flags([contribution.has(p) for p in bucket], bucket)
    return [*(contribution.numbers(p).reshape(-1) for p in bucket), used]


def summed_by_origin(
    collectives: Collectives, rows: torch.Tensor, whose: Sequence[Sequence[Row]], scale: int = 1
) -> torch.Tensor:
    """Returns the sum [n] over all origins, added in ascending order. An origin in parts is first summed over its
    parts, in their order, and divided by `scale`, as its own rank would have done.

    `rows` [rows of this rank, n]; `whose`: the rows of each member, by its place. Each member sums a slice of the n
    numbers, as in `Messages.all_reduce`, so the bits are those of a full world.
    """
    places = len(whose)
    size = -(-rows.shape[1] // places)
    padded = torch.nn.functional.pad(rows, (0, size * places - rows.shape[1]))
    outgoing = [part.contiguous() for part in torch.split(padded, size, dim=1)]
    incoming = [rows.new_empty(len(theirs), size) for theirs in whose]
    collectives.all_to_all(incoming, outgoing)
    parts: dict[int, dict[int | None, torch.Tensor]] = {}
    for theirs, numbers in zip(whose, incoming, strict=True):
        for row, number in zip(theirs, numbers, strict=True):
            parts.setdefault(row.origin, {})[row.part] = number
    first, *others = (_of_origin(parts[origin], scale) for origin in sorted(parts))
    total = first.clone()
    for other in others:
        total.add_(other)
    sums = [torch.empty_like(total) for _ in range(places)]
    collectives.all_gather(sums, total)
    return torch.cat(sums)[: rows.shape[1]]


def _of_origin(parts: Mapping[int | None, torch.Tensor], scale: int) -> torch.Tensor:
    """Returns the gradients of one origin's batch. May overwrite `parts`."""
    if None in parts:
        return parts[None]
    first, *others = (parts[part] for part in sorted(part for part in parts if part is not None))
    for other in others:
        first.add_(other)
    return first.div_(scale) if scale != 1 else first


class UpdateBucket:
    """State of one bucket of an optimizer's parameters in one step, from its reduction to its update."""

    def __init__(self, journal: Journal, index: int, averaged: Iterable[torch.nn.Parameter] = ()):
        """`averaged`: parameters whose gradients are averages already."""
        self.journal = journal
        self.index = index
        self.parameters = journal.buckets[index]
        self.reduction: Reduction | None = None
        self.averaged = set(self.parameters).intersection(averaged)
        """Parameters whose gradients are averages, with no optimizer step since."""
        self.launched_in = 0
        """(lossy-forward) Generation in which the bucket's reduction was started."""
        self.averaged_in = 0
        """(lossy-forward) Generation over whose ranks the bucket was averaged; 0: not averaged yet."""
        self.average: torch.Tensor | None = None
        """(lossy-forward) The averages, unaffected by later changes of the gradients."""
        self.awaited: set[torch.nn.Parameter] = set()

    def begin(self) -> None:
        """Resets the bucket for a new step."""
        self.reduction = None
        self.averaged = set()
        self.launched_in = self.averaged_in = 0
        self.average = None

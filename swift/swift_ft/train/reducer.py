"""A bucket of one optimizer's parameters, on its way to being applied."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from swift_ft.comm.backend import Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import operation
from swift_ft.errors import UsageError
from swift_ft.state.journal import Journal

# Averages gradients over the data-parallel ranks of a stage, bucket by bucket, into copies.
#
# A collective that fails leaves its buffer partly reduced on some ranks (tests/integration/test_groups.py). So a
# bucket is reduced in a flat copy, and gradients are written only after the collective has ended well here. Whether
# it has ended well everywhere is for the commit vote to say.
#
# Where ranks have adopted the batches of others (`swift_ft.train.batch_redistribution`), gradients are summed in the
# order of origins, whoever has them.
#
# Two ways to sum: *ordered* by data-parallel rank (`swift_ft.comm`), whose bits depend on no layout, and
# *fast*, the backend's all_reduce, whose order of additions is the backend's (the same for the same layout).

Bucket = Sequence[torch.nn.Parameter]


def is_ordered(reduction: str, dp_size: int) -> bool:
    """ "auto" adds in the order of data-parallel ranks from three on: a sum of two has one order only."""
    return reduction == "ordered" or (reduction == "auto" and dp_size > 2)


class Row(NamedTuple):
    """What a rank has gradients of."""

    origin: int
    part: int | None = None
    """None: of the origin's whole batch, as its own rank has it. Else one of the parts of which it is the sum, in their
    order; not divided yet."""


class Contribution(Protocol):
    """What a rank has in one row."""

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Whether there is a gradient of it in the origin's batch."""

    def numbers(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """As many as the parameter has. -0.0, which changes no bit, where other parts of the origin have them."""


class Whole:
    """All gradients of an origin's batch. See `Contribution`."""

    def __init__(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        self._gradients = gradients

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """As `Contribution.has`."""
        return parameter in self._gradients

    def numbers(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """0.0 for a parameter without a gradient, as between ranks."""
        gradient = self._gradients.get(parameter)
        return (
            torch.zeros(parameter.numel(), dtype=parameter.dtype) if gradient is None else gradient.detach()
        )


class Shares(NamedTuple):
    """Who has which gradients, where some slots are vacant."""

    rows: Sequence[Sequence[Row]]
    """Of each rank of the group, by its place: its own batch first."""
    place: int
    """This rank's."""
    gradients: Sequence[Contribution]
    """This rank's of each row behind its own batch."""
    scale: int = 1
    """What the sum of an origin's microbatches is divided by."""


class Reduction:
    """One bucket's gradients under way."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        bucket: Bucket,
        flat: torch.Tensor,
        contributions: int,
        ordered: bool,
        shares: Shares | None,
    ):
        """`flat`: what this rank has, in rows. `shares`: which rows each place of the group has. None: each has one, in
        the order of ranks."""
        self.contributions = contributions
        self.bucket = bucket
        self.flat = flat
        add = operation(None)

        def run(collectives: Collectives) -> None:
            if shares is not None:
                sum_by_origin(collectives, flat, shares.rows, shares.scale)
            elif ordered:
                collectives.all_reduce(flat[0], add)
            else:
                collectives.unordered_sum(flat[0])

        self._task = group.submit(run)

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return self._task.done

    @property
    def succeeded(self) -> bool:
        return self._task.done and self._task.error is None

    def wait(self) -> None:
        self._task.wait()


class Reducer:
    """Reductions over one data group, launched in the same order on all data-parallel ranks."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        contributions: Callable[[], int],
        *,
        ordered: bool,
        shares: Callable[[], Shares | None],
    ):
        """`contributions`: what a sum is divided by, of this generation (`Assignment.contributions`). `shares`: what
        ranks have adopted; None: nobody has."""
        self._shares = shares
        self._group = group
        self._ordered = ordered
        self._contributions = contributions
        self._buffers: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}
        self.seconds = 0.0
        """Time of the trainer's thread in reductions."""

    def launch(self, bucket: Bucket) -> Reduction:
        """Starts the average of the bucket's gradients. Raises RuntimeError if a peer is gone."""
        began = time.monotonic()
        # Unused parameters have no gradient. Those that some data-parallel rank has used are averaged with zeros; those
        # that nobody has used stay without one, or the optimizer would decay them.
        used = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        check_dense(grads)
        parts = [grad.detach().reshape(-1) for grad in grads] + [used]
        sizes = _sizes(bucket)
        shares = self._shares()
        rows = 1 if shares is None else 1 + len(shares.gradients)
        # Fresh memory of a bucket's size is dear (the kernel clears it page by page), so it is kept.
        kept = self._buffers.get((used.dtype, rows, sum(sizes)))
        flat = kept.pop() if kept else torch.empty(rows, sum(sizes), dtype=used.dtype)
        torch.cat(parts, out=flat[0])
        for row, contribution in enumerate([] if shares is None else shares.gradients, start=1):
            torch.cat(parts_of(bucket, contribution), out=flat[row])
        reduction = Reduction(self._group, bucket, flat, self._contributions(), self._ordered, shares)
        self.seconds += time.monotonic() - began
        return reduction

    def finish(self, reduction: Reduction, *, kept: bool = False) -> None:
        """Waits, then writes the averages into the gradients, which nothing has touched before. `kept`: they stay in
        `Reduction.flat` as well, until `reuse`."""
        began = time.monotonic()
        reduction.wait()
        self._write(reduction.bucket, reduction.flat, reduction.contributions)
        # Not after an error: an operation may still write into it.
        if not kept:
            self.reuse(reduction.flat)
        self.seconds += time.monotonic() - began

    def reuse(self, flat: torch.Tensor) -> None:
        """Nobody looks at this buffer any more."""
        self._buffers.setdefault((flat.dtype, *flat.shape), []).append(flat)

    def given(self, bucket: Bucket, average: torch.Tensor | None, source: int) -> torch.Tensor:
        """(all ranks) The averages that the rank at place `source` has kept of this bucket, bit for bit. `average`:
        these, at that rank. Raises RuntimeError if a peer is gone."""
        if average is None:
            average = torch.empty(1, sum(_sizes(bucket)), dtype=bucket[0].dtype)
        row = average[0]
        self._group.run(lambda collectives: collectives.broadcast(row, source))
        return average

    def write_average(self, bucket: Bucket, average: torch.Tensor) -> None:
        """Writes averages that were kept into the gradients."""
        self._write(bucket, average, None)

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """(all ranks) Of each rank, by its place."""
        return self._group.gathered(tensor)

    def _write(self, bucket: Bucket, flat: torch.Tensor, divisor: int | None) -> None:
        """`divisor`: None if what is there is divided already."""
        *parts, used = torch.split(flat[0], _sizes(bucket))
        targets, values = [], []
        for parameter, part, users in zip(bucket, parts, used.tolist(), strict=True):
            if users == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            targets.append(parameter.grad)
            values.append(part.view_as(parameter))
        if targets:
            with torch.no_grad():
                if divisor is not None:
                    torch._foreach_div_(values, divisor)
                torch._foreach_copy_(targets, values)

    def mean(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """Of a number that every data-parallel rank has, added in the order of data-parallel ranks."""
        number = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
        total = number.detach().clone().reshape(1)
        add = operation(None)
        self._group.run(lambda collectives: collectives.all_reduce(total, add))
        average = (total / self._contributions()).reshape(number.shape)
        return average if isinstance(value, torch.Tensor) else float(average)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Gives all data-parallel ranks the first one's values, bit for bit."""

        def run(collectives: Collectives) -> None:
            for tensor in tensors:
                collectives.broadcast(tensor, 0)

        self._group.run(run)


def check_dense(gradients: Iterable[torch.Tensor]) -> None:
    """Raises UsageError."""
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise UsageError(
            "a sparse gradient cannot be averaged over replicas: give the embedding sparse=False (and Adam in the "
            "place of SparseAdam), or train it on one replica"
        )


def _sizes(bucket: Bucket) -> list[int]:
    """Of what a flat copy has of each gradient; and how many ranks have used which."""
    return [*(parameter.numel() for parameter in bucket), len(bucket)]


def parts_of(bucket: Bucket, contribution: Contribution) -> list[torch.Tensor]:
    """As `Reducer.launch` makes them of a rank's own batch."""
    used = torch.tensor([contribution.has(p) for p in bucket], dtype=bucket[0].dtype)
    return [*(contribution.numbers(p).reshape(-1) for p in bucket), used]


def sum_by_origin(
    collectives: Collectives, rows: torch.Tensor, whose: Sequence[Sequence[Row]], scale: int = 1
) -> None:
    """Writes into the first row what `summed_by_origin` gives."""
    rows[0].copy_(summed_by_origin(collectives, rows, whose, scale))


def summed_by_origin(
    collectives: Collectives, rows: torch.Tensor, whose: Sequence[Sequence[Row]], scale: int = 1
) -> torch.Tensor:
    """The sum over all origins, in their order, from the first on [n]. An origin that is in parts is summed first, in
    their order, and divided by `scale`, as its own rank would have done it.

    `rows` [of this rank, n]; `whose`: of each member, by its place, what its rows are. Each member sums a part of the n
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
    """The gradients of one origin's batch; may overwrite them."""
    if None in parts:
        return parts[None]
    first, *others = (parts[part] for part in sorted(part for part in parts if part is not None))
    for other in others:
        first.add_(other)
    return first.div_(scale) if scale != 1 else first


class UpdateBucket:
    """What one step has of it."""

    def __init__(self, journal: Journal, index: int, averaged: Iterable[torch.nn.Parameter] = ()):
        """`averaged`: whose gradients are averages already."""
        self.journal = journal
        self.index = index
        self.parameters = journal.buckets[index]
        self.reduction: Reduction | None = None
        self.averaged = set(self.parameters).intersection(averaged)
        """Whose gradients are averages, and the optimizer has not stepped since."""
        self.launched_in = 0
        """(a step that may be cut short) The generation in which its reduction was begun."""
        self.averaged_in = 0
        """(a step that may be cut short) The generation over whose ranks it was averaged; 0: it was not yet."""
        self.average: torch.Tensor | None = None
        """(the same) What came of it, whatever the trainer has made of its gradients since."""
        self.awaited: set[torch.nn.Parameter] = set()

    def begin(self) -> None:
        """A step does."""
        self.reduction = None
        self.averaged = set()
        self.launched_in = self.averaged_in = 0
        self.average = None

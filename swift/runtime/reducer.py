"""Averages gradients over the data-parallel ranks of a stage, bucket by bucket, into copies.

A collective that fails leaves its buffer partly reduced on some ranks (tests/integration/test_groups.py). So a
bucket is reduced in a flat copy, and gradients are written only after the collective has ended well here. Whether
it has ended well everywhere is for the commit vote to say.

Two ways to sum: *ordered* by data-parallel rank (`swift.runtime.backends`), whose bits depend on no layout, and
*fast*, the backend's all_reduce, whose order of additions is the backend's (the same for the same layout).
"""

import time
from collections.abc import Callable, Sequence

import torch

from swift.errors import UsageError
from swift.runtime.backends.base import Collectives
from swift.runtime.backends.ordered import operation
from swift.runtime.groups import ReconfigurableGroup

Bucket = Sequence[torch.nn.Parameter]


def is_ordered(reduction: str, dp_size: int) -> bool:
    """ "auto" adds in the order of data-parallel ranks from three on: a sum of two has one order only."""
    return reduction == "ordered" or (reduction == "auto" and dp_size > 2)


class Reduction:
    """One bucket's gradients under way."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        bucket: Bucket,
        flat: torch.Tensor,
        sizes: list[int],
        contributions: int,
        ordered: bool,
    ):
        self.contributions = contributions
        self.bucket = bucket
        self.flat = flat
        self.sizes = sizes
        add = operation(None)
        self._task = (
            group.submit(lambda collectives: collectives.all_reduce(flat, add))
            if ordered
            else group.submit(lambda collectives: collectives.unordered_sum(flat))
        )

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return self._task.done

    def wait(self) -> None:
        self._task.wait()


class Reducer:
    """Reductions over one data group, launched in the same order on all data-parallel ranks."""

    def __init__(self, group: ReconfigurableGroup, contributions: Callable[[], int], *, ordered: bool):
        """`contributions`: what a sum is divided by, of this generation (`Assignment.contributions`)."""
        self._group = group
        self._ordered = ordered
        self._contributions = contributions
        self._buffers: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self.seconds = 0.0
        """Time of the trainer's thread in reductions."""

    def launch(self, bucket: Bucket) -> Reduction:
        """Starts the average of the bucket's gradients. Raises RuntimeError if a peer is gone."""
        began = time.monotonic()
        # Unused parameters have no gradient. Those that some data-parallel rank has used are averaged with zeros; those
        # that nobody has used stay without one, or the optimizer would decay them.
        used = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        if any(grad.layout is not torch.strided for grad in grads):
            raise UsageError(
                "a sparse gradient cannot be averaged over replicas: give the embedding sparse=False (and Adam in the "
                "place of SparseAdam), or train it on one replica"
            )
        parts = [grad.detach().reshape(-1) for grad in grads] + [used]
        sizes = [part.numel() for part in parts]
        # Fresh memory of a bucket's size is dear (the kernel clears it page by page), so it is kept.
        kept = self._buffers.get((used.dtype, sum(sizes)))
        flat = kept.pop() if kept else torch.empty(sum(sizes), dtype=used.dtype)
        torch.cat(parts, out=flat)
        reduction = Reduction(self._group, bucket, flat, sizes, self._contributions(), self._ordered)
        self.seconds += time.monotonic() - began
        return reduction

    def finish(self, reduction: Reduction) -> None:
        """Waits, then writes the averages into the gradients, which nothing has touched before."""
        began = time.monotonic()
        reduction.wait()
        self._write(reduction)
        # Not after an error: an operation may still write into it.
        key = (reduction.flat.dtype, reduction.flat.numel())
        self._buffers.setdefault(key, []).append(reduction.flat)
        self.seconds += time.monotonic() - began

    def _write(self, reduction: Reduction) -> None:
        *parts, used = torch.split(reduction.flat, reduction.sizes)
        targets, values = [], []
        for parameter, part, users in zip(reduction.bucket, parts, used.tolist(), strict=True):
            if users == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            targets.append(parameter.grad)
            values.append(part.view_as(parameter))
        if targets:
            with torch.no_grad():
                torch._foreach_div_(values, reduction.contributions)
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

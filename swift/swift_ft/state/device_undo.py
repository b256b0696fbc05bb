"""Undo on a device: copies of a bucket, which give way to codes once the host knows that these suffice.

The old values are copied before the step, and the kernel of `kernels.cpp` codes what the step computed backwards misses
of them, in the training stream. Unlike on a CPU, the host does not wait for it. So the copies stay until the device has
come so far; then codes of a byte for each value take their place, unless too many values do not fit into a byte.
"""

from typing import Protocol

import torch

from swift_ft.state.inverse_step import Bucket
from swift_ft.state.kernels import DeviceCodes


class Copies(Protocol):
    """`swift_ft.state.journal.PreImage`"""

    @property
    def extra_bytes(self) -> int: ...
    def by_address(self) -> dict[int, torch.Tensor]: ...
    def undo(self) -> None: ...


class CodedCopies:
    """Bit-exact undo.

    Before the step ``CodedCopies(bucket, copies)`` → the optimizer's step → ``after()`` → ``settled()`` now and then;
    later ``undo()``
    """

    exact = True

    def __init__(self, bucket: Bucket, copies: Copies):
        self._bucket = bucket
        self._copies: Copies | None = copies
        self._codes: list[DeviceCodes] = []

    @property
    def extra_bytes(self) -> int:
        copied = 0 if self._copies is None else self._copies.extra_bytes
        return copied + self._bucket.scalar_bytes + sum(codes.bytes for codes in self._codes)

    @torch.no_grad()
    def after(self) -> None:
        """(after the optimizer's step) Queues the coding."""
        self._bucket.applied()
        assert self._copies is not None
        copies = self._copies.by_address()
        for cluster in self._bucket.clusters(sane=False):
            kept = cluster.columns[: cluster.kept]
            old = [[copies[tensor.data_ptr()] for tensor in column] for column in kept]
            self._codes.append(DeviceCodes(cluster.backwards, cluster.gradients, cluster.columns, old))

    def settled(self) -> bool:
        """Returns whether it is decided what is kept. Does not wait."""
        if not all(codes.counted for codes in self._codes):
            return False
        if all(codes.fit() for codes in self._codes):
            self._copies = None
        else:
            self._codes = []
        return True

    @torch.no_grad()
    def undo(self) -> None:
        """Restores the bucket's values before the step, bit for bit. Does not wait."""
        if self._copies is not None:
            self._copies.undo()
            return
        self._bucket.check_gradients()
        for codes in self._codes:
            codes.undo()
        self._bucket.restore_scalars()

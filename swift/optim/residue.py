"""Undo bit for bit, by keeping what the computation backwards misses.

When a bucket is applied, its step is computed backwards at once, next to a passing copy of the old values; the
difference, in units of the last place (as integers of the bits), is nearly always small. It is kept in a byte, or
two of them in one byte, and the few that do not fit ("escapes": where the old value was tiny or not finite) are
kept whole with their position (codes.py). Undo repeats the same computation, which has the same bits, and adds the
differences.

    columns of a parameter          bytes per element
    parameter                       1
    parameter, one state            1 + 1
    parameter, two states           ½ + ½ (parameter, second moment) + 1
    parameter, three states         ½ + ½ (parameter, second moment) + ½ + ½

Escapes come on top: 8 bytes each for float32. Measured with normal gradients: 2.0 to 2.3 bytes per parameter, 2.8
in the second step of an optimizer with two states, 4.3 and 3.2 in the second and third of centered RMSprop with
momentum (three states), where a second moment that is the sum of few squares grows many times over.
"""

from typing import Protocol

import torch

from swift.optim import torch_names as many
from swift.optim.codes import ManyPasses, OnePass
from swift.optim.inverse import Bucket
from swift.optim.units import Pool

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
YOUNG = 5
"""Up to this step a second moment often grows many times over, and needs the whole byte."""


def layout(names: tuple[str, ...], step: float = YOUNG) -> list[tuple[int, ...]]:
    """Columns that share a byte, for a parameter with these states after so many steps."""
    width = 1 + len(names)
    if width < 3:
        return [(column,) for column in range(width)]
    second = next((1 + i for i, name in enumerate(names) if name in SECOND_MOMENTS), width - 1)
    others = tuple(column for column in range(1, width) if column != second)
    if width == 3 and step < YOUNG:
        return [(0, *others), (second,)]
    return [(0, second), others]


class Residue(Protocol):
    """What the computation backwards of a cluster misses."""

    @property
    def bytes(self) -> int: ...
    def undo(self) -> None: ...


class Exact:
    """(journal) before the step ``Exact(bucket, …)`` → the optimizer's step → ``after()``; later ``undo()``."""

    exact = True

    def __init__(self, bucket: Bucket, pool: Pool, key: object):
        """`key` names the bucket's buffers in `pool`, which are used again in the next step."""
        self._bucket = bucket
        self._pool = pool
        self._key = key
        self._threads = torch.get_num_threads()
        self._residues: list[Residue] = []
        old = [index for index, first in enumerate(bucket.first) if not first]
        new = [index for index, first in enumerate(bucket.first) if first]
        self._old = {**self._copies(old, state=True), **self._copies(new, state=False)}

    @property
    def extra_bytes(self) -> int:
        return self._bucket.scalar_bytes + sum(residue.bytes for residue in self._residues)

    @torch.no_grad()
    def _copies(self, members: list[int], *, state: bool) -> dict[int, list[torch.Tensor]]:
        """Old values by parameter: it and its state, each flat, in a passing buffer."""
        if not members:
            return {}
        live = self._bucket.columns(members, state=state)
        dtype, device = live[0][0].dtype, live[0][0].device
        total = sum(tensor.numel() for column in live for tensor in column)
        buffer = self._pool.take(("old", state, dtype, device), total, dtype, device)
        copies: dict[int, list[torch.Tensor]] = {index: [] for index in members}
        for column in live:
            sizes = [tensor.numel() for tensor in column]
            pieces = torch.split(buffer[: sum(sizes)], sizes)
            buffer = buffer[sum(sizes) :]
            many.copy_([piece.view_as(t) for piece, t in zip(pieces, column, strict=True)], column)
            for index, piece in zip(members, pieces, strict=True):
                copies[index].append(piece)
        return copies

    @torch.no_grad()
    def after(self) -> None:
        """Called when the step is applied: computes it backwards, and keeps what that misses of the old values."""
        bucket = self._bucket
        bucket.applied()
        if bucket.skipped:
            return
        for number, cluster in enumerate(bucket.clusters(sane=False)):
            # By column, as the live tensors are.
            old = [list(column) for column in zip(*(self._old[i] for i in cluster.members), strict=True)]
            names = bucket.names if cluster.kept > 1 else ()
            way = ManyPasses if cluster.one_pass is None else OnePass
            self._residues.append(
                way(cluster, old, layout(names, cluster.applied.step), self._pool, (self._key, number))
            )
        self._old = {}

    @torch.no_grad()
    def undo(self) -> None:
        """Puts the bucket back to its values before the step, bit for bit, with as many threads as then."""
        bucket = self._bucket
        bucket.check_gradients()
        threads = torch.get_num_threads()
        if threads != self._threads:
            torch.set_num_threads(self._threads)  # the bits of a computation depend on how it is cut
        try:
            for residue in self._residues:
                residue.undo()
        finally:
            if threads != self._threads:
                torch.set_num_threads(threads)
        bucket.restore_scalars()

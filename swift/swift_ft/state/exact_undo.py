"""Bit-exact undo: keeps the residue, the difference between the inverse step's result and the old values.

When a bucket is applied, its step is inverted at once, next to a temporary copy of the old values. The residue is taken
in units of the last place (as integers of the bits) and is nearly always small: it is kept in a byte for each element
of the parameter and of its state. The few that do not fit ("escapes": where the old value was tiny or not finite) are
kept as whole values with their position, 8 bytes each for float32. Undo repeats the same computation, which gives the
same bits, and adds the residue.
"""

import torch

from swift_ft.state import optimizer_names
from swift_ft.state.inverse_step import Bucket, Cluster
from swift_ft.state.kernels import DTYPES, ROOM, Pool


def _whole(old: torch.Tensor) -> torch.Tensor:
    """Returns what is kept of a column in which most elements escape: old [N], or the one value of all elements."""
    integers = old.view(DTYPES[old.dtype])
    return old[:1].clone() if bool((integers == integers[0]).all()) else old.clone()


class Residue:
    """A cluster's residue: the old values minus the result of the inverse step. Computed in the constructor.

    `old`: values before the step, by column as in the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        old: list[list[torch.Tensor]],
        pool: Pool,
        key: tuple[object, ...],
    ):
        self._cluster = cluster
        numel, dtype, device = sum(t.numel() for t in old[0]), old[0][0].dtype, old[0][0].device
        self._codes = [pool.get((*key, i), numel, torch.int8, device) for i in range(len(old))]
        self._some: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole: dict[int, torch.Tensor] = {}
        most, room = numel // 2, max(ROOM, numel // 64)
        while True:
            space = {
                column: (
                    pool.get(("where", column, device), room, torch.int32, device),
                    pool.get(("escaped", column, dtype, device), room, dtype, device),
                )
                for column in range(len(old))
            }
            counts = cluster.one_pass.record(old, self._codes, space)
            needed = max((count for count in counts if count <= most), default=0)
            if needed <= room:
                break
            room = needed
        for column, count in enumerate(counts):
            if count > most:
                self._whole[column] = _whole(torch.cat([tensor.reshape(-1) for tensor in old[column]]))
            elif count:
                where, values = space[column]
                self._some[column] = (where[:count].clone(), values[:count].clone())

    @property
    def bytes(self) -> int:
        escapes = [*(tensor for some in self._some.values() for tensor in some), *self._whole.values()]
        return sum(tensor.nbytes for tensor in (*self._codes, *escapes))

    def undo(self) -> None:
        self._cluster.one_pass.undo(self._codes, self._some)
        for column, whole in self._whole.items():
            tensors = self._cluster.columns[column]
            values = whole.expand(sum(tensor.numel() for tensor in tensors))
            for tensor, old in zip(tensors, torch.split(values, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(old.view(tensor.shape))


class Exact:
    """Bit-exact undo. Before the step ``Exact(bucket, …)`` → the optimizer's step → ``after()``; later ``undo()``"""

    exact = True

    def __init__(self, bucket: Bucket, pool: Pool, key: object):
        """`key` names the bucket's buffers in `pool`, which are reused in the next step."""
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
        """Returns old values by parameter, itself and its state, each flat, in a temporary buffer."""
        if not members:
            return {}
        live = self._bucket.columns(members, state=state)
        dtype, device = live[0][0].dtype, live[0][0].device
        total = sum(tensor.numel() for column in live for tensor in column)
        buffer = self._pool.get(("old", state, dtype, device), total, dtype, device)
        copies: dict[int, list[torch.Tensor]] = {index: [] for index in members}
        for column in live:
            sizes = [tensor.numel() for tensor in column]
            pieces = torch.split(buffer[: sum(sizes)], sizes)
            buffer = buffer[sum(sizes) :]
            optimizer_names.copy_([piece.view_as(t) for piece, t in zip(pieces, column, strict=True)], column)
            for index, piece in zip(members, pieces, strict=True):
                copies[index].append(piece)
        return copies

    @torch.no_grad()
    def after(self) -> None:
        bucket = self._bucket
        bucket.applied()
        if bucket.skipped:
            return
        for number, cluster in enumerate(bucket.clusters(sane=False)):
            # By column, in the order of the live tensors.
            old = [list(column) for column in zip(*(self._old[i] for i in cluster.members), strict=True)]
            self._residues.append(Residue(cluster, old, self._pool, (self._key, number)))
        self._old = {}

    @torch.no_grad()
    def undo(self) -> None:
        """Restores the bucket's values before the step, bit for bit, with the thread count of that time."""
        bucket = self._bucket
        bucket.check_gradients()
        threads = torch.get_num_threads()
        if threads != self._threads:
            torch.set_num_threads(self._threads)  # the bits depend on the division among threads
        try:
            for residue in self._residues:
                residue.undo()
        finally:
            if threads != self._threads:
                torch.set_num_threads(threads)
        bucket.restore_scalars()

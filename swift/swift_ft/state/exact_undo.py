"""Bit-exact undo: keeps the residue, the difference between the inverse step's result and the old values.

When a bucket is applied, its step is inverted at once, next to a temporary copy of the old values. The residue is taken
in units of the last place (as integers of the bits) and is nearly always small. It is kept in a byte, or two residues
share a byte. The few that do not fit ("escapes": where the old value was tiny or not finite) are kept as whole values
with their position. Undo repeats the same computation, which gives the same bits, and adds the residue.

    columns of a parameter          bytes per element
    parameter                       1
    parameter, one state            1 + 1
    parameter, two states           ½ + ½ (parameter, second moment) + 1
    parameter, three states         ½ + ½ (parameter, second moment) + ½ + ½

Escapes are extra: 8 bytes each for float32. Measured with normal gradients: 2.0 to 2.3 bytes per parameter; 2.8 in the
second step of an optimizer with two states; 4.3 and 3.2 in the second and third of centered RMSprop with momentum
(three states), where a second moment that is the sum of few squares grows many times over.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from swift_ft.state import optimizer_names
from swift_ft.state.inverse_step import Bucket, Cluster
from swift_ft.state.kernels import DTYPES, ROUND, Pool, Unit, cut

# Residues as codes: differences in units of the last place, and escapes.
#
# `OnePass` is for tensors that `kernels.cpp` supports; `ManyPasses` does the same with torch's operations. Their codes
# are not the same: the inverses differ in the last places.

BYTE = 127
NIBBLE = 7
_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte of a word
ROOM = 1024
"""Minimum number of escapes that a buffer has room for."""


@dataclass(slots=True)
class Escapes:
    """Elements of a column whose difference does not fit. `where` is None if `values` is the whole column, or the one
    value of all its elements."""

    where: torch.Tensor | None
    values: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.where, self.values) if t is not None)


def _whole(old: torch.Tensor) -> Escapes:
    """Returns the escapes of a column in which most elements escape: old [N]."""
    integers = old.view(DTYPES[old.dtype])
    return Escapes(None, old[:1].clone() if bool((integers == integers[0]).all()) else old.clone())


class OnePass:
    """A cluster's residue, computed by `kernels.cpp` in the constructor.

    `old`: values before the step, by column as in the cluster. `layout`: columns that share a byte.
    """

    def __init__(
        self,
        cluster: Cluster,
        old: list[list[torch.Tensor]],
        layout: list[tuple[int, ...]],
        pool: Pool,
        key: tuple[object, ...],
    ):
        assert cluster.one_pass is not None
        self._cluster = cluster
        self._layout = layout
        numel, dtype, device = sum(t.numel() for t in old[0]), old[0][0].dtype, old[0][0].device
        self._codes = [pool.get((*key, i), numel, torch.int8, device) for i in range(len(layout))]
        self._some: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole: dict[int, Escapes] = {}
        most, room = numel // 2, max(ROOM, numel // 64)
        while True:
            space = {
                column: (
                    pool.get(("where", column, device), room, torch.int32, device),
                    pool.get(("escaped", column, dtype, device), room, dtype, device),
                )
                for column in range(len(old))
            }
            counts = cluster.one_pass.record(old, layout, self._codes, space)
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
        some = [Escapes(where, values) for where, values in self._some.values()]
        return sum(c.numel() for c in self._codes) + sum(e.bytes for e in [*some, *self._whole.values()])

    def undo(self) -> None:
        assert self._cluster.one_pass is not None
        self._cluster.one_pass.undo(self._layout, self._codes, self._some)
        for column, escapes in self._whole.items():
            tensors = self._cluster.columns[column]
            values = escapes.values.expand(sum(tensor.numel() for tensor in tensors))
            for tensor, old in zip(tensors, torch.split(values, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(old.view(tensor.shape))


@dataclass(slots=True)
class _Coded:
    """The residue of one unit."""

    codes: list[torch.Tensor]
    escapes: list[tuple[int, Escapes]] = field(default_factory=list)  # (column, its escapes)


class ManyPasses:
    """A residue as `OnePass` computes it, for tensors of any device and layout, unit by unit."""

    def __init__(
        self,
        cluster: Cluster,
        old: list[list[torch.Tensor]],
        layout: list[tuple[int, ...]],
        pool: Pool,
        key: tuple[object, ...],
    ):
        self._cluster = cluster
        self._layout = layout
        self._pool = pool
        total, device = sum(_padded(unit.numel) for unit in cluster.units), old[0][0].device
        room = [pool.get((*key, i), total, torch.int8, device) for i in range(len(layout))]
        self._coded: list[_Coded] = []
        at = 0
        for unit, before in zip(cluster.units, cut(old[0], old, cluster.flat), strict=True):
            estimate = [self._scratch(unit, column) for column in range(unit.width)]
            cluster.backwards.kernel(estimate[0], unit.gradient(), estimate[1:])
            end = at + _padded(unit.numel)
            self._coded.append(self._encode(before, estimate, [r[at:end] for r in room]))
            at = end

    @property
    def bytes(self) -> int:
        return sum(
            sum(code.numel() for code in coded.codes) + sum(escapes.bytes for _, escapes in coded.escapes)
            for coded in self._coded
        )

    def _scratch(self, unit: Unit, column: int) -> torch.Tensor:
        like = self._cluster.columns[0][0]
        name = ("estimate", column, like.dtype, like.device)
        return unit.copy_column(column, self._pool.get(name, unit.numel, like.dtype, like.device))

    def _encode(
        self,
        before: Unit,
        estimate: list[torch.Tensor],
        room: list[torch.Tensor],
    ) -> "_Coded":
        coded = _Coded(room)
        integers = DTYPES[estimate[0].dtype]
        for shared, code in zip(self._layout, room, strict=True):
            limit = BYTE if len(shared) == 1 else NIBBLE
            code[-ROUND:].zero_()
            for place, column in enumerate(shared):
                old = before.column(column)
                difference = estimate[column].view(integers)
                torch.sub(old.view(integers), difference, out=difference)
                difference.clamp_(-limit, limit)
                target = code
                if place:
                    target = self._pool.get(("nibble", code.device), code.numel(), torch.int8, code.device)
                    target[-ROUND:].zero_()
                target[: difference.numel()].copy_(difference)
                escapes = _escapes(target, old, limit)
                if escapes is not None:
                    coded.escapes.append((column, escapes))
                if place:
                    code.bitwise_and_(15).add_(target, alpha=16)
        return coded

    def undo(self) -> None:
        """Restores the live tensors to their values before the step, bit for bit."""
        for unit, coded in zip(self._cluster.units, self._coded, strict=True):
            values = [unit.column(column) for column in range(unit.width)]
            self._cluster.backwards.kernel(values[0], unit.gradient(), values[1:])
            for shared, code in zip(self._layout, coded.codes, strict=True):
                code = code[: unit.numel]
                for place, column in enumerate(shared):
                    part = code
                    if len(shared) > 1:
                        part = code >> 4 if place else (code << 4).bitwise_right_shift_(4)
                    values[column].view(DTYPES[values[column].dtype]).add_(part)
            for column, escapes in coded.escapes:
                if escapes.where is None:
                    values[column].copy_(escapes.values)
                else:
                    values[column][escapes.where.long()] = escapes.values
            if not unit.direct:
                for column in range(self._cluster.kept):
                    unit.store(column, values[column])


def _padded(numel: int) -> int:
    return -(-numel // ROUND) * ROUND


def _escapes(code: torch.Tensor, old: torch.Tensor, limit: int) -> Escapes | None:
    """Returns the elements whose code is at a limit. It searches word by word, because nearly all words have none."""
    marked = code.abs().add_(128 - limit).view(torch.int64).bitwise_and_(_HIGH_BITS)
    words = marked.nonzero()
    if not words.numel():
        return None
    if 2 * words.numel() * ROUND > code.numel() and 2 * int((code.abs() == limit).sum()) > code.numel():
        return _whole(old)
    rows = code.view(-1, ROUND)[words.view(-1)].abs() == limit
    inside = rows.nonzero()
    where = words.view(-1)[inside[:, 0]] * ROUND + inside[:, 1]
    return Escapes(where.to(torch.int32), old[where])


SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
YOUNG = 5
"""Step below which a second moment often grows many times over, and needs the whole byte."""


def layout(names: tuple[str, ...], step: float = YOUNG) -> list[tuple[int, ...]]:
    """Returns the columns that share a byte, for a parameter with these states after so many steps."""
    width = 1 + len(names)
    if width < 3:
        return [(column,) for column in range(width)]
    second = next((1 + i for i, name in enumerate(names) if name in SECOND_MOMENTS), width - 1)
    others = tuple(column for column in range(1, width) if column != second)
    if width == 3 and step < YOUNG:
        return [(0, *others), (second,)]
    return [(0, second), others]


class Residue(Protocol):
    """The residue of a cluster: the old values minus the result of the inverse step."""

    @property
    def bytes(self) -> int: ...
    def undo(self) -> None: ...


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
        """(after the optimizer's step) Inverts the step and keeps the residue."""
        bucket = self._bucket
        bucket.applied()
        if bucket.skipped:
            return
        for number, cluster in enumerate(bucket.clusters(sane=False)):
            # By column, in the order of the live tensors.
            old = [list(column) for column in zip(*(self._old[i] for i in cluster.members), strict=True)]
            names = bucket.names if cluster.kept > 1 else ()
            way = ManyPasses if cluster.one_pass is None else OnePass
            self._residues.append(
                way(cluster, old, layout(names, cluster.applied.step), self._pool, (self._key, number))
            )
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

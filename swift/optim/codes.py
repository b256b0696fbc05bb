"""What a computation backwards misses, in codes: differences in units of the last place, and escapes.

`OnePass` is for what `kernels.cpp` can compute, `ManyPasses` does the same with torch's operations. Their codes are
not the same: the estimates differ in the last places.
"""

from dataclasses import dataclass, field

import torch

from swift.optim.inverse import Cluster
from swift.optim.units import DTYPES, ROUND, Pool, Unit, cut

BYTE = 127
NIBBLE = 7
_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte of a word
ROOM = 1024
"""Escapes that there is room for at once, at least."""


@dataclass(slots=True)
class Escapes:
    """Elements of a column whose difference does not fit. `where` is None if `values` is the whole column, or
    the one value that all of it has."""

    where: torch.Tensor | None
    values: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.where, self.values) if t is not None)


def _whole(old: torch.Tensor) -> Escapes:
    """A column of which most escapes: old [N]."""
    integers = old.view(DTYPES[old.dtype])
    return Escapes(None, old[:1].clone() if bool((integers == integers[0]).all()) else old.clone())


class OnePass:
    """A cluster's residue by `kernels.cpp`, computed when it is made.

    `old` are the values before the step, by column as in the cluster; `layout` names the columns that share a byte.
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
        self._codes = [pool.take((*key, i), numel, torch.int8, device) for i in range(len(layout))]
        self._some: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole: dict[int, Escapes] = {}
        most, room = numel // 2, max(ROOM, numel // 64)
        while True:
            space = {
                column: (
                    pool.take(("where", column, device), room, torch.int32, device),
                    pool.take(("escaped", column, dtype, device), room, dtype, device),
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
    """One unit's."""

    codes: list[torch.Tensor]
    escapes: list[tuple[int, Escapes]] = field(default_factory=list)  # column, what


class ManyPasses:
    """The same as `OnePass` for tensors of any device and layout, unit by unit."""

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
        room = [pool.take((*key, i), total, torch.int8, device) for i in range(len(layout))]
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
        return unit.copy_column(column, self._pool.take(name, unit.numel, like.dtype, like.device))

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
                    target = self._pool.take(("nibble", code.device), code.numel(), torch.int8, code.device)
                    target[-ROUND:].zero_()
                target[: difference.numel()].copy_(difference)
                escapes = _escapes(target, old, limit)
                if escapes is not None:
                    coded.escapes.append((column, escapes))
                if place:
                    code.bitwise_and_(15).add_(target, alpha=16)
        return coded

    def undo(self) -> None:
        """Puts the live tensors back to their values before the step, bit for bit."""
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
    """Elements whose code stands at a limit. Looked for by the word: nearly all words have none."""
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

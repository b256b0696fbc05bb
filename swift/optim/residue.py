"""Undo bit for bit, by keeping what the computation backwards misses.

When a bucket is applied, its step is computed backwards at once, next to a passing copy of the old values; the
difference, in units of the last place (as integers of the bits), is nearly always small. It is kept in a byte, or
two of them in one byte, and the few that do not fit ("escapes": where the old value was tiny or not finite) are
kept whole with their position. Undo repeats the same computation, which has the same bits, and adds the
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

from dataclasses import dataclass, field

import torch

from swift.optim import torch_names as many
from swift.optim.inverse import Bucket, Cluster
from swift.optim.units import DTYPES, ROUND, Pool, Unit, cut

BYTE = 127
NIBBLE = 7
_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # 0x80 in every byte of a word
SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
YOUNG = 5
"""Up to this step a second moment often grows many times over, and needs the whole byte."""


@dataclass(slots=True)
class Escapes:
    """Elements of a column whose difference does not fit. `where` is None if `values` is the whole column, or
    the one value that all of it has."""

    where: torch.Tensor | None
    values: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.where, self.values) if t is not None)


@dataclass(slots=True)
class Residue:
    """What a unit's computation backwards misses."""

    codes: list[torch.Tensor]
    escapes: list[tuple[int, Escapes]] = field(default_factory=list)  # column, what


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


class Exact:
    """(journal) before the step ``Exact(bucket, …)`` → the optimizer's step → ``after()``; later ``undo()``."""

    exact = True

    def __init__(self, bucket: Bucket, pool: Pool, key: object):
        """`key` names the bucket's buffers in `pool`, which are used again in the next step."""
        self._bucket = bucket
        self._pool = pool
        self._key = key
        self._threads = torch.get_num_threads()
        self._clusters: list[tuple[Cluster, list[Residue]]] = []
        old = [index for index, first in enumerate(bucket.first) if not first]
        new = [index for index, first in enumerate(bucket.first) if first]
        self._old = {**self._copies(old, state=True), **self._copies(new, state=False)}

    @property
    def extra_bytes(self) -> int:
        residues = [residue for _, each in self._clusters for residue in each]
        codes = sum(code.numel() for residue in residues for code in residue.codes)
        return self._bucket.scalar_bytes + codes + sum(e.bytes for r in residues for _, e in r.escapes)

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
        bucket = self._bucket
        bucket.applied()
        if bucket.skipped:
            return
        for number, cluster in enumerate(bucket.clusters(sane=False)):
            old = self._old_units(cluster)
            columns = _layout(bucket, cluster)
            total = sum(_padded(unit.numel) for unit in cluster.units)
            room = [
                self._pool.take((self._key, number, i), total, torch.int8, bucket.parameters[0].device)
                for i in range(len(columns))
            ]
            kernel = bucket.rule.kernel(cluster.applied)
            at, residues = 0, []
            for unit, before in zip(cluster.units, old, strict=True):
                estimate = [self._scratch(unit, column) for column in range(unit.width)]
                kernel(estimate[0], unit.gradient(), estimate[1:])
                end = at + _padded(unit.numel)
                residues.append(self._encode(before, estimate, columns, [r[at:end] for r in room]))
                at = end
            self._clusters.append((cluster, residues))
        self._old = {}

    def _old_units(self, cluster: Cluster) -> list[Unit]:
        """The old values, cut as the live tensors are."""
        columns = [list(column) for column in zip(*(self._old[i] for i in cluster.members), strict=True)]
        return cut(columns[0], columns, cluster.flat)

    def _scratch(self, unit: Unit, column: int) -> torch.Tensor:
        like = self._bucket.parameters[0]
        out = self._pool.take(
            ("estimate", column, like.dtype, like.device), unit.numel, like.dtype, like.device
        )
        return unit.copy_column(column, out)

    def _encode(
        self,
        before: Unit,
        estimate: list[torch.Tensor],
        columns: list[tuple[int, ...]],
        room: list[torch.Tensor],
    ) -> Residue:
        residue = Residue(room)
        integers = DTYPES[estimate[0].dtype]
        for shared, code in zip(columns, room, strict=True):
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
                found = _escapes(target, old, limit)
                if found is not None:
                    residue.escapes.append((column, found))
                if place:
                    code.bitwise_and_(15).add_(target, alpha=16)
        return residue

    @torch.no_grad()
    def undo(self) -> None:
        bucket = self._bucket
        bucket.check_gradients()
        threads = torch.get_num_threads()
        if threads != self._threads:
            torch.set_num_threads(self._threads)  # the bits of a computation depend on how it is cut
        try:
            for cluster, residues in self._clusters:
                self._take_back(cluster, residues)
        finally:
            if threads != self._threads:
                torch.set_num_threads(threads)
        bucket.restore_scalars()

    def _take_back(self, cluster: Cluster, residues: list[Residue]) -> None:
        kernel = self._bucket.rule.kernel(cluster.applied)
        columns = _layout(self._bucket, cluster)
        for unit, residue in zip(cluster.units, residues, strict=True):
            values = [unit.column(column) for column in range(unit.width)]
            kernel(values[0], unit.gradient(), values[1:])
            for shared, code in zip(columns, residue.codes, strict=True):
                code = code[: unit.numel]
                for place, column in enumerate(shared):
                    part = code
                    if len(shared) > 1:
                        part = code >> 4 if place else (code << 4).bitwise_right_shift_(4)
                    values[column].view(DTYPES[values[column].dtype]).add_(part)
            for column, escapes in residue.escapes:
                if escapes.where is None:
                    values[column].copy_(escapes.values)
                else:
                    values[column][escapes.where.long()] = escapes.values
            if not unit.direct:
                for column in range(1 if cluster.applied.first else unit.width):
                    unit.store(column, values[column])


def _layout(bucket: Bucket, cluster: Cluster) -> list[tuple[int, ...]]:
    return layout(() if cluster.applied.first else bucket.names, cluster.applied.step)


def _padded(numel: int) -> int:
    return -(-numel // ROUND) * ROUND


def _escapes(code: torch.Tensor, old: torch.Tensor, limit: int) -> Escapes | None:
    """Elements whose code stands at a limit. Looked for by the word: nearly all words have none."""
    marked = code.abs().add_(128 - limit).view(torch.int64).bitwise_and_(_HIGH_BITS)
    words = marked.nonzero()
    if not words.numel():
        return None
    if 2 * words.numel() * ROUND > code.numel() and 2 * int((code.abs() == limit).sum()) > code.numel():
        integers = old.view(DTYPES[old.dtype])
        return Escapes(None, old[:1].clone() if bool((integers == integers[0]).all()) else old.clone())
    rows = code.view(-1, ROUND)[words.view(-1)].abs() == limit
    inside = rows.nonzero()
    where = words.view(-1)[inside[:, 0]] * ROUND + inside[:, 1]
    return Escapes(where.to(torch.int32), old[where])

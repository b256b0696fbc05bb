"""Bit-exact undo of a bucket: by copies, by the residue of the inverse step, or on a device by both in turn.

``PreImage``     copies of the old values, for any optimizer; expensive
``Exact``        (CPU) When a bucket is applied, its step is inverted at once, next to a temporary copy of the old
                 values. The residue, the difference between the two, is taken in units of the last place (as integers
                 of the bits) and is nearly always small: it is kept in a byte for each element of the parameter and of
                 its state. The few that do not fit ("escapes": where the old value was tiny or not finite) are kept as
                 whole values with their position, 8 bytes each for float32. Undo repeats the same computation, which
                 gives the same bits, and adds the residue.
``CodedCopies``  (device) The old values are copied before the step, and the kernel of `kernels.cpp` codes the residue,
                 in the training stream. The host does not wait for it. So the copies stay until the device has come so
                 far; then codes of a byte for each value take their place, unless too many values do not fit into a
                 byte.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch

from swift_ft import torch_private
from swift_ft.state.inverse_step import Bucket, Cluster
from swift_ft.state.kernels import DTYPES, ROOM, DeviceCodes, Pool
from swift_ft.state.rng import calls_of_generator
from swift_ft.state.transfer import local

# Attributes of torch.optim.Optimizer itself. A step does not change them, or the code below handles them separately.
OPTIMIZERS_OWN = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))) | {"step"}


class Kept:
    """A snapshot of a dictionary: ``Kept(holder)`` … ``restore()``

    Values of tensors are restored into the same tensors, numbers and containers into `holder`; newer entries are
    removed. Keys keep their order, on which a state's names depend. Keys in `but` are not touched. Random generators
    get their states back, and so does an inner optimizer (in SAM, Lookahead). Without `states`, an inner optimizer's
    state is not kept: it is as large as the parameters, and changes only in its step.
    """

    def __init__(
        self,
        holder: dict[Any, Any],
        *,
        but: Collection[Any] = (),
        states: bool = True,
        seen: frozenset[int] = frozenset(),
    ):
        """`seen`: ids of optimizers that are already kept."""
        self._holder = holder
        self._states = states
        self._seen = seen
        self._but = frozenset(but)
        self._order = list(holder)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []
        self._optimizers: list[Kept] = []
        self._value = {
            key: _walk(value, self._remember) for key, value in holder.items() if key not in self._but
        }

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for kept in (self, *self._optimizers) for pair in kept._tensors]

    @torch.no_grad()
    def restore(self) -> dict[Any, Any]:
        for tensor, copied in self._tensors:
            tensor.copy_(copied)
        for set_state, state in self._generators:
            set_state(state)
        for kept in self._optimizers:
            kept.restore()
        left_alone = {key: value for key, value in self._holder.items() if key in self._but}
        again = {key: _walk(value, lambda item: item) for key, value in self._value.items()} | left_alone
        self._holder.clear()
        self._holder.update({key: again[key] for key in self._order if key in again} | left_alone)
        return self._holder

    def _remember(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            self._tensors.append((value, value.detach().clone()))
        elif (calls := calls_of_generator(value)) is not None:
            get_state, set_state = calls
            self._generators.append((set_state, get_state()))
        elif isinstance(value, torch.optim.Optimizer) and id(value) not in self._seen:
            seen = self._seen | {id(value)}
            self._optimizers += [Kept(group, but=("params",)) for group in value.param_groups]
            self._optimizers += [Kept(value.state)] if self._states else []
            self._optimizers += [Kept(vars(value), but=OPTIMIZERS_OWN, states=self._states, seen=seen)]
        return value


def _walk(value: Any, visit: Any) -> Any:
    """Returns a copy in which containers are new, so that they cannot be changed from outside, and every other item is
    replaced by the result of `visit`."""
    if type(value) is tuple:
        return tuple(_walk(item, visit) for item in value)
    if isinstance(value, dict):
        named = copy.copy(value)
        named.update({key: _walk(item, visit) for key, item in value.items()})
        return named
    if isinstance(value, list | deque):
        listed: list[Any] | deque[Any] = copy.copy(value)
        for index, item in enumerate(value):
            listed[index] = _walk(item, visit)
        return listed
    if isinstance(value, set):
        return copy.copy(value)
    return visit(value)


class PreImage:
    """(journal) before the step ``PreImage(...)`` → the optimizer's step → ``undo()``

    `whole` also takes state that an unknown class may keep elsewhere: the groups' values, state that belongs to no
    parameter, and its own plain attributes.
    """

    exact = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], *, whole: bool
    ):
        self._optimizer = optimizer
        self.parameters = parameters
        with torch.no_grad():
            self.values = [local(parameter).clone() for parameter in parameters]
        self._state = {p: Kept(optimizer.state[p]) for p in parameters if p in optimizer.state}
        self._around: list[Kept] = []
        if whole:
            self._around = [Kept(group, but=("params",)) for group in optimizer.param_groups]
            self._around += [Kept(optimizer.state, but=parameters), Kept(vars(optimizer), but=OPTIMIZERS_OWN)]

    @property
    def extra_bytes(self) -> int:
        kept = [copied for kept in self._state.values() for _, copied in kept.pairs]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.values, *kept))

    def by_address(self) -> dict[int, torch.Tensor]:
        """Returns the copies of parameters and of their states' tensors by the address of what was copied."""
        pairs = [pair for kept in self._state.values() for pair in kept.pairs]
        return {
            live.data_ptr(): copied
            for live, copied in [*zip(map(local, self.parameters), self.values, strict=True), *pairs]
        }

    def after(self) -> None:
        """Does no work: the copies were taken before the step."""

    def undo(self) -> None:
        with torch.no_grad():
            if self.values:
                torch_private.copy_all([local(p) for p in self.parameters], self.values)
            for parameter in self.parameters:
                if parameter in self._state:
                    self._optimizer.state[parameter] = self._state[parameter].restore()
                else:
                    self._optimizer.state.pop(parameter, None)
            for kept in self._around:
                kept.restore()


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
            torch_private.copy_all(
                [piece.view_as(t) for piece, t in zip(pieces, column, strict=True)], column
            )
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
        """Restores the bucket's values before the step, bit for bit, whatever the number of threads is now: the kernels
        compute each value by itself."""
        self._bucket.check_gradients()
        for residue in self._residues:
            residue.undo()
        self._bucket.restore_scalars()


class CodedCopies:
    """(a device) Before the step ``CodedCopies(bucket, copies)`` → the optimizer's step → ``after()`` → ``settled()``
    now and then; later ``undo()``"""

    exact = True

    def __init__(self, bucket: Bucket, copies: PreImage):
        self._bucket = bucket
        self._copies: PreImage | None = copies
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

    def decide(self) -> bool:
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

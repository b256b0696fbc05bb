"""Sums gradients of batches that several ranks compute, while they compute them.

The peers of a lost rank share its microbatches. A floating-point sum over microbatches has the lost rank's bits only if
it is added in the same order, one microbatch after the other. Collecting all gradients first would cost each peer a
copy per adopted microbatch. So each of the k peers keeps one k-th of the sum. The rank that computes a microbatch sends
each peer its part of the gradients, and each peer adds the parts in order.

    (trainer's thread)  ``give`` each microbatch's gradients once computed … ``wait``; ``abandon`` in any case
    (group's runner)    sends, receives, adds

A rank holds its part of each sum, its parts of the next two microbatches, and its own gradients that are not sent yet.
This is independent of the number of microbatches if the schedule limits how far a rank is ahead of others.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from swift_ft.comm.backend import Collectives, Pending
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.state.transfer import local
from swift_ft.train.reducer import check_dense

Parameter = torch.nn.Parameter

_ARRIVING = 2
"""Microbatches in transfer at a time: two peers send, and the others keep their computed gradients."""


class Turn(NamedTuple):
    """A microbatch of an origin, at a stage."""

    stage: int
    origin: int
    microbatch: int
    owner: int
    """Place, in the group, of the rank that computes the microbatch."""


class Numbers:
    """Flattened elements of some parameters of one dtype, partitioned over `count` ranks."""

    def __init__(self, parameters: Iterable[Parameter], count: int) -> None:
        self.parameters = list(parameters)
        self.dtype = self.parameters[0].dtype
        *begins, self._end = accumulate((local(p).numel() for p in self.parameters), initial=0)
        self._begins = dict(zip(self.parameters, begins, strict=True))
        self._flags = {p: number - len(self.parameters) for number, p in enumerate(self.parameters)}
        """Parameter -> index, in a part, of the flag that says whether it has a gradient."""
        self._size = -(-self._end // count)

    def of(self, parameter: Parameter, place: int) -> tuple[slice, slice]:
        """Returns the slice of the parameter's elements that this place has, and their slice in its part."""
        begin, (low, high) = self._begins[parameter], self._bounds(place)
        first = max(begin, low)
        last = max(min(begin + local(parameter).numel(), high), first)
        return slice(first - begin, last - begin), slice(first - low, last - low)

    def length(self, place: int) -> int:
        """Returns the length of this place's `part`."""
        low, high = self._bounds(place)
        return high - low + len(self.parameters)

    def part(self, gradients: Mapping[Parameter, torch.Tensor], place: int) -> torch.Tensor:
        """Returns this place's part of the gradients [length]: its elements, then per parameter 1 if it has a gradient.
        Elements without a gradient are -0.0, which changes no bit of a sum (0.0 turns -0.0 into 0.0)."""
        part = torch.empty(self.length(place), dtype=self.dtype)
        for parameter, flag in self._flags.items():
            theirs, here = self.of(parameter, place)
            gradient = gradients.get(parameter)
            part[flag] = gradient is not None
            part[here] = -0.0 if gradient is None else local(gradient).reshape(-1)[theirs]
        return part

    def is_given(self, part: torch.Tensor, parameter: Parameter) -> bool:
        """Returns whether one of the microbatches summed in `part` has a gradient of the parameter."""
        return bool(part[self._flags[parameter]])

    def _bounds(self, place: int) -> tuple[int, int]:
        return min(place * self._size, self._end), min((place + 1) * self._size, self._end)


class PartOfSum:
    """`reducer.Contribution` with a rank's part of the sum over an origin's microbatches."""

    def __init__(self, place: int, sums: Iterable[tuple[Numbers, torch.Tensor]]) -> None:
        """`sums` of `Numbers.part` over all microbatches."""
        self._place = place
        self._sums = {p: (numbers, total) for numbers, total in sums for p in numbers.parameters}

    def has(self, parameter: Parameter) -> bool:
        """Returns whether some microbatch has a gradient of the parameter; False for a frozen one."""
        if parameter not in self._sums:
            return False
        numbers, total = self._sums[parameter]
        return numbers.is_given(total, parameter)

    def numbers(self, parameter: Parameter) -> torch.Tensor:
        """Returns the sum's elements of this place, -0.0 for those of other places. Zeros for a parameter without a
        gradient, as on the origin's own rank."""
        if parameter not in self._sums:
            return torch.zeros(local(parameter).numel(), dtype=parameter.dtype)
        numbers, total = self._sums[parameter]
        mine, here = numbers.of(parameter, self._place)
        row = torch.full((local(parameter).numel(),), -0.0, dtype=parameter.dtype)
        row[mine] = total[here] if self.has(parameter) else 0.0
        return row


class SharedSums:
    """Sums of one call of a schedule, on one rank."""

    def __init__(
        self,
        group: ReconfigurableGroup,
        place: int,
        count: int,
        turns: Sequence[Turn],
        parameters: Mapping[int, Iterable[Parameter]],
    ) -> None:
        """(all ranks of the group) Starts the exchange and returns at once. `group` must have no other traffic
        meanwhile; this rank is at `place` of `count`. `turns`: equal on all ranks, ascending within each origin and
        stage. `parameters` of each stage."""
        self._place, self._count, self._turns = place, count, turns
        self._numbers = {stage: _by_dtype(of_stage, count) for stage, of_stage in parameters.items()}
        self._changed = threading.Condition()
        self._computed: dict[Turn, list[list[torch.Tensor]]] = {}
        """Computed turn -> by dtype, the part of each place."""
        self._abandoned = False
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}
        """(stage, origin) -> this rank's part, by dtype."""
        self._bytes = 0
        self.bytes_max = 0
        """Maximum bytes that this rank held at a time."""
        self._task = group.submit(self._run)

    def give(self, turn: Turn, gradients: Mapping[Parameter, torch.Tensor]) -> None:
        """Adds a microbatch that this rank has computed. Raises UsageError for a sparse gradient."""
        check_dense(gradients.values())
        places = range(self._count)
        parts = [[row.part(gradients, place) for place in places] for row in self._numbers[turn.stage]]
        with self._changed:
            self._computed[turn] = parts
            self._hold(sum(part.nbytes for of_dtype in parts for part in of_dtype))
            self._changed.notify()

    def wait(self) -> None:
        """Waits until all turns are summed. Raises RuntimeError if a peer is lost."""
        self._task.wait()

    def abandon(self) -> None:
        """Ends the runner's wait for further `give` calls, because none will follow."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()

    def part(self, origin: int) -> PartOfSum:
        """Returns this rank's part of the origin's sum over all stages. Valid once `wait` has returned."""
        return PartOfSum(
            self._place,
            (
                pair
                for (stage, of), totals in self._sums.items()
                if of == origin
                for pair in zip(self._numbers[stage], totals, strict=True)
            ),
        )

    # --- runner ---

    def _run(self, collectives: Collectives) -> None:
        arriving: deque[tuple[Turn, list[_Exchange]]] = deque()
        for turn in self._turns:
            if len(arriving) == _ARRIVING:
                self._add(*arriving.popleft())
            arriving.append((turn, self._exchanged(turn, collectives)))
        while arriving:
            self._add(*arriving.popleft())

    def _exchanged(self, turn: Turn, collectives: Collectives) -> "list[_Exchange]":
        mine = self._taken(turn) if turn.owner == self._place else None
        exchanges = []
        for number, row in enumerate(self._numbers[turn.stage]):
            nothing = torch.empty(0, dtype=row.dtype)
            incoming, outgoing = [nothing] * self._count, [nothing] * self._count
            if mine is not None:
                outgoing = mine[number]
                incoming[self._place] = outgoing[self._place]
            else:
                incoming[turn.owner] = torch.empty(row.length(self._place), dtype=row.dtype)
                self._hold(incoming[turn.owner].nbytes)
            pending = collectives.begin_all_to_all(incoming, outgoing)
            exchanges.append(_Exchange(pending, incoming[turn.owner], outgoing))
        return exchanges

    def _taken(self, turn: Turn) -> list[list[torch.Tensor]]:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or turn in self._computed)
            if turn not in self._computed:
                raise RuntimeError("connection: this call of the schedule has ended")
            return self._computed.pop(turn)

    def _add(self, turn: Turn, exchanges: "list[_Exchange]") -> None:
        key = turn.stage, turn.origin
        for pending, _, _ in exchanges:
            pending.wait()
        if key not in self._sums:
            self._sums[key] = [mine for _, mine, _ in exchanges]
            self._hold(sum(mine.nbytes for _, mine, _ in exchanges))
        else:
            for total, (_, mine, _) in zip(self._sums[key], exchanges, strict=True):
                total.add_(mine)
        for _, mine, sent in exchanges:
            self._hold(-(sum(each.nbytes for each in sent) or mine.nbytes))

    def _hold(self, more: int) -> None:
        with self._changed:
            self._bytes += more
            self.bytes_max = max(self.bytes_max, self._bytes)


class _Exchange(NamedTuple):
    pending: Pending
    mine: torch.Tensor
    sent: list[torch.Tensor]


def _by_dtype(parameters: Iterable[Parameter], count: int) -> list[Numbers]:
    of_dtype: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            of_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [Numbers(of_one, count) for of_one in of_dtype.values()]

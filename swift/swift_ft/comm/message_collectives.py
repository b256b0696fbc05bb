"""Collectives built from messages, in the order of the members, for backends whose messages have tags.

They need only messages and a sum of the backend. Sums are taken in the members' order, so their bits do not depend on
the layout. They send as many bytes as a ring.

Legend: n members of the group, `own` this process's place among them.
"""

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch

from swift_ft import torch_private
from swift_ft.comm.backend import COLLECTIVES, Collective, Op, Pending, Wire, first_tag
from swift_ft.comm.worker_thread import Runner, Task
from swift_ft.device import Event, accelerator_in_use

_SMALL_BYTES = 4096  # below, one exchange of everything is faster than two of parts
_POOLED_MAX = (
    1024  # buffers of different sizes that are kept: more than a model has; but sizes may differ in each step
)


class Message(Pending, Protocol):
    """A message in flight on a wire. `wait` may be called by any thread."""

    def finish(self) -> None:
        """(the thread that goes on with the tensor, after `wait`) Queues what is left to do in its current stream."""


class SummingWire(Wire, Protocol):
    """The operations that a backend has to provide."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Message: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Message: ...

    def sum(self, tensor: torch.Tensor) -> bool:
        """Sums in place, in the order that is fastest. Returns False if the backend has no sum for such tensors."""


class _OnDevice:
    end: Event | None = None
    """Where it ends in its runner's stream, once all of it is queued."""

    def is_over(self) -> bool:
        return self.end is not None and self.end.query()


class MessageCircuit:
    """A `Circuit` over messages. All waits for messages take place in `runner`.

    The runner has a stream of its own on an accelerator. A collective's work there is queued behind what its caller has
    queued, and what the caller queues after its wait comes behind the collective's.
    """

    def __init__(self, wire: SummingWire, own: int, n: int, number: int, runner: Runner) -> None:
        self._wire = wire
        self._messages = Messages(wire, own, n, number)
        self._runner = runner
        self._stream: Any = None
        self._ahead: set[_OnDevice] = set()
        """Collectives on a device that the caller's stream may not be behind yet."""

    @property
    def is_settled(self) -> bool:
        """Whether the caller's stream is behind all collectives on a device, or the device is. Who waits for a future
        (DDP) comes behind what it stands for, and tells nobody: so the device is asked."""
        self._forget_ended()
        return not self._ahead

    def _forget_ended(self) -> None:
        self._ahead.difference_update([each for each in tuple(self._ahead) if each.is_over()])

    def submit(self, run: Collective) -> Task:
        messages = self._messages
        device = accelerator_in_use()
        if device is None:
            return self._runner.submit(lambda: messages.carry_out(run))
        queued = device.mark()
        collective = _OnDevice()

        def carry_out() -> None:
            if self._stream is None:
                self._stream = device.new_stream()
                device.adopt(self._stream)
            device.hold(queued)
            try:
                messages.carry_out(run)
            finally:
                collective.end = device.mark()
                if self._runner.stopped:
                    # The caller may have gone on already. What it has dropped, this call keeps until nothing writes
                    # to it: else another tensor would be there.
                    device.wait(collective.end)

        def continued() -> None:
            if collective.end is not None:
                device.hold(collective.end)
            self._ahead.discard(collective)

        self._forget_ended()
        self._ahead.add(collective)
        task = self._runner.submit(carry_out)
        task.continued = continued
        return task

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        return _InRunner(self._runner, self._wire.send(tensors, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        return _InRunner(self._runner, self._wire.recv(tensors, source, tag))


class _InRunner:
    """A message that a runner waits for on behalf of the caller."""

    def __init__(self, runner: Runner, message: Message) -> None:
        self._runner = runner
        self._message = message

    def wait(self) -> None:
        self._runner.submit(self._message.wait).wait()
        self._message.finish()


class Messages:
    """`Collectives` over messages. Called by the group's runner (``carry_out``), in the same order on all members."""

    def __init__(self, wire: SummingWire, own: int, n: int, number: int = 0):
        """`number` separates groups that share the same connections (`swift_ft.comm.backend`)."""
        self._wire = wire
        self._first_tag = first_tag(number)
        self._own, self._n = own, n
        self._sequence = 0
        self._error: Exception | None = None
        self._pool: dict[tuple[torch.dtype, int, torch.device], torch.Tensor] = {}

    def carry_out(self, run: Collective) -> None:
        """Runs some collectives. Raises RuntimeError if one has failed before.

        A collective that fails has not used all its tags. The next one would use the remaining ones, and a peer that
        waits for the failed one would receive wrong data: a wrong sum, or worse if the sizes differ.
        """
        if self._error is not None:
            raise RuntimeError(f"connection: a collective failed here before: {self._error}")
        try:
            run(self)
        except Exception as error:
            self._error = error
            raise

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        if self._n == 1 or not tensor.numel():
            return
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1).clone()
        if flat.numel() * flat.element_size() <= _SMALL_BYTES or flat.numel() < self._n:
            parts = [torch.empty_like(flat) for _ in range(self._n)]
            self.all_gather(parts, flat)
            flat.copy_(_in_order(parts, op))
        else:
            whole = flat.numel() // self._n * self._n
            self._all_reduce_parts(list(flat[:whole].view(self._n, -1).unbind()), op)
            if whole < flat.numel():
                self.all_reduce(flat[whole:], op)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def _all_reduce_parts(self, parts: list[torch.Tensor], op: Op) -> None:
        received = self._buffer_like(parts[0], self._n * parts[0].numel())
        incoming = list(received.view(self._n, -1).unbind())
        self.all_to_all(incoming, parts)
        parts[self._own].copy_(_in_order(incoming, op))
        self.all_gather(parts, parts[self._own])
        self._give(received)

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        if not self._wire.sum(tensor):
            self.all_reduce(tensor, operation(None))

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Op) -> None:
        incoming = [torch.empty_like(parts[self._own]) for _ in range(self._n)]
        self.all_to_all(incoming, parts)
        output.copy_(_in_order(incoming, op).view_as(output))

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        self.all_to_all(outputs, [own] * self._n)

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        self.begin_all_to_all(incoming, outgoing).wait()

    def begin_all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> Pending:
        tag = self._next_tag()
        if incoming[self._own].data_ptr() != outgoing[self._own].data_ptr():
            incoming[self._own].copy_(outgoing[self._own])
        works: list[Message] = []
        for source, target in self._peers():
            if incoming[source].numel():
                works.append(self._wire.recv([incoming[source]], source, tag))
            if outgoing[target].numel():
                works.append(self._wire.send([outgoing[target]], target, tag))
        return _All(works)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tag = self._next_tag()
        whole = tensor.contiguous()
        if self._own == root:
            works = [self._wire.send([whole], peer, tag) for peer in range(self._n) if peer != root]
        else:
            works = [self._wire.recv([whole], root, tag)]
        _All(works).wait()
        if whole is not tensor:
            tensor.copy_(whole)

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        """Returns once all have entered: after round k a rank has heard of 2^k others (dissemination barrier).

        `ballot`: this rank's values; becomes, in place, the elementwise maximum over all ranks.
        """
        distance = 1
        ballot = torch.zeros(1) if ballot is None else ballot
        while distance < self._n:
            tag = self._next_tag()
            token, other = ballot.clone(), torch.empty_like(ballot)
            incoming = self._wire.recv([other], (self._own - distance) % self._n, tag)
            outgoing = self._wire.send([token], (self._own + distance) % self._n, tag)
            _All([incoming, outgoing]).wait()
            torch.maximum(ballot, other, out=ballot)
            distance *= 2

    def _peers(self) -> Iterator[tuple[int, int]]:
        """Yields (source, target): each peer once, in an order in which no rank receives from all at once."""
        for distance in range(1, self._n):
            yield (self._own - distance) % self._n, (self._own + distance) % self._n

    def _next_tag(self) -> int:
        self._sequence += 1
        return self._first_tag + self._sequence % (COLLECTIVES // 2)

    def _buffer_like(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns a buffer, if possible a used one: fresh memory of a bucket's size is slow (the kernel clears it)."""
        kept = self._pool.pop((like.dtype, numel, like.device), None)
        return torch.empty(numel, dtype=like.dtype, device=like.device) if kept is None else kept

    def _give(self, buffer: torch.Tensor) -> None:
        if len(self._pool) >= _POOLED_MAX:
            self._pool.clear()
        self._pool[buffer.dtype, buffer.numel(), buffer.device] = buffer


class _All:
    def __init__(self, works: list[Message]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
            work.finish()


class Alone(Messages):
    """Collectives without communication: every rank's part is this rank's. Results have the right shapes."""

    def __init__(self, own: int, n: int):
        super().__init__(cast("SummingWire", None), own, n)  # nothing here uses it

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        tensor.copy_(_in_order([tensor.clone() for _ in range(self._n)], op))

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        tensor.mul_(self._n)

    def begin_all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> Pending:
        own = outgoing[self._own]
        for room in incoming:
            # How much the others give may follow from their data, as with experts.
            room.copy_(own) if room.shape == own.shape else room.zero_()
        return _All([])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        pass


def _in_order(parts: list[torch.Tensor], op: Op) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = op(total, part)
    return total


def operation(op: Any) -> Op:
    """Returns the function that combines two tensors in a torch reduction. Raises ValueError for an unknown one."""
    name = torch_private.reduction_name(op)
    combine = _OPERATIONS.get(name)
    if combine is None:
        raise ValueError(f"reduction {name} over a group of the session; there are: {', '.join(_OPERATIONS)}")
    return combine


_OPERATIONS: dict[str, Op] = {
    "SUM": lambda a, b: a.add_(b),
    "PRODUCT": lambda a, b: a.mul_(b),
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": lambda a, b: a.bitwise_and_(b),
    "BOR": lambda a, b: a.bitwise_or_(b),
    "BXOR": lambda a, b: a.bitwise_xor_(b),
}

"""NCCL, or a library like it, for tensors of a device; gloo beside it for tensors of the host and for control.

A `Communicator` carries messages from one process to another one, in order, without tags: a message is a kernel in a
stream of the communicator's, and holds that stream until the peer has its half of it. From that follows:

- There is one communicator for each pair of members, direction and *lane*. A lane is the messages of torch's schedules,
  or the collectives of one group: in each the order of a pair's messages is the same on both sides. Two messages that
  both sides begin with their sends do not stand in one stream. All other messages (those that are told apart by tags,
  those of groups of some of the members, those between members that are far apart) go by way of gloo (`staging`).
- Communicators are connected while a generation is built, by a runner that can be left behind, for the device that is
  then the process's current one: so that is to be set before the session begins. Two ranks of one device have none.
- No wait of the host's raises when a peer is lost. The stream stands still until the watcher aborts all communicators
  of the fabric in one call. Then the kernels end and leave garbage, and what was queued behind them computes with it.
  So whoever makes that last waits for the device once and then calls `check_arrived`: a flag that is set *before* the
  abort says whether all has arrived (`swift_ft.device.Readings.settle`). So does whoever records a tensor in the log.
- Memory that a message uses is kept until a stream is ordered behind it, or the abort has returned.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from swift_ft.comm.backend import COLLECTIVES, GROUPS, first_tag
from swift_ft.comm.gloo import GlooBackend, GlooConnections, GlooFabric, Sockets
from swift_ft.comm.message_collectives import Message, MessageCircuit, SummingWire
from swift_ft.comm.worker_thread import Broken
from swift_ft.device import Accelerator, accelerator_of, current_accelerator

_NEAR = 4
"""Places in the ring of a set of members up to which two of them have communicators: each takes time and memory."""


class Queued(Protocol):
    """A message in the stream of its communicator."""

    def wait(self) -> None:
        """Orders the current stream behind the message. The host does not wait."""


class Communicator(Protocol):
    """Messages from one process to another one, in the order of the calls."""

    def send(self, tensor: torch.Tensor) -> Queued:
        """(the first process) Queues a message of a contiguous tensor behind the current stream."""

    def recv(self, tensor: torch.Tensor) -> Queued:
        """(the second process) Queues the receipt of a message behind the current stream."""


class Library(Protocol):
    """What makes communicators. Accelerators' packages offer theirs as entry points of "swift_ft.communicators", under
    the name of their type of device."""

    def identity(self, device: Accelerator) -> str:
        """Returns what tells the device from all others of the job."""

    def connect(self, store: Store, own: int, timeout: timedelta) -> Communicator:
        """(both) Returns once the two are connected. `own`: 0 in the process that sends, 1 in the other one. `store`
        may keep what is set until its next call: one has to follow before the peer is waited for."""

    def abort(self, communicators: Sequence[Communicator]) -> None:
        """(any thread) Ends their kernels, and returns once none writes any more. All that may wait for one another
        have to be there."""


class _Pair(NamedTuple):
    """The communicators with one other member."""

    outgoing: Communicator
    incoming: Communicator


_Lane = Mapping[int, _Pair]
"""By the other member's place among all that are connected."""


class NcclBackend(GlooBackend):
    """A `Backend` whose groups torch knows as gloo's."""

    def __init__(self, service_ports: Callable[[], Iterable[int]], library: Library) -> None:
        super().__init__(service_ports)
        self._library = library

    def open(self) -> "NcclFabric":
        return NcclFabric(Sockets(self._service_ports), self._library)

    def is_lost_peer(self, error: RuntimeError) -> bool:
        return super().is_lost_peer(error) or "nccl" in str(error).lower()


class NcclFabric(GlooFabric):
    def __init__(self, sockets: Sockets, library: Library) -> None:
        super().__init__(sockets)
        self._library = library
        self._aborting = threading.Lock()
        self._communicators: list[Communicator] = []
        self._in_flight: set[_Message] = set()
        self._arriving: Accelerator | None = None
        """The device, from its first message on: what a wait has left under way is not known one by one."""

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> "NcclConnections":
        control = super().connect(PrefixStore("control", store), own, size, timeout)
        device = current_accelerator()
        near: list[int] = []

        def meet() -> None:
            """Finds the members with which this one can have communicators. Two ranks on one device cannot."""
            identity = self._library.identity(device)
            store.set(f"device-{own}", identity)
            for other in (place for place in range(size) if place != own):
                theirs = store.get(f"device-{other}").decode()
                if theirs != identity and _distance(own, other, size) <= _NEAR:
                    near.append(other)

        self.build(meet)
        return NcclConnections(self, control, store, near, timeout)

    def lane(self, store: Store, own: int, others: Sequence[int], timeout: timedelta) -> _Lane:
        """Connects with each of the others, which do the same. All go by one order of the pairs: no two wait for each
        other."""
        made: dict[tuple[int, int], Communicator] = {}
        device = current_accelerator()  # of this thread

        def connect() -> None:
            device.adopt(device.new_stream())
            pairs = [(own, other) for other in others] + [(other, own) for other in others]
            for source, target in sorted(pairs):
                place = PrefixStore(f"{source}-{target}", store)
                made[source, target] = self._kept(self._library.connect(place, int(own == target), timeout))

        if others:
            self.build(connect)
        return {other: _Pair(made[own, other], made[other, own]) for other in others}

    def _kept(self, communicator: Communicator) -> Communicator:
        with self._aborting:
            if self._aborted:
                self._library.abort([communicator])
                raise Broken("connection of an ended generation")
            self._communicators.append(communicator)
        return communicator

    def queue(self, call: Callable[[torch.Tensor], Queued], tensor: torch.Tensor) -> "_Message":
        if self._aborted:
            raise Broken("connection of an ended generation")
        message = _Message(call(tensor), tensor, self._in_flight)
        self._arriving = accelerator_of(tensor.device)
        return message

    def arriving(self) -> Accelerator | None:
        return self._arriving

    def check_arrived(self) -> None:
        if self._aborted:
            raise Broken("connection of an ended generation: what the device has received is not whole")

    def abort(self) -> None:
        super().abort()  # sets the flag first
        with self._aborting:
            communicators, self._communicators = self._communicators, []
            if communicators:
                self._library.abort(communicators)

    def close(self) -> None:
        super().close()
        self._in_flight.clear()


def _distance(one: int, other: int, size: int) -> int:
    return min((one - other) % size, (other - one) % size)


class NcclConnections(GlooConnections):
    def __init__(
        self,
        fabric: NcclFabric,
        control: GlooConnections,
        store: Store,
        near: Sequence[int],
        timeout: timedelta,
    ) -> None:
        super().__init__(fabric, control.group, control.own)
        self._nccl = fabric
        self._store = store
        self._near = near
        self._timeout = timeout
        self._messages = self._lane("messages", near)

    def circuit(self, places: Sequence[int], number: int, label: str) -> MessageCircuit:
        # Groups of some of the ranks are made when a trainer asks for them, and not by all members at once.
        whole = number < GROUPS
        collectives = (
            self._lane(f"collectives-{number}", [p for p in self._near if p in places]) if whole else {}
        )
        staged = self.staged(places, label)
        wire = _Wire(self._nccl, staged, tuple(places), self._messages, collectives, first_tag(number))
        return self.circuit_over(wire, places, number, label)

    def _lane(self, name: str, others: Sequence[int]) -> _Lane:
        return self._nccl.lane(PrefixStore(name, self._store), self.own, others, self._timeout)


class _Wire:
    """A `SummingWire` that sends a device's tensors over the communicators of their lane, if there are any."""

    def __init__(
        self,
        fabric: NcclFabric,
        staged: SummingWire,
        places: tuple[int, ...],
        messages: _Lane,
        collectives: _Lane,
        tags: int,
    ) -> None:
        """`places`: of this wire's members among all that are connected. `tags`: first one of the collectives'."""
        self._fabric = fabric
        self._staged = staged
        self._places = places
        self._lanes = messages, collectives
        self._tags = tags

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Message:
        (tensor,) = tensors
        pair = self._pair(tensor, to, tag)
        if pair is None:
            return self._staged.send(tensors, to, tag)
        return self._fabric.queue(pair.outgoing.send, tensor.detach())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Message:
        (tensor,) = tensors
        pair = self._pair(tensor, source, tag)
        if pair is None:
            return self._staged.recv(tensors, source, tag)
        return self._fabric.queue(pair.incoming.recv, tensor.detach())

    def sum(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self._staged.sum(tensor)

    def _pair(self, tensor: torch.Tensor, place: int, tag: int) -> _Pair | None:
        if tensor.device.type == "cpu" or 0 < tag < COLLECTIVES:
            return None
        messages, collectives = self._lanes
        return (collectives if tag >= self._tags else messages).get(self._places[place])


class _Message:
    """A `Message` that is ordered behind by streams alone."""

    def __init__(self, queued: Queued, tensor: torch.Tensor, in_flight: "set[_Message]") -> None:
        self._queued = queued
        self._tensor = tensor
        self._in_flight = in_flight
        in_flight.add(self)

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        self._queued.wait()
        self._in_flight.discard(self)

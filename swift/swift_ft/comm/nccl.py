"""NCCL, or a library like it, for tensors of a device; gloo beside it for tensors of the host and for control.

A `Communicator` carries messages from one process to another one, in order, without tags: a message is a kernel in a
stream of the communicator's, and holds that stream until the peer has its half of it. From that follows:

- There is one communicator for each pair of members, direction and *lane*. A lane is the messages of torch's schedules
  and the chunks of a replica's state, or the collectives of one group: in each the order of a pair's messages is the
  same on both sides. Two messages that both sides begin with their sends do not stand in one stream. All other messages
  (those that are told apart by tags, those of groups of some of the members, those between members that are far apart)
  go by way of gloo (`staging`).
- Communicators are connected while a generation is built, by a runner that can be left behind, for the device that is
  then in use: so that is to be set up before the session begins. Two ranks of one device have none.
- No wait of the host's raises when a peer is lost. The stream stands still until the watcher aborts all communicators
  of the fabric in one call. Then the kernels end and leave garbage, and what was queued behind them computes with it.
  So whoever makes that last waits for the device once and then calls `check_arrived`: a flag that is set *before* the
  abort says whether all has arrived (`swift_ft.device.Readings.read`). Whoever records a tensor in the log asks for
  that flag once its copy is over.
- Memory that a message uses is kept until a stream is ordered behind it, or the abort has returned.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from swift_ft import events, torch_private
from swift_ft.comm import NCCL_ENVIRONMENT
from swift_ft.comm.backend import COLLECTIVES, GROUPS, NOTE, REPLICA_CHUNK, first_tag
from swift_ft.comm.gloo import GlooBackend, GlooConnections, GlooFabric, Sockets
from swift_ft.comm.message_collectives import Message, MessageCircuit, SummingWire
from swift_ft.comm.worker_thread import Broken
from swift_ft.device import Accelerator, accelerator_in_use, accelerator_of, current_accelerator
from swift_ft.errors import UsageError

_POLL_S = 0.001
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

    def obstacle(self) -> str:
        """Returns why this process can have no communicators, and what to set for them; "": it can."""

    def connect(self, store: Store, own: int, timeout: timedelta) -> Communicator:
        """(both) Connects the two; the first message may have to wait for it. `own`: 0 in the process that sends, 1 in
        the other one. `store` may keep what is set until its next call: one has to follow before the peer is waited
        for. Raises RuntimeError."""

    def abort(self, communicators: Sequence[Communicator]) -> None:
        """(any thread) Ends their kernels, those that send first, and returns once none writes any more. All that may
        wait for one another have to be there. Raises RuntimeError if one does not end."""


_OPERATION_TIMEOUT = timedelta(hours=24)
_SENDS_FIRST_S = 0.05
"""Head start for the aborts of what sends: the garbage that an aborted receive leaves is not to be sent on to a member
that has not aborted yet. They may wait for the device, and so for the receives: then they have had their effect."""
_ABORTED_WITHIN_S = 45.0
"""A call that waits for a connection holds its abort up for TORCH_NCCL_NONBLOCKING_TIMEOUT."""


class TorchNccl:
    """NCCL's communicators, each in a `ProcessGroupNCCL` of torch's that has two ranks and a stream of its own.

    Facts, read in torch 2.11 to 2.13, on which this class relies:

    - A group takes its stream from a pool of 32 for each device and priority, in turn. That of high priority is not the
      one of `Accelerator.new_stream`: a copy must not stand behind a message.
    - A group has no limit for what is under way but its timeout; a message that reaches it makes the next `wait` raise.
    - With ``config.blocking = 0`` connecting goes on in a thread of NCCL's. The first message waits for it.
    - `abort` does NCCL's part in a thread of its own, and waits for it, and that waits for the device. It has no limit:
      it raises once that thread is over. A group call of NCCL's (`_group_start`) is of one thread: it would not hold
      several such aborts together. So each communicator is aborted by a thread here, none waiting for another one's
      end; one that does not end is left behind.
    - The end of a group joins its watchdog, which sleeps for a minute after an error, and ends a communicator that has
      not been aborted, which may wait for a lost peer. So groups are kept as long as the process.
    """

    _groups: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        """Raises ServiceError if torch's class lacks what is called here."""
        called = ("Options", "eager_connect_single_device", "send", "recv", "abort")
        torch_private.require({"torch's ProcessGroupNCCL": (torch.distributed.ProcessGroupNCCL, called)})

    def identity(self, device: Accelerator) -> str:
        """Returns the GPU's own name."""
        properties: Any = torch.get_device_module(device.torch).get_device_properties(device.torch)
        # With this (NCCL 2.30) ranks of one GPU may connect.
        shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return f"{properties.uuid}{f' of {uuid.uuid4()}' if shared else ''}"

    def obstacle(self) -> str:
        """Returns the variables by which torch would handle a lost peer in a way of its own."""
        wrong = [name for name, value in NCCL_ENVIRONMENT.items() if os.environ.get(name) != value]
        if wrong:
            needed = " ".join(f"{name}={NCCL_ENVIRONMENT[name]}" for name in wrong)
            return f"NCCL would not leave a lost peer to the session: set {needed}, as swift-ft run does"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            return "TORCH_DISTRIBUTED_DEBUG=DETAIL ends a process whose NCCL peer is lost: leave it out"
        return ""

    def connect(self, store: Store, own: int, timeout: timedelta) -> Communicator:
        groups: Any = torch.distributed.ProcessGroupNCCL
        options = groups.Options(is_high_priority_stream=True)
        options.config.blocking = 0
        options._timeout = _OPERATION_TIMEOUT
        group = groups(store, own, 2, options)
        self._groups.append(group)
        try:
            group.eager_connect_single_device(current_accelerator().torch)
            store.check(["0"])  # NCCL's id leaves a store that has kept it
        except BaseException:
            _begin_abort(group, [])  # no message is under way that would have to be waited for
            raise
        return _TwoRanks(group, own)

    def abort(self, communicators: Sequence[Communicator]) -> None:
        errors: list[RuntimeError] = []

        def begun(own: int) -> list[threading.Thread]:
            ours = [each for each in communicators if isinstance(each, _TwoRanks) and each.own == own]
            return [_begin_abort(each.group, errors) for each in ours]

        threads = begun(own=0)
        _join(threads, _SENDS_FIRST_S)
        threads += begun(own=1)
        _join(threads, _ABORTED_WITHIN_S)
        if any(thread.is_alive() for thread in threads):
            raise RuntimeError(f"NCCL: an abort has not ended within {_ABORTED_WITHIN_S:g} s")
        if errors:
            raise errors[0]


def _begin_abort(group: Any, errors: list[RuntimeError]) -> threading.Thread:
    """`errors`: to which the thread adds that of the abort."""

    def abort() -> None:
        try:
            group.abort()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=abort, name="swift-nccl-abort", daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread], within_s: float) -> None:
    """Waits for their ends, for `within_s` in all."""
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class _TwoRanks:
    """A `Communicator`. Messages are bytes: NCCL does not know every element type."""

    def __init__(self, group: Any, own: int) -> None:
        self.group = group
        self.own = own

    def send(self, tensor: torch.Tensor) -> Queued:
        work: Queued = self.group.send([tensor.view(-1).view(torch.uint8)], 1, 0)
        return work

    def recv(self, tensor: torch.Tensor) -> Queued:
        work: Queued = self.group.recv([tensor.view(-1).view(torch.uint8)], 0, 0)
        return work


class _Pair(NamedTuple):
    """The communicators with one other member."""

    outgoing: Communicator
    incoming: Communicator


class _Met(NamedTuple):
    """What members tell one another before they connect."""

    device: str
    """Its identity; "": the process has not set one up."""
    fit: bool
    """The process has no obstacle to communicators."""
    first: bool
    """It connects its first generation."""


_Lane = Mapping[int, _Pair]
"""By the other member's place among all that are connected."""


class NcclBackend(GlooBackend):
    """A `Backend` whose groups torch knows as gloo's."""

    def __init__(self, service_ports: Callable[[], Iterable[int]], library: Library) -> None:
        super().__init__(service_ports)
        self._library = library
        self._first = True

    def open(self) -> "NcclFabric":
        first, self._first = self._first, False
        return NcclFabric(Sockets(self._service_ports), self._library, first=first)

    def is_lost_peer(self, error: RuntimeError) -> bool:
        return super().is_lost_peer(error) or "nccl" in str(error).lower()


class NcclFabric(GlooFabric):
    def __init__(self, sockets: Sockets, library: Library, *, first: bool = True) -> None:
        """`first`: no generation was connected in this process before."""
        super().__init__(sockets)
        self._library = library
        self._first = first
        self._aborting = threading.Lock()
        self._communicators: list[Communicator] = []
        self._in_flight: set[_Message] = set()
        self._unended: RuntimeError | None = None
        """Why some kernel may still write: its abort has failed."""
        self._device: Accelerator | None = None
        """The device, from its first message on."""
        self._queued = self._covered = 0
        """Messages; and those that a check has covered."""
        self._circuits: list[MessageCircuit] = []

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> "NcclConnections":
        control = super().connect(PrefixStore("control", store), own, size, timeout)
        device = accelerator_in_use()
        near: list[int] = []

        def meet() -> None:
            """Finds the members with which this one has communicators: both are near and fit, and use devices of their
            own."""
            obstacle = self._library.obstacle()
            own_device = "" if device is None else self._library.identity(device)
            store.set(f"device-{own}", json.dumps(_Met(own_device, not obstacle, self._first)))
            met = {
                place: _Met(*json.loads(store.get(f"device-{place}")))
                for place in range(size)
                if place != own
            }
            possible = [
                place
                for place, other in met.items()
                if own_device
                and other.device not in ("", own_device)
                and _distance(own, place, size) <= _NEAR
            ]
            if not obstacle:
                near.extend(place for place in possible if met[place].fit)
            elif possible:
                if self._first and all(other.first for other in met.values()):
                    raise UsageError(obstacle)
                events.emit("communicators_unused", place=own, reason=obstacle)  # a recovery goes on without

        self.build(meet)
        return NcclConnections(self, control, store, near, timeout)

    def lane(self, store: Store, own: int, others: Sequence[int], timeout: timedelta) -> _Lane:
        """Connects with each of the others, which do the same. All go by one order of the pairs: no two wait for each
        other."""
        made: dict[tuple[int, int], Communicator] = {}
        if not others:
            return {}
        device = current_accelerator()  # of this thread

        def connect() -> None:
            device.adopt(device.new_stream())
            pairs = [(own, other) for other in others] + [(other, own) for other in others]
            for source, target in sorted(pairs):
                place = PrefixStore(f"{source}-{target}", store)
                made[source, target] = self._kept(self._library.connect(place, int(own == target), timeout))
            # A first message, so that no later one waits for a connection.
            for (source, _), communicator in sorted(made.items(), key=lambda each: each[0]):
                call = communicator.send if source == own else communicator.recv
                probe = torch.zeros(1, device=device.torch)
                _Message(call(probe), probe, self._in_flight).finish()
            self._wait(device, timeout)

        self.build(connect)
        return {other: _Pair(made[own, other], made[other, own]) for other in others}

    def _wait(self, device: Accelerator, timeout: timedelta) -> None:
        """(a runner) Waits for its stream. Raises RuntimeError after an abort or the timeout."""
        over, deadline = device.mark(), time.monotonic() + timeout.total_seconds()
        while not over.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL connection: no first message within {timeout.total_seconds():g} s")
            time.sleep(_POLL_S)
        self.check_arrived()

    def _kept(self, communicator: Communicator) -> Communicator:
        with self._aborting:
            if self._aborted:
                self._library.abort([communicator])
                raise Broken("connection of an ended generation")
            self._communicators.append(communicator)
        return communicator

    def add(self, circuit: MessageCircuit) -> None:
        self._circuits.append(circuit)

    def queue(self, call: Callable[[torch.Tensor], Queued], tensor: torch.Tensor) -> "_Message":
        if self._aborted:
            raise Broken("connection of an ended generation")
        self._device = accelerator_of(tensor.device)
        self._queued += 1  # two threads at once may lose one: their circuit is not settled
        return _Message(call(tensor), tensor, self._in_flight)

    def arriving(self) -> Accelerator | None:
        return self._device if self._queued > self._covered or not self._is_ordered() else None

    def _is_ordered(self) -> bool:
        """Returns whether the trainer's stream is behind all messages."""
        return not self._in_flight and all(circuit.is_settled for circuit in self._circuits)

    def begin_check(self) -> Callable[[], None]:
        queued = self._queued

        def check() -> None:
            ordered = self._is_ordered()  # first: garbage is never over before the flag is set
            self.check_arrived()
            if ordered:
                self._covered = queued

        return check

    def check_arrived(self) -> None:
        if self._aborted:
            raise Broken("connection of an ended generation: what the device has received is not whole")

    def abort(self) -> None:
        super().abort()  # sets the flag first
        with self._aborting:
            communicators, self._communicators = self._communicators, []
            if communicators:
                try:
                    self._library.abort(communicators)
                except RuntimeError as error:
                    self._unended = error  # this is the watcher: the trainer's thread hears of it in `close`

    def close(self) -> None:
        """Raises AcceleratorError if an abort has failed: some kernel never ends, or writes to memory of others."""
        super().close()
        if self._unended is not None:
            raise torch.AcceleratorError(f"the device has not ended its messages: {self._unended}")
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
        circuit = self.circuit_over(wire, places, number, label)
        self._nccl.add(circuit)
        return circuit

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
        in_order = tag == 0 or REPLICA_CHUNK <= tag < NOTE or tag >= COLLECTIVES
        if tensor.device.type == "cpu" or not in_order:
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

"""A backend without sockets or processes: members are threads, messages are queues. For unit tests, and to keep the
seam honest: it passes the same conformance suite as the others."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

from swift_ft.comm.message_collectives import MessageCircuit
from swift_ft.comm.worker_thread import Broken, Runner

_LOOK_S = 0.001
_PATIENCE_S = 30.0


def in_parallel(count: int, run: Callable[[int], Any]) -> list[Any]:
    """run(0), run(1) … at once; raises what one of them raises."""
    found: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            found[index] = run(index)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
        assert errors or not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return found


class Network:
    """Messages between the members of one group, by (from, to, tag)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self.sent = 0

    def queue(self, source: int, target: int, tag: int) -> "queue.Queue[torch.Tensor]":
        with self._lock:
            return self._queues.setdefault((source, target, tag), queue.Queue())

    def left(self) -> int:
        """Messages that nobody has taken."""
        return sum(q.qsize() for q in self._queues.values())


class _Message:
    def __init__(
        self, arrival: "queue.Queue[torch.Tensor] | None", room: torch.Tensor, ended: threading.Event
    ):
        self._arrival, self._room, self._ended = arrival, room, ended

    def wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._arrival is not None:
            if self._ended.is_set():
                raise Broken("connection of an ended generation")
            try:
                value = self._arrival.get(timeout=_LOOK_S)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise
                continue
            assert value.shape == self._room.shape
            self._room.copy_(value)
            self._arrival = None

    def finish(self) -> None:
        pass


class LocalWire:
    """What a network is to one member. See `ordered.SummingWire`."""

    def __init__(
        self,
        network: Network,
        own: int,
        places: Sequence[int] | None = None,
        ended: threading.Event | None = None,
    ) -> None:
        self._network, self._own, self._places = network, own, places
        self._ended = ended or threading.Event()

    def _at(self, place: int) -> int:
        return place if self._places is None else self._places[place]

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Message:
        assert tensors[0].is_contiguous()
        if self._ended.is_set():
            raise Broken("connection of an ended generation")
        self._network.queue(self._own, self._at(to), tag).put(tensors[0].clone())
        self._network.sent += tensors[0].numel()
        return _Message(None, tensors[0], self._ended)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Message:
        assert tensors[0].is_contiguous()
        return _Message(self._network.queue(self._at(source), self._own, tag), tensors[0], self._ended)

    def sum(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError("there is no quicker sum than the ordered one")


_NETWORKS: dict[str, Network] = {}
"""Of all groups of this process, by the name that their first member has put into their store."""


class LocalBackend:
    name = "local"

    def open(self) -> "LocalFabric":
        return LocalFabric()

    def placeholder(self) -> Any:
        return FakeProcessGroup._create_internal(0, 1)

    def is_lost_peer(self, error: RuntimeError) -> bool:
        return "connection" in str(error)


class LocalFabric:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._runners: list[Runner] = []

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> "_Connections":
        if own == 0:
            _NETWORKS[name := f"network-{len(_NETWORKS)}-{id(store)}"] = Network()
            store.set("name", name)
        deadline = time.monotonic() + timeout.total_seconds()
        for word in ("known", "connected"):  # as sockets do it: an address, and then a connection
            store.set(f"{word}-{own}", "")
            while not store.check([f"{word}-{place}" for place in range(size)]):
                if self._ended.is_set():
                    raise Broken("connection of an ended generation")
                if time.monotonic() > deadline:
                    raise RuntimeError("connection timed out")
                time.sleep(_LOOK_S)
        return _Connections(self, _NETWORKS[store.get("name").decode()], own)

    def finish_connecting(self) -> None:
        pass

    def arriving(self) -> None:
        return None

    def begin_check(self) -> Callable[[], None]:
        return self.check_arrived

    def check_arrived(self) -> None:
        pass

    def abort(self) -> None:
        with self._lock:
            self._ended.set()
            for runner in self._runners:
                runner.stop()

    def close(self) -> None:
        self.abort()
        for runner in self._runners:
            runner.join(1.0)

    def circuit(
        self, network: Network, own: int, places: Sequence[int], number: int, label: str
    ) -> MessageCircuit:
        with self._lock:
            if self._ended.is_set():
                raise Broken("connection of an ended generation")
            self._runners.append(Runner(label))
            wire = LocalWire(network, own, places, self._ended)
            return MessageCircuit(wire, list(places).index(own), len(places), number, self._runners[-1])


class _Connections:
    def __init__(self, fabric: LocalFabric, network: Network, own: int) -> None:
        self._fabric, self._network, self._own = fabric, network, own

    def circuit(self, places: Sequence[int], number: int, label: str) -> MessageCircuit:
        return self._fabric.circuit(self._network, self._own, places, number, label)

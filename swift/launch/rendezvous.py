"""The rendezvous of a job on one machine, and the look-out for more machines.

On one machine the store is in the launcher and listens on loopback only; torchrun would use its c10d
rendezvous, whose store listens on every interface. It outlives every rank, since it lives in no rank.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from swift.launch.torch_names import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One node, complete at once. Same promises as torch's static rendezvous with one node."""

    def __init__(self, run_id: str, timeout_s: float) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        self._port = listener.getsockname()[1]
        # The store owns the descriptor from here on.
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._run_id = run_id

    def get_backend(self) -> str:
        return "swift-loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class PlacedRendezvous(RendezvousHandler):
    """Every machine was told its number (`--node-rank`), and all have as many ranks: nobody has to be asked.

    torch's own keeps a store on the first machine, without which no other one can start or end. So each of them may be
    lost, and another launcher with its number takes its place. The first one still has a store at MASTER_ADDR, for
    trainers that want one.
    """

    def __init__(self, run_id: str, node_rank: int, nodes: int, address: str, port: int) -> None:
        if not 0 <= node_rank < nodes:
            raise ValueError(f"--node-rank {node_rank}: 0 to {nodes - 1}")
        self._run_id = run_id
        self._node_rank = node_rank
        self._nodes = nodes
        self._master = RendezvousStoreInfo(address, port)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._node_rank == 0 and self._store is None:
            port = self._master.master_port
            self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        return RendezvousInfo(HashStore(), self._node_rank, self._nodes, self._master)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class FreshStoreRendezvous(RendezvousHandler):
    """torch's own rendezvous of many machines, with a store of its own for every round.

    torch (2.13) publishes the address of the ranks' store in the first round only: a machine that joins later
    waits for it until the timeout. And in an old store a new round would find the keys of the one before.

    (first machine of the round) makes the store, tells the others in the round's own part of torch's store
    (the others)                 read the address there

    A machine keeps its place in later rounds, where torch numbers all anew: so its ranks stay who they are, and one
    that comes gets a place that was lost.
    """

    _KEY = "swift/rank_store"
    _PLACE = "swift/place"

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner
        self._server: TCPStore | None = None
        self._place: int | None = None

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        store, first = info.store, info.rank == 0
        if first:
            assert info.bootstrap_store_info is not None
            addr = info.bootstrap_store_info.master_addr
            self._server = TCPStore(addr, 0, is_master=True, wait_for_workers=False)
            store.set(self._KEY, f"{addr} {self._server.port}")
            # What torch on the other machines waits for.
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr)
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(self._server.port))
        else:
            self._server = None
        addr, port = store.get(self._KEY).decode().split()
        store.set(f"{self._PLACE}/{info.rank}", "" if self._place is None else str(self._place))
        before = [store.get(f"{self._PLACE}/{number}").decode() for number in range(info.world_size)]
        self._place = places([int(place) if place else None for place in before])[info.rank]
        return RendezvousInfo(store, self._place, info.world_size, RendezvousStoreInfo(addr, int(port)))

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def places(before: Sequence[int | None]) -> list[int]:
    """Of each machine of a round, by the places that they had before it; None: it is new."""
    kept = [place if place is not None and place < len(before) else None for place in before]
    kept = [None if place in kept[:number] else place for number, place in enumerate(kept)]
    free = iter(sorted(set(range(len(before))) - set(kept)))
    return [next(free) if place is None else place for place in kept]


class NodeWatch:
    """Asks the rendezvous, in a thread of its own, whether another machine waits to join.

    The store may be on another machine, and that one may be gone: asking must not keep the main thread from
    replacing a rank, and no answer is no reason to end.
    """

    def __init__(self, handler: RendezvousHandler, interval_s: float, wake: Callable[[], None]) -> None:
        self._handler = handler
        self._interval_s = interval_s
        self._wake = wake
        self._asking = threading.Lock()
        self._closed = threading.Event()
        self.nodes_waiting = False
        if not isinstance(handler, LoopbackRendezvous | PlacedRendezvous):
            threading.Thread(target=self._run, name="node-watch", daemon=True).start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this machine itself is in a rendezvous. What was seen before does not count after it."""
        with self._asking:
            yield
            self.nodes_waiting = False

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with self._asking:
                try:
                    self.nodes_waiting = self._handler.num_nodes_waiting() > 0
                except RendezvousError as error:
                    if not self._closed.is_set():
                        print(f"swift: the rendezvous is gone, no machine can join: {error}", file=sys.stderr)
                    return
            if self.nodes_waiting:
                self._wake()

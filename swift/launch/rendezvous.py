"""The rendezvous of a job on one machine, and the look-out for more machines.

On one machine the store is in the launcher and listens on loopback only; torchrun would use its c10d
rendezvous, whose store listens on every interface. It outlives every rank, since it lives in no rank.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

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


class FreshStoreRendezvous(RendezvousHandler):
    """torch's own rendezvous of many machines, with a store of its own for every round.

    torch (2.13) publishes the address of the ranks' store in the first round only: a machine that joins later
    waits for it until the timeout. And in an old store a new round would find the keys of the one before.

    (first machine of the round) makes the store, tells the others in the round's own part of torch's store
    (the others)                 read the address there
    """

    _KEY = "swift/rank_store"

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner
        self._server: TCPStore | None = None

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
        return RendezvousInfo(store, info.rank, info.world_size, RendezvousStoreInfo(addr, int(port)))

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
        if not isinstance(handler, LoopbackRendezvous):
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

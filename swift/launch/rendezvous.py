"""The rendezvous of a job on one machine: a store in the launcher, listening on loopback only.

torchrun would use its c10d rendezvous here, whose store listens on every interface. The store lives in the
launcher, so it outlives every rank.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from swift.launch.torch_names import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

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

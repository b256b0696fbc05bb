"""Which machine is which, and the store for trainers that want one: of one machine, and of several with numbers.

Those without numbers meet at the coordinator: `swift.launch.meeting`. torch's own rendezvous is not used: it is on one
of the machines, and without that one nobody can join.
"""

import socket
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from swift.launch.torch_names import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


class Rendezvous(RendezvousHandler):
    """What torch's agent asks, as far as it is the same for all; and what `swift.launch.agent` asks besides."""

    def __init__(self, run_id: str, ranks_of: list[int]) -> None:
        self._run_id = run_id
        self.ranks_of = ranks_of
        """How many ranks each machine has, by place; true after `next_rendezvous`."""

    @property
    def lost(self) -> str:
        """Why this machine has no place any more; empty: it has one."""
        return ""

    def leave(self) -> None:
        """(in the end) Somebody else may have the place."""

    @property
    def use_agent_store(self) -> bool:
        return True

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


class LoopbackRendezvous(Rendezvous):
    """One node, complete at once. Same promises as torch's static rendezvous with one node.

    The store is in the launcher and listens on loopback only; torchrun would use its c10d rendezvous, whose store
    listens on every interface. It outlives every rank, since it lives in no rank.
    """

    def __init__(self, run_id: str, ranks: int, timeout_s: float) -> None:
        super().__init__(run_id, [ranks])
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

    def get_backend(self) -> str:
        return "swift-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))


class PlacedRendezvous(Rendezvous):
    """Every machine was told its number (`--node-rank`), and all have as many ranks: nobody has to be asked.

    torch's own keeps a store on the first machine, without which no other one can start or end. So each of them may be
    lost, and another launcher with its number takes its place. The first one still has a store at MASTER_ADDR, for
    trainers that want one.
    """

    def __init__(self, run_id: str, ranks: int, node_rank: int, nodes: int, address: str, port: int) -> None:
        if not 0 <= node_rank < nodes:
            raise ValueError(f"--node-rank {node_rank}: 0 to {nodes - 1}")
        super().__init__(run_id, [ranks] * nodes)
        self._node_rank = node_rank
        self._nodes = nodes
        self._master = RendezvousStoreInfo(address, port)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._node_rank == 0 and self._store is None:
            port = self._master.master_port
            self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        return RendezvousInfo(HashStore(), self._node_rank, self._nodes, self._master)

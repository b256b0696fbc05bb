"""The ranks of `swift-ft bench replica`: two sources and a joiner, which prints its measurements as JSON."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from swift_ft.comm import default_backend
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import ProcessGroups
from swift_ft.comm.rank_store import MasterStores
from swift_ft.lab.bench.replica import COPIES, RAW, RAW_NEW
from swift_ft.state.transfer import Transfer, receive_state, send_state
from swift_ft.state.tree import split

JOINER = 2
_BLOCK_BYTES = 4 << 20


def make_state(size: int, seed: int) -> dict[str, Any]:
    """Creates a transformer's parameters and their AdamW state, at least `size` bytes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]
    parameters: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    made = 0
    while made < size:
        rows, columns = shapes[(len(parameters) // 2) % len(shapes)]
        for shape in ((rows, columns), (rows,)):
            parameters[f"p{len(parameters)}"] = torch.randn(shape, generator=generator)
            moments[len(moments)] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn(shape, generator=generator),
                "exp_avg_sq": torch.rand(shape, generator=generator),
            }
            made += 3 * 4 * torch.Size(shape).numel()
    return {"version": 1, "stages": {"0": parameters}, "optimizers": [{"state": moments}]}


class RawSocket:
    """One TCP connection from rank 0 to the joiner, with `size` bytes of memory at both ends whose pages are mapped."""

    def __init__(self, rank: int, store: Store, size: int) -> None:
        self._rank, self._size = rank, size
        self._memory = torch.ones(size, dtype=torch.uint8)
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("port", str(server.getsockname()[1]))
                self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(store.get("port"))))

    def move(self, new: bool) -> None:
        """Moves all bytes once from rank 0 to the joiner, into new or into existing memory."""
        if self._rank == 0:
            self._socket.sendall(self._memory.numpy().data)
            self._socket.recv(1)
            return
        memory = torch.empty(self._size, dtype=torch.uint8) if new else self._memory
        view, at = memory.numpy().data, 0
        while at < self._size:
            at += self._socket.recv_into(view[at:], min(self._size - at, _BLOCK_BYTES))
        self._socket.sendall(b"x")


def measure(rank: int, store: Store, size: int, rounds: int) -> dict[str, Any]:
    """Measures all cases in turn, `rounds` times after a warm-up. Returns {"bytes", "seconds": {case: [s]}}."""
    state = make_state(size, seed=1 if rank == JOINER else 0)
    tensors = split(state)[0]
    parameters = {path: tensor for path, tensor in tensors.items() if path.startswith("state.stages.")}
    size = sum(tensor.nbytes for tensor in tensors.values())
    raw = RawSocket(rank, store, size) if rank in (0, JOINER) else None

    def copy(sources: tuple[int, ...], exists: bool) -> None:
        transfer = Transfer(joiner=JOINER, sources=sources, version=1)
        if rank in sources:
            send_state(transfer, rank, state, lambda: None)
        elif rank == JOINER:
            receive_state(transfer, rank, tensors if exists else parameters, lambda: None)

    cases: dict[str, Callable[[], None]] = {
        RAW: lambda: raw.move(new=False) if raw else None,
        RAW_NEW: lambda: raw.move(new=True) if raw else None,
    }
    for name, (sources, exists, _) in COPIES.items():
        cases[name] = lambda sources=sources, exists=exists: copy(sources, exists)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds + 1):  # the first round connects and touches memory
        # The order rotates, because a case depends on the previous one (caches, freed memory not yet returned).
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            begin = time.monotonic()
            cases[name]()
            if number > 0:
                seconds[name].append(time.monotonic() - begin)
    dist.barrier()
    return {"bytes": size, "seconds": seconds}


def main(arguments: list[str]) -> None:
    port, mebibytes, rounds, rank = map(int, arguments)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = PrefixStore("bench", TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)))
    backend = default_backend()
    group = ReconfigurableGroup("world", range(JOINER + 1), rank, backend, step=None, gate=None)
    communicator = ProcessGroups(backend, rank, [group], group, stores=MasterStores())
    communicator.build(1)
    result = measure(rank, store, mebibytes << 20, rounds)
    if rank == JOINER:
        print(json.dumps(result), flush=True)
    communicator.tear_down()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

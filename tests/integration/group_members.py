"""Members of groups that communicate on command, for the backends' conformance suite.

The controller listens on a Unix socket. One line of JSON is a command, with its name in "do"; one line is the answer.
An operation that may wait for others is started (``start``) and polled later (``outcome``), so that an abort can come
between.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from swift_ft.comm import default_backend
from swift_ft.comm.backend import Backend, Circuit, Collectives, Connections, Fabric
from swift_ft.comm.message_collectives import operation

CONNECT_TIMEOUT = timedelta(seconds=60)
SMALL, LARGE = 10, 1 << 20
"""Elements of a small message, and of a message that exceeds a socket's buffer."""


def values(seed: int, numel: int) -> torch.Tensor:
    """Returns numbers of many magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


START_S = 120.0


class Told:
    """A connection to a member."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lines = line.makefile("rw")

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return json.loads(self._lines.readline())

    def tell(self, do: str, **arguments: Any) -> None:
        self._lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        self._line.close()


class Listener:
    """Accepts the members' connections. A context manager."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="swift-members-")
        self.path = str(Path(self._place.name, "line"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(START_S)
        self._listening.bind(self.path)
        self._listening.listen()
        self._told: list[Told] = []

    def start(self, begin: Callable[[str], Any]) -> Told:
        """Returns the member that ``begin(path)`` starts. Raises TimeoutError if it does not connect."""
        begin(self.path)
        line, _ = self._listening.accept()
        self._told.append(Told(line))
        return self._told[-1]

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for told in self._told:
            told.close()
        self._listening.close()
        self._place.cleanup()


class Group:
    """A group that this member has joined, or is about to join."""

    def __init__(self, fabric: Fabric, meeting: tuple[str, int], name: str, device: torch.device) -> None:
        self.fabric = fabric
        self.device = device
        # One connection for each group: a wait in it that is given up keeps the connection busy.
        self.store = PrefixStore(name, TCPStore(*meeting, is_master=False, timeout=CONNECT_TIMEOUT))
        self.connections: Connections | None = None
        self.circuit: Circuit | None = None
        self.own = self.size = 0
        self.entered = threading.Event()
        """Set when the backend is about to be called: its arguments have been computed."""

    def connect(self, own: int, size: int) -> None:
        self.own, self.size = own, size
        self.entered.set()
        self.connections = self.fabric.connect(self.store, own, size, CONNECT_TIMEOUT)
        self.circuit = self.connections.circuit(range(size), 0, "all")
        self.fabric.finish_connecting()

    def half_connect(self, own: int, size: int) -> None:
        """Appears in the store for other members but never connects; blocks until the member is killed."""
        self.entered.set()
        self.fabric.connect(_Halfway(self.store), own, size, CONNECT_TIMEOUT)

    def collective(self, run: Callable[[Collectives], None]) -> None:
        assert self.circuit is not None
        self.entered.set()
        self.circuit.submit(run).wait()
        self.arrived()

    def arrived(self) -> None:
        """Waits as a step does before its update, where a wait orders streams only."""
        device = self.fabric.arriving()
        if device is not None:
            check = self.fabric.begin_check()
            device.wait(device.mark())
            check()
            assert self.fabric.arriving() is None, "a check covers what the stream is behind"

    def values(self, seed: int, numel: int) -> torch.Tensor:
        return values(seed, numel).to(self.device)

    def room(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, device=self.device)

    def tag(self, tag: int) -> int:
        """A device's messages without a tag go over its own wire."""
        return tag if self.device.type == "cpu" else 0

    # --- operations: each returns a digest of its result ---

    def send(self, to: int, tag: int, seed: int, numel: int) -> str:
        assert self.circuit is not None
        tensor = self.values(seed, numel)
        self.entered.set()
        self.circuit.send([tensor], to, self.tag(tag)).wait()
        self.arrived()
        return ""

    def recv(self, source: int, tag: int, numel: int) -> str:
        assert self.circuit is not None
        room = self.room(numel)
        self.entered.set()
        self.circuit.recv([room], source, self.tag(tag)).wait()
        self.arrived()
        return digest(room)

    def all_reduce(self, seed: int, numel: int) -> str:
        tensor, add = self.values(seed, numel), operation(None)
        self.collective(lambda collectives: collectives.all_reduce(tensor, add))
        return digest(tensor)

    def all_gather(self, seed: int, numel: int) -> str:
        parts, own = [self.room(numel) for _ in range(self.size)], self.values(seed, numel)
        self.collective(lambda collectives: collectives.all_gather(parts, own))
        return digest(*parts)

    def reduce_scatter(self, seed: int, numel: int) -> str:
        output, add = self.room(numel), operation(None)
        parts = [self.values(seed, numel) * (place + 1) for place in range(self.size)]
        self.collective(lambda collectives: collectives.reduce_scatter(output, parts, add))
        return digest(output)

    def all_to_all(self, seed: int, numel: int) -> str:
        incoming = [self.room(numel) for _ in range(self.size)]
        outgoing = [self.values(seed, numel) * (place + 1) for place in range(self.size)]
        self.collective(lambda collectives: collectives.all_to_all(incoming, outgoing))
        return digest(*incoming)

    def broadcast(self, seed: int, numel: int, root: int) -> str:
        tensor = self.values(seed, numel)
        self.collective(lambda collectives: collectives.broadcast(tensor, root))
        return digest(tensor)

    def barrier(self) -> str:
        self.collective(lambda collectives: collectives.barrier())
        return ""


class _Halfway(Store):
    """A store that publishes this member's keys and blocks for a day before it reads others' keys."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        time.sleep(timedelta(days=1).total_seconds())
        raise AssertionError(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.get(keys[0])

    def check(self, keys: list[str]) -> bool:
        return bool(self.get(keys[0]))


class Member:
    """Executes the commands of one listener. `die` ends the member without a message to its peers."""

    def __init__(
        self, backend: Backend, meeting: tuple[str, int], die: Callable[[], None], device: str = "cpu"
    ) -> None:
        """`device`: where its tensors are."""
        self._backend = backend
        self._device = torch.device(device)
        self._meeting = meeting
        self._die = die
        self._groups: dict[str, Group] = {}
        self._thread = threading.Thread()
        self._outcome: dict[str, Any] = {}

    def serve(self, listener: str) -> None:
        """Carries out commands until the listener disconnects, or the command "die" comes."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(listener)
            with line.makefile("rw") as lines:
                for order in lines:
                    command = json.loads(order)
                    if command["do"] == "die":
                        self._die()
                        return
                    answer = getattr(self, command.pop("do"))(**command)
                    lines.write(json.dumps(answer) + "\n")
                    lines.flush()

    def open(self, group: str) -> None:
        self._groups[group] = Group(self._backend.open(), self._meeting, group, self._device)

    def start(self, group: str, operation: str, **arguments: Any) -> None:
        """Begins an operation of `Group`, in a thread that stands for the trainer's. Returns once it is entered."""
        self._outcome = {}
        self._groups[group].entered.clear()
        run = getattr(self._groups[group], operation)
        self._thread = threading.Thread(target=self._run, args=(run, arguments), daemon=True)
        self._thread.start()
        self._groups[group].entered.wait()

    def _run(self, run: Callable[..., str | None], arguments: dict[str, Any]) -> None:
        try:
            self._outcome = {"gave": run(**arguments)}
        except RuntimeError as error:
            lost_peer = self._backend.is_lost_peer(error)
            self._outcome = {"error": str(error).splitlines()[0], "lost_peer": lost_peer}

    def outcome(self, patience_s: float) -> dict[str, Any]:
        """Returns the operation's result or error; "waits" if it is still running."""
        self._thread.join(patience_s)
        return {"waits": True} if self._thread.is_alive() else self._outcome

    def abort(self, group: str) -> None:
        self._groups[group].fabric.abort()

    def close(self, group: str) -> None:
        self._groups.pop(group).fabric.close()

    def runners_left(self) -> int:
        """Counts the backends' threads that are still running, as after a group has ended."""
        return sum(thread.name.startswith("swift-") for thread in threading.enumerate())

    def store_works(self, group: str) -> bool:
        """Returns whether this process's own store connection, which is not the fabric's, still works."""
        store = self._groups[group].store
        store.set("still", "here")
        return bool(store.get("still") == b"here")


def serve(backend: Backend, device: str = "cpu") -> None:
    listener, port = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = ("127.0.0.1", int(port))
    Member(backend, meeting, lambda: os.kill(os.getpid(), signal.SIGKILL), device).serve(listener)


if __name__ == "__main__":
    serve(default_backend())

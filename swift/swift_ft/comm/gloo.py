"""gloo: torch's library for CPUs, with waits that another thread can end.

Facts, measured with torch 2.13, on which this module relies:

- No call of torch unblocks a thread that waits in gloo: not abort, not shutdown, not destroy. Shutting the group's own
  sockets down does, within milliseconds, on this side and on the peers'. So a fabric knows its own sockets: those that
  were opened while it was built, except the ones that lead to swift's own services (`Sockets`).
- A blocked thread may post its next operation on a socket that was opened after a sweep. So sweeps are repeated.
- When a connection breaks, gloo fails the operations that are queued on it, but not the one whose payload is arriving.
  That one waits for ever. Shutting the sockets again does not help, because they are gone (with a wait in gloo, the
  reductions that `tests/integration/test_groups.py` cuts hung within a dozen trials). So the trainer's thread never
  waits in gloo: a `Runner` does. The collectives are built from messages (`message_collectives`) for the same reason:
  gloo's own run in threads that its groups join.
- A group under construction waits for connections that a dying peer never opens. It has no socket that could be shut,
  and it waits for five times its timeout, because gloo retries. So a runner waits for it, and is abandoned on an abort.
- gloo uses the timeout of a group's construction for its messages too. A new-generation notification ends a wait, so
  messages get a long timeout.
- gloo ends the whole process if `accept` fails on its listening socket, or if a message is larger than its receive
  buffer.
- gloo drops an operation with its Work: a dropped operation no longer writes to its tensor.
- Messages of 4 MiB and more reach a raw socket's speed, those of 1 MiB half of it (docs/benchmarks.md).
"""

import functools
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from swift_ft import torch_private
from swift_ft.comm import LOOPBACK
from swift_ft.comm.message_collectives import MessageCircuit, SummingWire
from swift_ft.comm.staging import StagedWire
from swift_ft.comm.worker_thread import Broken, Runner
from swift_ft.device import Accelerator

torch_private.require(
    {
        "torch's ProcessGroupGloo": (
            ProcessGroupGloo,
            ("_Options", "_set_default_timeout", "create_device"),
        )
    }
)

# A process that a rank forks (a DataLoader's workers) lacks the threads that a process group joins when it ends:
# garbage-collecting a group of an ended generation there would hang, or worse.
os.register_at_fork(after_in_child=gc.freeze)

_MESSAGE_TIMEOUT = timedelta(hours=24)
_OPERATION_TIMEOUT = timedelta(minutes=30)  # for gloo's own collectives
_RUNNER_END_S = 0.02  # an idle runner ends in microseconds; a lost one is not waited for
# Words by which gloo and torch report a lost peer. Any other error of a step is the trainer's own.
_WORDS = ("gloo", "connection", "peer", "timed out", "timeout", "socket")


class GlooBackend:
    name = "gloo"

    def __init__(self, service_ports: Callable[[], Iterable[int]] = tuple) -> None:
        """`service_ports`: returns the current ports of swift's own services. Connections to them are never shut."""
        self._service_ports = service_ports
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
            for name, value in LOOPBACK.items():  # closed by default: not on other interfaces
                os.environ.setdefault(name, value)

    def open(self) -> "GlooFabric":
        return GlooFabric(Sockets(self._service_ports))

    def placeholder(self) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_placeholder_device()]
        return ProcessGroupGloo(HashStore(), 0, 1, options)

    def is_lost_peer(self, error: RuntimeError) -> bool:
        words = str(error).lower()
        return any(word in words for word in _WORDS)


@functools.cache
def _placeholder_device() -> Any:
    """Returns the device of all placeholders, which connect to nobody: each device has a thread that wakes a hundred
    times a second, and a listening socket."""
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")


class GlooFabric:
    def __init__(self, sockets: "Sockets") -> None:
        self._sockets = sockets
        self._lock = threading.Lock()
        self._runners: list[Runner] = []
        self._aborted = self._closed = False

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> "GlooConnections":
        """Connects as `Fabric.connect`. A runner builds the group, so that an abort frees the waiting thread."""
        groups: list[Any] = []

        def build() -> None:
            group = ProcessGroupGloo(PrefixStore("gloo", store), own, size, timeout)
            group._set_default_timeout(_OPERATION_TIMEOUT)
            groups.append(group)

        self.build(build)
        return GlooConnections(self, groups[0], own)

    def build(self, build: Callable[[], None]) -> None:
        """Waits until a runner has built what the fabric needs; an abort frees the waiting thread."""
        builder = self.runner("build")
        try:
            builder.submit(build).wait()
        finally:
            self._end(builder)

    def finish_connecting(self) -> None:
        self._sockets.finish_connecting()

    def arriving(self) -> Accelerator | None:
        return None

    def begin_check(self) -> Callable[[], None]:
        return self.check_arrived

    def check_arrived(self) -> None:
        pass  # a wait has raised

    def abort(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._aborted = True
            for runner in self._runners:
                runner.stop()
            # Under the lock: once this is closed, the process's sockets belong to another fabric.
            self._sockets.shut()

    def close(self) -> None:
        # The sockets are shut first: a group that ends with an operation in flight would wait for it.
        self.abort()
        with self._lock:
            self._closed = True
            runners, self._runners = self._runners, []
        for runner in runners:
            runner.join(_RUNNER_END_S)

    def runner(self, label: str) -> Runner:
        """Returns a new runner, which an abort stops. Raises Broken after an abort."""
        with self._lock:
            if self._aborted:
                raise Broken("connection of an ended generation")
            self._runners.append(Runner(f"swift-{label}"))
            return self._runners[-1]

    def _end(self, runner: Runner) -> None:
        runner.stop()
        with self._lock:
            if runner in self._runners:
                self._runners.remove(runner)


class GlooConnections:
    def __init__(self, fabric: GlooFabric, group: Any, own: int) -> None:
        self._fabric = fabric
        self.group = group
        self.own = own

    def circuit(self, places: Sequence[int], number: int, label: str) -> MessageCircuit:
        return self.circuit_over(self.staged(places, label), places, number, label)

    def staged(self, places: Sequence[int], label: str) -> SummingWire:
        return StagedWire(_Wire(self.group, tuple(places)), lambda: self._fabric.runner(f"{label}-stager"))

    def circuit_over(
        self, wire: SummingWire, places: Sequence[int], number: int, label: str
    ) -> MessageCircuit:
        return MessageCircuit(wire, places.index(self.own), len(places), number, self._fabric.runner(label))


class _Wire:
    """A `SummingWire` over gloo's own messages, by places in a group of some of the members."""

    def __init__(self, group: Any, places: tuple[int, ...]) -> None:
        self._group = group
        self._places = places

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "_Message":
        return _Message(self._group.send(tensors, self._places[to], tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "_Message":
        return _Message(self._group.recv(tensors, self._places[source], tag))

    def sum(self, tensor: torch.Tensor) -> bool:
        """Sums over all members by gloo's own collective; not for a wire of only some of them."""
        assert len(self._places) == self._group.size()
        self._group.allreduce([tensor]).wait()
        return True


class _Message:
    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait(_MESSAGE_TIMEOUT)

    def finish(self) -> None:
        pass


class Sockets:
    """The sockets of this process that one fabric has opened."""

    def __init__(self, service_ports: Callable[[], Iterable[int]]) -> None:
        self._service_ports = service_ports
        self._outside = frozenset(_inodes().values())
        self._inside: frozenset[int] | None = (
            None  # None while the fabric is built: any new socket may be its own
        )

    def finish_connecting(self) -> None:
        """Excludes sockets that are opened from now on, by the trainer for example."""
        self._inside = frozenset(_inodes().values()) - self._outside

    def shut(self) -> None:
        """Shuts all sockets that are connected now. Those that are about to connect are left to the next call."""
        ports = set(self._service_ports())
        inside = self._inside
        for descriptor, inode in _inodes().items():
            if inode in self._outside or (inside is not None and inode not in inside):
                continue
            try:
                own = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue  # closed meanwhile
            with own:
                try:
                    if os.fstat(own.fileno()).st_ino != inode:
                        continue  # closed meanwhile, and another one has its number
                    if own.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue  # gloo's listening socket: gloo would end the process
                    if own.getpeername()[1] in ports:
                        continue
                    own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected (yet), or its peer has already closed it


def _inodes() -> dict[int, int]:
    """Returns this process's open sockets: descriptor → inode (a descriptor number is reused, an inode is not)."""
    inodes = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes[int(name)] = int(target[8:-1])
    return inodes

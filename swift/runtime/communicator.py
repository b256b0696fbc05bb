"""torch's process groups, made anew in every generation, that a notice can break open.

No call of torch unblocks a thread that waits in a gloo operation: not abort, not shutdown, not destroy
(measured with 2.13). Shutting the group's own sockets down does, within milliseconds, on this side and on the
peers'. So the communicator knows which sockets are the group's: those that came into being while it was built,
less the ones that lead to swift's own services.
"""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from swift import events
from swift.errors import ServiceError
from swift.names import LASTING_KEYS
from swift.runtime import _torch
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.rank_store import CoordinatorStore

# What a rank forks (a DataLoader's workers) has none of the threads that a process group waits for when it ends:
# collecting one of an ended generation there would hang, or worse.
os.register_at_fork(after_in_child=gc.freeze)
# A blocked thread may post its next operation on a socket that was made after the first sweep.
_SWEEP_INTERVAL_S = 0.02
StoreOf = Callable[[int], Store]
"""The store that the groups of a generation are built with: all ranks see the same one."""


class Interrupted(Exception):
    """A newer generation was made: the step that is under way is dropped."""


class Communicator:
    """The default process group of the generation that this rank is in, and what lies under its lasting groups.

    (main thread) ``build(generation)`` … communicate …
    (watcher thread) ``interrupt(generation)`` when a newer generation is published
    (main thread) gets an error out of its operation, unwinds, and calls ``build`` again
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        service_ports: Callable[[], Iterable[int]] = tuple,
        groups: Sequence[ReconfigurableGroup] = (),
        default: ReconfigurableGroup | None = None,
        build_timeout_s: float = 30.0,
        operation_timeout_s: float = 1800.0,
        store_of: StoreOf | None = None,
    ):
        """`default`: one of `groups` that takes the default group's place for the trainer and for torch.

        `store_of`: without one, the store at MASTER_ADDR and MASTER_PORT, which must outlive all ranks.
        """
        self._rank = rank
        self._world_size = world_size
        self._default = default
        self._backend = backend
        self._service_ports = service_ports
        self._groups = groups
        # All ranks of a generation are known to live when it is built, and gloo's wait for a connection that
        # a dying peer never makes has no socket that could be shut. So building is bounded tightly.
        self._build_timeout = timedelta(seconds=build_timeout_s)
        self._operation_timeout = timedelta(seconds=operation_timeout_s)
        self._store_of = store_of or _launchers_store(self._build_timeout)
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # closed by default: not on other interfaces
        self._generations_store: Store | None = None
        self._lock = threading.Lock()
        self._newest = 0
        self._outside: frozenset[int] = frozenset()  # sockets that were there before the group
        self._inside: frozenset[int] | None = frozenset()  # the group's sockets; None while it is built
        self.generation = 0

    @property
    def store(self) -> Store:
        """What ranks tell each other outside of every group: the shapes of what passes between stages. It outlives
        generations. Raises RuntimeError before the first one."""
        if self._generations_store is None:
            raise RuntimeError("process group: there is no generation yet")
        return PrefixStore(LASTING_KEYS.removesuffix("/"), self._generations_store)

    def build(self, generation: int) -> None:
        """(every rank) The default group of `generation`, under the objects that use the default group.

        Raises Interrupted if a newer generation is published meanwhile.
        """
        self.tear_down()
        with self._lock:
            self._outside = frozenset(_socket_inodes().values())
            self._inside = None
            self.generation = generation
        self._check()
        try:
            # Kept as long as the groups are: torch keeps only the half of it that is in C++.
            self._generations_store = self._store_of(generation)
            store = PrefixStore(f"g{generation}", self._generations_store)
            _torch.forget_half_built_group()
            with _torch.one_excepthook():
                dist.init_process_group(
                    self._backend,
                    store=store,
                    rank=self._rank,
                    world_size=self._world_size,
                    timeout=self._build_timeout,
                )
            whole = _torch.default_group()
            for group in self._groups:
                group.attach(
                    whole if len(group.ranks) == self._world_size else self._build_inner(group, store)
                )
            # Nobody begins before all are connected: who dies in what comes next would leave those who are not waiting
            # in gloo for its connection, where no notice reaches them.
            store.set(f"built-{self._rank}", "")
            store.wait([f"built-{rank}" for rank in range(self._world_size)], self._build_timeout)
            if isinstance(self._generations_store, CoordinatorStore):
                self._generations_store.built()
        except (RuntimeError, ValueError):
            self._check()
            raise
        _torch.set_group_timeout(whole, self._operation_timeout)
        if self._default is not None:
            _torch.make_default(self._default)
        with self._lock:
            self._inside = frozenset(_socket_inodes().values()) - self._outside
        self._check()
        events.emit("group_built", rank=self._rank, generation=generation)

    def stand_alone(self) -> None:
        """(the job has finished without this process) Groups as torch and a trainer expect them, with nobody in them.

        Whoever communicates over them gets a RuntimeError that says so.
        """
        dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
        for group in self._groups:
            group.stand_alone()
        if self._default is not None:
            _torch.make_default(self._default)

    def _build_inner(self, group: ReconfigurableGroup, store: Store) -> Any:
        """Ranks that share a group name it alike: by its kind and its first rank."""
        place = PrefixStore(f"{group.label}-{group.ranks[0]}", store)
        index = group.ranks.index(self._rank)
        inner = _torch.gloo_group(place, index, len(group.ranks), self._build_timeout)
        _torch.set_group_timeout(inner, self._operation_timeout)
        return inner

    @property
    def broken(self) -> Exception | None:
        """The error of a collective that a lasting group has swallowed in this generation."""
        return next((group.broken for group in self._groups if group.broken is not None), None)

    def check_whole(self) -> None:
        """Raises RuntimeError if a collective was broken: nothing that came after it is applied or recorded."""
        broken = self.broken
        if broken is not None:
            raise RuntimeError(f"process group: {broken}")

    def tear_down(self) -> None:
        """Ends the groups. Their sockets are shut first: one with an operation in flight would wait for it."""
        for group in self._groups:
            group.release()
        if dist.is_initialized():
            self._shut_sockets()
        for group in self._groups:
            group.detach()
        if not dist.is_initialized():
            return
        dist.destroy_process_group()

    def interrupt(self, generation: int, acknowledged: Callable[[], bool]) -> None:
        """(watcher thread) Frees every thread that waits in an operation of an older generation.

        Sweeps until `acknowledged()`: a schedule may be posting operations on several groups' sockets.
        """
        with self._lock:
            self._newest = max(self._newest, generation)
            if self.generation < generation and self._inside is not None:
                for group in self._groups:
                    group.release()
            store = self._generations_store if self.generation < generation else None
        if isinstance(store, CoordinatorStore):
            store.interrupt()
        while True:
            with self._lock:
                if self.generation >= generation:
                    return
                self._shut_sockets()
            if acknowledged():
                return
            time.sleep(_SWEEP_INTERVAL_S)

    def _check(self) -> None:
        with self._lock:
            if self._newest > self.generation:
                raise Interrupted(f"generation {self._newest} supersedes {self.generation}")

    def _shut_sockets(self) -> None:
        ports = set(self._service_ports())
        for descriptor, inode in _socket_inodes().items():
            # What the trainer's own code connects to later is not ours to shut.
            if inode in self._outside or (self._inside is not None and inode not in self._inside):
                continue
            try:
                own = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue  # closed meanwhile
            with own:
                try:
                    if own.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue  # gloo ends the process if accept() fails
                    if own.getpeername()[1] in ports:
                        continue
                except OSError:
                    continue  # not connected (yet): the next sweep sees it
                try:
                    own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # its peer was quicker


def _launchers_store(timeout: timedelta) -> StoreOf:
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ServiceError(
            "MASTER_ADDR and MASTER_PORT are not set; start the trainer with `swift-ft run`"
        ) from None
    return lambda _generation: TCPStore(host, port, is_master=False, timeout=timeout)


def _socket_inodes() -> dict[int, int]:
    """Open sockets of this process: descriptor → inode (a descriptor number is used again, an inode is not)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found[int(name)] = int(target[8:-1])
    return found

"""The process groups of one rank, created anew in every generation; a new-generation notification ends their waits.

The group objects that a trainer holds stay (`swift_ft.comm.groups`). They use a fabric of the backend, one for each
generation (`swift_ft.comm`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from swift_ft import events, torch_private
from swift_ft.comm.backend import Backend, Collective, Connections, Fabric, Pending, is_communication
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import Alone
from swift_ft.comm.worker_thread import Task
from swift_ft.text import LASTING_KEYS

# Connections without peers: every collective is answered as if all members had this one's data.
#
# Results have the right shapes and meaningless values. They serve a spare that computes a step to warm up
# (`swift_ft.train.rehearsal`).


class StandIn:
    def __init__(self, own: int) -> None:
        """`own`: this process's place among the members."""
        self._own = own

    def circuit(self, places: Sequence[int], number: int, label: str) -> "_Circuit":
        return _Circuit(places.index(self._own), len(places), label)


class _Circuit:
    """A `Circuit` without peers. A submitted collective is done when the call returns."""

    def __init__(self, own: int, n: int, label: str) -> None:
        self._alone = Alone(own, n)
        self._label = label

    def submit(self, run: Collective) -> Task:
        task = Task(lambda: run(self._alone))
        task.carry_out()
        return task

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        raise RuntimeError(f"process group {self._label}: nobody is there for a message, in a warm-up")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        return self.send(tensors, source, tag)


# A blocked thread may start its next operation after the first abort.
_ABORT_INTERVAL_S = 0.02
# All ranks of a generation are known to be alive when it is built.
_BUILD_TIMEOUT = timedelta(seconds=30)


class Interrupted(Exception):
    """A newer generation was published: the current step is dropped."""


class ProcessGroups:
    """The process groups of the generation that this rank is in.

    (main thread) ``build(generation)`` … communicate …
    (watcher thread) ``interrupt(generation)`` when a newer generation is published
    (main thread) gets an error out of its operation, unwinds, and calls ``build`` again
    """

    def __init__(
        self,
        backend: Backend,
        rank: int,
        groups: Sequence[ReconfigurableGroup],
        default: ReconfigurableGroup,
        *,
        stores: Callable[[int], Any],
    ):
        """`groups`: all groups that are built in a generation. `default`: the one of them that torch and the trainer
        use as the default group. `stores`: creates the store of each generation, the same for all its ranks, with the
        methods `built` and `interrupt` of a `CoordinatorStore`.
        """
        self._backend = backend
        self._rank = rank
        self._groups = groups
        self._default = default
        self._stores = stores
        self._generations_store: Any = None
        self._fabric: Fabric | None = None
        self._lock = threading.Lock()
        self._newest = 0
        self.generation = 0

    @property
    def store(self) -> Store:
        """Returns the store for data that ranks exchange outside of all groups: the shapes of tensors that pass between
        stages. The data outlives generations. Raises RuntimeError before the first one."""
        if self._generations_store is None:
            raise RuntimeError("process group: there is no generation yet")
        return PrefixStore(LASTING_KEYS.removesuffix("/"), self._generations_store)

    def build(
        self,
        generation: int,
        members: Sequence[int] | None = None,
        routes: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """(every member) Builds the groups of `generation` under the objects that torch and the trainer hold.

        `members`: ranks that take part, ascending, including this one; None: all of the default group's. `routes`: for
        pipelines that lack ranks: origin -> the ranks in its pipeline, for each pipeline of this rank, its own first.
        Raises Interrupted if a newer generation is published meanwhile, RuntimeError if a member was lost.
        """
        present = tuple(self._default.ranks if members is None else members)
        self.tear_down()
        fabric = self._backend.open()
        with self._lock:
            self._fabric = fabric
            self.generation = generation
        self._check()
        try:
            # Kept as long as the groups: torch keeps only its C++ half.
            self._generations_store = self._stores(generation)
            store = PrefixStore(f"g{generation}", self._generations_store)
            whole = self._connect(fabric, PrefixStore("whole", store), present)
            for group in self._groups:
                ranks = [rank for rank in group.ranks if rank in present]
                if routes and group.is_pipeline:
                    # In the same order of origins on all ranks, so that no deadlock can occur.
                    made = {
                        origin: self._connect(fabric, PrefixStore(f"route-{origin}", store), routes[origin])
                        for origin in sorted(routes)
                    }
                    group.attach_routes(made, own=next(iter(routes)))
                elif len(ranks) == len(present):
                    group.attach(whole, ranks)
                else:  # ranks that share a group use the same name: its kind and its first rank
                    place = PrefixStore(f"{group.label}-{group.ranks[0]}", store)
                    group.attach(self._connect(fabric, place, ranks), ranks)
            # All wait until all are connected: a rank that died in the following work would block those that still
            # wait for a connection to it.
            store.set(f"built-{self._rank}", "")
            store.wait([f"built-{rank}" for rank in present], _BUILD_TIMEOUT)
            self._generations_store.built()
        except (RuntimeError, ValueError):
            self._check()
            raise
        fabric.finish_connecting()
        self._register()
        self._check()
        events.emit("group_built", rank=self._rank, generation=generation)

    def _connect(self, fabric: Fabric, store: Store, ranks: Sequence[int]) -> Connections:
        return fabric.connect(store, ranks.index(self._rank), len(ranks), _BUILD_TIMEOUT)

    def stand_alone(self) -> None:
        """(the job has finished without this process) Sets up groups as torch and a trainer expect them, without peers.

        Any communication over them raises a RuntimeError that says so.
        """
        self.tear_down()
        for group in self._groups:
            group.stand_alone()
        self._register()

    def stand_in(self, store: Store) -> None:
        """(a warm-up) Sets up groups in which this process answers for all others. `store`: the data that the job's
        ranks have exchanged."""
        self.tear_down()
        self._generations_store = store
        for group in self._groups:
            group.attach(StandIn(group.ranks.index(self._rank)), group.ranks)
        self._register()

    def _register(self) -> None:
        """Registers the groups with torch. Ending the default group makes torch forget them all."""
        for group in self._groups:
            group.register()
        torch_private.make_default(self._default)

    @property
    def broken(self) -> Exception | None:
        """Returns the error of a collective that a group has swallowed in this generation, if any."""
        each = chain.from_iterable(group.with_parts() for group in self._groups)
        return next((group.broken for group in each if group.broken is not None), None)

    def lost_peer(self, error: BaseException) -> bool:
        """Returns whether a lost peer or an interruption may have caused a step's error."""
        return is_communication(error, self._backend.is_lost_peer)

    def check_whole(self) -> None:
        """Raises RuntimeError if a collective has failed: its results and later ones must not be applied or logged."""
        broken = self.broken
        if broken is not None:
            raise RuntimeError(f"process group: {broken}")

    @property
    def fabric(self) -> Fabric | None:
        return self._fabric

    def disconnect(self) -> None:
        """Ends the connections of this generation. To torch the groups are there, with their ranks; what is begun in
        them raises an error."""
        with self._lock:
            fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()
        for group in self._groups:
            group.detach()

    def tear_down(self) -> None:
        self.disconnect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def drop_session(self) -> None:
        """(the session ends) Releases the session: objects that still hold a group must not keep it alive. DDP's
        reducer and FSDP hold groups in C++, invisible to the garbage collector."""
        self.tear_down()
        for group in self._groups:
            group.drop_session()

    def interrupt(self, generation: int, acknowledged: Callable[[], bool]) -> None:
        """(watcher thread) Frees every thread that waits in an operation of an older generation.

        Aborts until `acknowledged()`: a schedule may be starting operations on several groups.
        """
        with self._lock:
            self._newest = max(self._newest, generation)
        while True:
            with self._lock:
                fabric = self._fabric if self.generation < generation else None
            if fabric is None:
                return
            if self._generations_store is not None:
                self._generations_store.interrupt()
            fabric.abort()
            if acknowledged():
                return
            time.sleep(_ABORT_INTERVAL_S)

    def _check(self) -> None:
        with self._lock:
            if self._newest > self.generation:
                raise Interrupted(f"generation {self._newest} supersedes {self.generation}")

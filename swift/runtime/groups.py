"""Process groups that outlive their generation.

Pipelining stages, DistributedDataParallel, FSDP2 and device meshes hold the group that they were made with. A
`ReconfigurableGroup` is that object: torch sees one group with a name and a rank in it, and the communicator puts the
backend's group of the current generation (a `Circuit`) under it after every change of membership.

DDP's reducer does not survive an error in the middle of a backward pass (it waits for a reduction that never ends).
So with `swallow` a failed collective counts as done, and the session looks at `broken`, which keeps the error, before
anything that came out of the collective is used: the step is dropped. FSDP2 does survive it, once it is reset
(`_torch.reset_sharded`), and must see it at once: it would compute with parameters that are half gathered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from swift.errors import UsageError
from swift.runtime import _torch
from swift.runtime.answers import Answers
from swift.runtime.backends.base import Backend, Circuit, Collective, Connections
from swift.runtime.backends.ordered import Alone
from swift.runtime.backends.runner import Task
from swift.runtime.tags import group_number
from swift.runtime.torch_collectives import ONE_PART_EACH, TorchCollectives
from swift.runtime.traffic import Gate, Step
from swift.runtime.works import CollectiveWork, FinishedWork, MessageWork


class _Route(NamedTuple):
    """What a group communicates over."""

    circuit: Circuit | None
    connections: Connections | None
    present: tuple[int, ...]
    parts: "dict[tuple[int, ...], _Route]"
    """The same of the groups of some of its ranks."""


class ReconfigurableGroup(TorchCollectives):
    """A process group of `ranks` (global, ascending), seen from the one at index `rank`.

    (communicator) ``attach(connections, present)``, ``register()`` in each new generation; ``detach()`` at its end
    (torch, trainer) every collective and point-to-point operation, as on any group

    In a generation in which ranks are missing, the others communicate without them; what has a part for every rank is
    refused then (UsageError).

    A pipeline that lacks a rank, but whose batches are computed (`Assignment.pipeline`), has a *route*: others sit in
    the places of those that are missing. To torch they have the numbers of these. A rank that sits in several pipelines
    has a route for each, by its origin, and is in one at a time (`on_route`).
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        backend: Backend,
        *,
        step: Step | None,
        gate: Gate | None,
        swallow: bool = False,
    ):
        """`step`: told what passes; None: only the session itself communicates over it. `gate`: of a group over which
        trainers communicate, and torch beside them."""
        super().__init__(rank, len(ranks))
        self.label = name
        self.ranks = tuple(ranks)
        self.broken: Exception | None = None
        self._step = step
        self.gate = gate
        self.backend = backend
        self._swallow = swallow
        self._quiet = False
        self._own = rank
        self._present = tuple(range(len(ranks)))
        """Indices of the ranks that are in this generation, ascending: their places in the circuit."""
        self._circuit: Circuit | None = None
        self._between = "connection of an ended generation"
        self._some: dict[tuple[int, ...], ReconfigurableGroup] = {}
        self._connections: Connections | None = None
        self._routes: dict[int, _Route] = {}
        self.answers: Answers | None = None
        """(a pipeline) What collectives give where ranks are missing."""
        _torch.give_placeholder(self, name, backend)

    @property
    def is_pipeline(self) -> bool:
        """Of stages, or of some of them."""
        return self.answers is not None

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are in this generation, ascending."""
        return tuple(self.ranks[index] for index in self._present)

    def attach(self, connections: Connections, present: Sequence[int]) -> None:
        """`present`: the ranks of this group that are in the generation, in their order: the members of
        `connections`."""
        places = range(len(present))
        self._routes.clear()
        self._connect(connections, [self.ranks.index(rank) for rank in present], places)
        for chosen, part in self._some.items():
            self._attach_part(part, chosen)

    def attach_routes(self, connections: Mapping[int, Connections], own: int) -> None:
        """As `attach`, in a generation in which pipelines have routes. `connections`: by origin, of all places of each
        that this rank sits in; `own`: the one that it is in as long as nothing else is said."""
        self._routes.clear()
        for origin, each in sorted(connections.items()):
            everybody = range(len(self.ranks))
            self._connect(each, everybody, everybody)
            for chosen, part in self._some.items():
                self._attach_part(part, chosen)
            self._routes[origin] = self._route()
        self._take(self._routes[own])

    @contextmanager
    def on_route(self, origin: int) -> Iterator[None]:
        """It is the pipeline of that origin meanwhile, if this rank sits in it."""
        if origin not in self._routes:
            yield
            return
        before = self._route()
        self._take(self._routes[origin])
        try:
            yield
        finally:
            if self._circuit is not None:  # its generation has not ended
                self._take(before)

    def _route(self) -> "_Route":
        parts = {chosen: part._route() for chosen, part in self._some.items()}
        return _Route(self._circuit, self._connections, self._present, parts)

    def _take(self, route: "_Route") -> None:
        self._circuit, self._connections, self._present = route.circuit, route.connections, route.present
        for chosen, part in self._some.items():
            if chosen not in route.parts:  # it was made after the route was
                self._attach_part(part, chosen)
                route.parts[chosen] = part._route()
            part._take(route.parts[chosen])

    def _connect(self, connections: Connections, present: Sequence[int], places: Sequence[int]) -> None:
        """`present`: indices into `ranks`; `places`: those of the same ranks among the members of `connections`."""
        self._circuit = connections.circuit(places, group_number(self.label), self.label)
        self._connections = connections
        self._present = tuple(present)
        self.broken = None

    def register(self) -> None:
        """Tells torch of the group. Ending the default group makes torch forget it."""
        for group in (self, *self._some.values()):
            _torch.register_group(group, group.label, group.ranks, self.backend)

    def part(self, chosen: Sequence[int]) -> "ReconfigurableGroup":
        """A group of some of these ranks, by their indices; over the same connections. Raises UsageError."""
        indices = tuple(sorted(set(chosen)))
        if not indices or indices[0] < 0 or indices[-1] >= len(self.ranks) or self._own not in indices:
            raise UsageError(
                f"ranks={list(chosen)}: give pipeline ranks from 0 to {len(self.ranks) - 1}, this one "
                f"({self._own}) among them"
            )
        if len(indices) == len(self.ranks):
            return self
        part = self._some.get(indices)
        if part is None:
            label = f"{self.label}[{','.join(map(str, indices))}]"
            ranks = [self.ranks[index] for index in indices]
            own = indices.index(self._own)
            part = ReconfigurableGroup(label, ranks, own, self.backend, step=None, gate=None)
            part.answers = self.answers
            self._some[indices] = part
            if self._circuit is not None:
                self._attach_part(part, indices)
                for route in self._routes.values():
                    if route.circuit is self._circuit:
                        route.parts[indices] = part._route()
                _torch.register_group(part, part.label, part.ranks, self.backend)
        return part

    def _attach_part(self, part: "ReconfigurableGroup", indices: Sequence[int]) -> None:
        assert self._connections is not None
        there = [index for index in indices if index in self._present]
        part._connect(
            self._connections,
            [indices.index(index) for index in there],
            [self._present.index(index) for index in there],
        )

    def stand_alone(self) -> None:
        """Nobody else is there any more."""
        self._between = "the job has finished: no other rank is there to communicate with"

    def detach(self) -> None:
        for part in self._some.values():
            part.detach()
        self._routes.clear()
        self._circuit = self._connections = None

    def let_go(self) -> None:
        """The session has ended, and is not asked about anything any more."""
        self._step = self.gate = self.answers = None
        for part in self._some.values():
            part.let_go()
        self._some.clear()

    def submit(self, run: Collective) -> Task:
        """Starts something over this group, in the order of the calls. Raises RuntimeError between generations."""
        return self._attached().submit(run)

    def _attached(self) -> Circuit:
        circuit = self._circuit
        if circuit is None:
            raise RuntimeError(f"process group {self.label}: {self._between}")
        return circuit

    def run(self, run: Collective) -> None:
        self.submit(run).wait()

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Of all its ranks that are in this generation, in their order."""
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in self._present]
        self.run_into(parts, lambda collectives: collectives.all_gather(parts, own))
        return parts

    def gathering(self, tensor: torch.Tensor) -> tuple[Task, list[torch.Tensor]]:
        """As `gathered`, without waiting: the parts are there once the task is done."""
        own = tensor.detach().contiguous().clone()
        parts = [torch.empty_like(own) for _ in self._present]
        return self.submit(lambda collectives: collectives.all_gather(parts, own)), parts

    def run_into(self, results: Sequence[torch.Tensor], run: Collective) -> None:
        """As `run`, of something that leaves its result there."""
        if self.answers is None:
            self.run(run)
        else:
            self.answers.into(results, lambda: self.run(run))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Collectives of torch's are answered from this rank alone meanwhile (`Alone`).

        A stage that infers its shapes runs its module once, in a replacement too, where no peer takes part.
        """
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # --- what torch calls ---

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.backend.name

    # From torch 2.14 on a group without these asks its backend, and the placeholder has one member.

    def getRank(self) -> int:  # noqa: N802
        return self._own

    def getSize(self) -> int:  # noqa: N802
        return len(self.ranks)

    def shutdown(self) -> None:
        """torch ends all groups together with the default one; this one stays, its inner group has ended."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        circuit = self._messaging("send")
        return MessageWork(circuit.send(tensors, self._place(to), tag), self._breaker())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        circuit = self._messaging("recv")
        return MessageWork(circuit.recv(tensors, self._place(source), tag), self._breaker())

    def _messaging(self, kind: str) -> Circuit:
        if self.gate is not None:
            self.gate.message(kind)
        circuit = self._attached()
        if self._step is not None:
            self._step.messaged()
        return circuit

    def _place(self, index: int) -> int:
        """Of the rank at this index of the group, among those that are in this generation. Raises RuntimeError."""
        if index not in self._present:
            raise RuntimeError(
                f"process group {self.label}: rank {self.ranks[index]} is not in this generation"
            )
        return self._present.index(index)

    def _collective(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        """`name`: of torch's function. `alike`: all ranks get the same result."""
        if self._quiet:
            run(Alone(self._own, len(self.ranks)))
            return FinishedWork(result)
        if self._circuit is not None and len(self._present) < len(self.ranks) and name in ONE_PART_EACH:
            raise UsageError(
                f"process group {self.label}: {name} has a part for ranks that are not there now"
            )
        if self._step is not None:
            self._step.used(self)
        gate = self.gate if len(self.ranks) > 1 else None
        if gate is not None and gate.collective(self, name, result, run, alike=alike):
            return FinishedWork(result)
        broke = self._breaker()
        if self.broken is not None and self._swallow:
            return FinishedWork(result)
        try:
            task = self.submit(run)
        except RuntimeError as error:
            self.broken = error
            if not self._swallow:
                raise
            return FinishedWork(result)
        return CollectiveWork(task, result, broke, swallow=self._swallow)

    def _breaker(self) -> Callable[[Exception], None]:
        """What hears of an error of this generation. DDP may wait for a work of the last one in the next."""
        circuit = self._circuit

        def broke(error: Exception) -> None:
            if self._circuit is circuit:
                self.broken = self.broken or error

        return broke

    def _reduction(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        work = self._collective(name, result, run, alike=alike)
        if not self._quiet and self._step is not None:
            self._step.reducing()
        return work

    def new_group(self, *_: Any, **__: Any) -> Any:
        """torch asks the default group for a new one. Raises RuntimeError: it makes none."""
        if self.gate is not None:
            self.gate.new_group()
        raise RuntimeError(f"process group {self.label} makes no others")

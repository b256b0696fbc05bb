"""Process groups that outlive their generation.

Pipelining stages, DistributedDataParallel, FSDP2 and device meshes keep the group that they were created with. A
`ReconfigurableGroup` is that object: torch sees one group with a name and a rank in it. After every change of
membership the communicator attaches the backend's group of the current generation (a `Circuit`) to it.

DDP's reducer does not survive an error in the middle of a backward pass (it waits for a reduction that never ends).
So with `swallow` a failed collective counts as done. The session checks `broken`, which keeps the error, before any
result of the collective is used, and drops the step. FSDP2 survives an error once it is reset
(`torch_private.reset_sharded`). It must see the error at once: it would compute with half-gathered parameters.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swift_ft import torch_private
from swift_ft.comm.backend import (
    TRAINERS_GROUPS,
    TRAINERS_GROUPS_MAX,
    Backend,
    Circuit,
    Collective,
    Collectives,
    Connections,
    Op,
    Pending,
    group_number,
    message_tag,
)
from swift_ft.comm.message_collectives import Alone, operation
from swift_ft.comm.worker_thread import Broken, Task
from swift_ft.errors import UsageError

if TYPE_CHECKING:
    from swift_ft.train.batch_redistribution import Answers
    from swift_ft.train.collective_policy import Gate
    from swift_ft.train.recording import Tape


# torch's Work objects: messages and collectives that torch can wait for.


class MessageWork(torch_private.Work):
    """A point-to-point operation. `broke` is called with its error."""

    def __init__(self, pending: Pending, broke: Callable[[Exception], None]):
        super().__init__()
        self._pending = pending
        self._broke = broke

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._pending.wait()
        except RuntimeError as error:
            self._broke(error)
            raise
        return True


class CollectiveWork(torch_private.Work):
    """A collective. `broke` is called with its error; with `swallow`, torch does not see the error."""

    def __init__(
        self,
        task: Task,
        result: list[torch.Tensor],
        broke: Callable[[Exception], None],
        *,
        swallow: bool,
    ):
        super().__init__()
        self._task = task
        self._result = result
        self._broke = broke
        self._swallow = swallow

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._task.wait()
        except RuntimeError as error:
            self._broke(error)
            if not self._swallow:
                raise
        return True

    def is_completed(self) -> bool:
        return self._task.done

    def get_future(self) -> Any:
        """Returns a torch Future with the result, or with the collective's error unless that is swallowed."""
        # A future that knows its devices lets whoever takes the result come behind what its runner has queued.
        devices = {tensor.device for tensor in self._result if tensor.device.type != "cpu"}
        future: Any = torch.futures.Future(devices=list(devices))
        caller = threading.get_ident()

        def over() -> None:
            if threading.get_ident() == caller and self._task.continued is not None:
                self._task.continued()  # it was over already
            error = self._task.error
            if error is not None:
                self._broke(error)
            if error is None or self._swallow:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        self._task.then(over)
        return future


def finished(result: list[torch.Tensor]) -> CollectiveWork:
    """Returns a collective that is finished: its result is available, or will not be used."""
    task = Task(lambda: None)
    task.carry_out()
    return CollectiveWork(task, result, lambda _error: None, swallow=False)


ONE_PART_EACH = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    }
)
"""Collectives in which every rank has a part of its own."""


class _Route(NamedTuple):
    circuit: Circuit | None
    connections: Connections | None
    present: tuple[int, ...]
    parts: "dict[str, _Route]"
    """Routes of the groups of some of its ranks, by their labels."""


class ReconfigurableGroup(torch_private.ProcessGroup):  # type: ignore[misc]
    """A process group of `ranks` (global, ascending), seen from the one at index `rank`.

    (communicator) ``attach(connections, present)``, ``register()`` in each new generation; ``detach()`` at its end
    (torch, trainer) every collective and point-to-point operation, as on any group

    In a degraded world the present ranks communicate without the missing ones. A collective in which every rank has a
    part is then refused (UsageError).

    A pipeline that lacks a rank, but whose batches are computed (`Assignment.pipeline`), has a *route*: other ranks
    take the places of the missing ones. torch sees the missing ranks' numbers. A rank that is a member of several
    pipelines has a route for each, by its origin (data-parallel rank), and uses one at a time (`on_route`).
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        backend: Backend,
        *,
        gate: "Gate | None" = None,
        live: bool = False,
        swallow: bool = False,
        number: int | None = None,
    ):
        """`gate` is notified of the traffic, and decides on that of a trainer; None: only the session itself
        communicates over the group. `live`: its ranks replay together, so nothing in a step needs to be recorded.
        `number`: separates its collectives from those of other groups over the same connections; None: by its
        name."""
        super().__init__(rank, len(ranks))
        self.label = name
        self._number = group_number(name) if number is None else number
        self.ranks = tuple(ranks)
        self.broken: Exception | None = None
        self.gate = gate
        self.live = live
        self.backend = backend
        self._swallow = swallow
        self._quiet = False
        self._own = rank
        self._present = tuple(range(len(ranks)))
        """Indices of the ranks in this generation, ascending: their places in the circuit."""
        self._circuit: Circuit | None = None
        self._between = "connection of an ended generation"
        self._some: dict[str, ReconfigurableGroup] = {}
        """Groups of some of its ranks, by their labels."""
        self._numbered: list[set[int]] = []
        """(default group) By number: the ranks whose groups have it. All ranks know of all groups of the trainer's."""
        self._made = 0
        """(default group) Groups that the trainer has made, of whichever ranks."""
        self._connections: Connections | None = None
        self._routes: dict[int, _Route] = {}
        self.tape: Tape | None = None
        """Recorder of a step's collectives, if any."""
        self.answers: Answers | None = None
        """(a pipeline) Results of collectives in a degraded world."""
        torch_private.give_placeholder(self, name, backend)

    def with_parts(self) -> "Iterator[ReconfigurableGroup]":
        """Yields this group, and those of some of its ranks."""
        yield self
        yield from self._some.values()

    @property
    def is_pipeline(self) -> bool:
        """Returns whether its ranks are the stages of a pipeline, or some of them."""
        return self.answers is not None

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(self.ranks[index] for index in self._present)

    def attach(self, connections: Connections, present: Sequence[int]) -> None:
        """Attaches the group to its generation. `present`: the ranks of this group in the generation, in their order:
        the members of `connections`."""
        places = range(len(present))
        self._routes.clear()
        self._connect(connections, [self.ranks.index(rank) for rank in present], places)
        for part in self._some.values():
            self._attach_part(part)

    def attach_routes(self, connections: Mapping[int, Connections], own: int) -> None:
        """Attaches as `attach`, in a generation in which pipelines have routes. `connections`: by origin, for each
        pipeline of this rank, between all its places. `own`: the origin of the default route."""
        self._routes.clear()
        for origin, each in sorted(connections.items()):
            everybody = range(len(self.ranks))
            self._connect(each, everybody, everybody)
            for part in self._some.values():
                self._attach_part(part)
            self._routes[origin] = self._route()
        self._adopt_route(self._routes[own])

    @contextmanager
    def on_route(self, origin: int) -> Iterator[None]:
        """Switches to the route of that origin for the duration, if this rank is a member of its pipeline."""
        if origin not in self._routes:
            yield
            return
        before = self._route()
        self._adopt_route(self._routes[origin])
        try:
            yield
        finally:
            if self._circuit is not None:  # its generation has not ended
                self._adopt_route(before)

    def _route(self) -> "_Route":
        parts = {label: part._route() for label, part in self._some.items()}
        return _Route(self._circuit, self._connections, self._present, parts)

    def _adopt_route(self, route: "_Route") -> None:
        self._circuit, self._connections, self._present = route.circuit, route.connections, route.present
        for label, part in self._some.items():
            if label not in route.parts:  # it was created after the route
                self._attach_part(part)
                route.parts[label] = part._route()
            part._adopt_route(route.parts[label])

    def _connect(self, connections: Connections, present: Sequence[int], places: Sequence[int]) -> None:
        """`present`: indices into `ranks`; `places`: the same ranks' places among the members of `connections`."""
        self._circuit = connections.circuit(places, self._number, self.label)
        self._connections = connections
        self._present = tuple(present)
        self.broken = None

    def register(self) -> None:
        for group in self.with_parts():
            torch_private.register_group(group, group.label, group.ranks, self.backend)
        torch_private.count_groups(self._made)

    def part(self, chosen: Sequence[int]) -> "ReconfigurableGroup":
        """Returns a group of some of these ranks, by their indices, over the same connections. Raises UsageError."""
        indices = tuple(sorted(set(chosen)))
        if not indices or indices[0] < 0 or indices[-1] >= len(self.ranks) or self._own not in indices:
            raise UsageError(
                f"ranks={list(chosen)}: give pipeline ranks from 0 to {len(self.ranks) - 1}, this one "
                f"({self._own}) among them"
            )
        if len(indices) == len(self.ranks):
            return self
        label = f"{self.label}[{','.join(map(str, indices))}]"
        part = self._some.get(label)
        if part is None:
            ranks = [self.ranks[index] for index in indices]
            part = ReconfigurableGroup(label, ranks, indices.index(self._own), self.backend)
            self._add_part(part)
            torch_private.register_group(part, part.label, part.ranks, self.backend)
        return part

    def _add_part(self, part: "ReconfigurableGroup") -> None:
        part.answers, part.tape = self.answers, self.tape
        self._some[part.label] = part
        if self._circuit is not None:
            with suppress(Broken):  # this generation has ended: the next one attaches it
                self._attach_part(part)
            for route in self._routes.values():
                if route.circuit is self._circuit:
                    route.parts[part.label] = part._route()

    def _attach_part(self, part: "ReconfigurableGroup") -> None:
        assert self._connections is not None
        there = [rank for rank in part.ranks if rank in self.present]
        part._connect(
            self._connections,
            [part.ranks.index(rank) for rank in there],
            [self.present.index(rank) for rank in there],
        )

    def stand_alone(self) -> None:
        """Marks the job as finished: every later communication raises an error that says so."""
        for group in self.with_parts():
            group._between = "the job has finished: no other rank is there to communicate with"

    def detach(self) -> None:
        for part in self._some.values():
            part.detach()
        self._routes.clear()
        self._circuit = self._connections = None

    def drop_session(self) -> None:
        """Drops the references to the session, which has ended."""
        self.gate = self.answers = None
        for part in self._some.values():
            part.drop_session()
        self._some.clear()

    def submit(self, run: Collective) -> Task:
        """Starts a collective over this group, in the order of the calls. Raises RuntimeError between generations."""
        return self._attached().submit(run if self.tape is None else self.tape.around(self.label, run))

    def _attached(self) -> Circuit:
        circuit = self._circuit
        if circuit is None:
            raise RuntimeError(f"process group {self.label}: {self._between}")
        return circuit

    def run(self, run: Collective) -> None:
        self.submit(run).wait()

    def run_alone(self, run: Collective) -> None:
        """Runs a collective as if all ranks had this one's data."""
        run(Alone(self._own, len(self.ranks)))

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all its ranks in this generation, in their order."""
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in self._present]
        self.run_into(parts, lambda collectives: collectives.all_gather(parts, own))
        return parts

    def gathered_texts(self, text: str) -> list[str]:
        data = text.encode()
        room = max(1, *map(int, self.gathered(torch.tensor([len(data)]))))
        own = torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.uint8)
        return [bytes(each.numpy()).rstrip().decode() for each in self.gathered(own)]

    def gathering(self, tensor: torch.Tensor) -> tuple[Task, list[torch.Tensor]]:
        """Starts a `gathered` without waiting: the parts are filled once the task is done."""
        own = tensor.detach().contiguous().clone()
        parts = [torch.empty_like(own) for _ in self._present]
        return self.submit(lambda collectives: collectives.all_gather(parts, own)), parts

    def run_into(self, results: Sequence[torch.Tensor], run: Collective) -> None:
        if self.answers is None:
            self.run(run)
        else:
            self.answers.into(results, lambda: self.run(run))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Answers torch's collectives from this rank alone for the duration (`Alone`).

        A stage that infers its shapes runs its module once. It does so in a replacement too, where no peer takes part.
        """
        groups = tuple(self.with_parts())
        before = [group._quiet for group in groups]
        for group in groups:
            group._quiet = True
        try:
            yield
        finally:
            for group, was in zip(groups, before, strict=True):
                group._quiet = was

    # --- what torch calls ---

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.backend.name

    # From torch 2.14 on, a group without these methods asks its backend, and the placeholder has one member.

    def getRank(self) -> int:  # noqa: N802
        return self._own

    def getSize(self) -> int:  # noqa: N802
        return len(self.ranks)

    def shutdown(self) -> None:
        """Does nothing. torch shuts all groups down with the default one; this one stays, its circuit has ended."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        if self._quiet:
            return finished(tensors)
        circuit = self._messaging("send")
        message = circuit.send(tensors, self._place(to), message_tag(self._number, tag))
        if self.gate is not None:
            self.gate.launched()
        return MessageWork(message, self._breaker())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        if self._quiet:
            return finished(tensors)
        circuit = self._messaging("recv")
        message = circuit.recv(tensors, self._place(source), message_tag(self._number, tag))
        return MessageWork(message, self._breaker())

    def _messaging(self, kind: str) -> Circuit:
        if self.gate is not None:
            self.gate.message(self, kind)
        circuit = self._attached()
        if self.gate is not None:
            self.gate.messaged()
        return circuit

    def _place(self, index: int) -> int:
        """Returns the place, in this generation, of the rank at this index of the group. Raises RuntimeError."""
        if index not in self._present:
            raise RuntimeError(
                f"process group {self.label}: rank {self.ranks[index]} is not in this generation"
            )
        return self._present.index(index)

    def _collective(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        """Starts `run` unless the gate has run it. `name`: torch's function. `alike`: all ranks get the same result."""
        if self._quiet:
            self.run_alone(run)
            return finished(result)
        if self._circuit is not None and len(self._present) < len(self.ranks) and name in ONE_PART_EACH:
            raise UsageError(
                f"process group {self.label}: {name} has a part for ranks that are not there now"
            )
        if self.gate is not None:
            self.gate.used(self)
            if len(self.ranks) > 1:
                work = self.gate.collective(self, name, result, run, alike=alike)
                if work is not None:
                    return work
        broke = self._breaker()
        if self.broken is not None and self._swallow:
            return finished(result)
        try:
            task = self.submit(run)
        except RuntimeError as error:
            self.broken = error
            if not self._swallow:
                raise
            return finished(result)
        return CollectiveWork(task, result, broke, swallow=self._swallow)

    def _breaker(self) -> Callable[[Exception], None]:
        """Returns a callback for errors of this generation. It ignores later calls: DDP may wait in the next generation
        for a Work of this one."""
        circuit = self._circuit

        def broke(error: Exception) -> None:
            if self._circuit is circuit:
                self.broken = self.broken or error

        return broke

    def _reduction(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        work = self._collective(name, result, run, alike=alike)
        if not self._quiet and self.gate is not None:
            self.gate.reducing()
        return work

    # The collectives that torch calls: a dozen, some under several names, built from the few of a backend. Tensors are
    # passed on without their autograd history: a result is not a differentiable computation (as in torch's own groups).

    def _operation(self, options: Any) -> tuple[Op, Callable[[torch.Tensor], Any]]:
        """Returns (function that combines two tensors, function that turns the total into the result)."""
        op = options.reduceOp if options is not None else None
        if torch_private.reduction_name(op) != "AVG":
            return operation(op), lambda total: total
        contributions = len(self.ranks if self._quiet else self._present)
        return operation(None), lambda total: total.div_(contributions)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op, finish = self._operation(options)

        def run(collectives: Collectives) -> None:
            for tensor in tensors:
                collectives.all_reduce(tensor.data, op)
                finish(tensor.data)

        return self._reduction("all_reduce", tensors, run)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        op, finish = self._operation(options)

        def run(collectives: Collectives) -> None:
            for tensor in tensors:
                whole = tensor.data.clone()
                collectives.all_reduce(whole, op)
                if self._own == options.rootRank:
                    tensor.data.copy_(finish(whole))

        return self._reduction("reduce", tensors, run, alike=False)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        root = options.rootRank if options is not None else 0

        def run(collectives: Collectives) -> None:
            if root not in self._present:  # no error of the connection: the step would be done again
                raise UsageError(
                    f"process group {self.label}: broadcast from rank {self.ranks[root]}, which is not there now; use "
                    "dist.all_reduce, which goes on without it"
                )
            for tensor in tensors:
                collectives.broadcast(tensor.data, self._place(root))

        return self._collective("broadcast", tensors, run)

    def barrier(self, opts: Any = None) -> Any:
        return self._collective("barrier", [], lambda collectives: collectives.barrier())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        def run(collectives: Collectives) -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                _gather(collectives, parts, own)

        return self._collective("all_gather", [part for parts in outputs for part in parts], run)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        def run(collectives: Collectives) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                collectives.all_gather(self._parts(output.data), own.data.reshape(-1))

        return self._collective("all_gather_into_tensor", outputs, run)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        """Gathers on the root. `outputs` is empty on all other ranks."""

        def run(collectives: Collectives) -> None:
            for index, own in enumerate(inputs):
                parts = outputs[index] if outputs else [torch.empty_like(own) for _ in self.ranks]
                _gather(collectives, parts, own)

        return self._collective("gather", [part for parts in outputs for part in parts], run, alike=False)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> Any:
        """Scatters from the root. `inputs` is empty on all other ranks."""

        def run(collectives: Collectives) -> None:
            for index, output in enumerate(outputs):
                for rank in range(len(self.ranks)):
                    part = (inputs[index][rank] if inputs else torch.empty_like(output)).data.contiguous()
                    collectives.broadcast(part, options.rootRank)
                    if rank == self._own:
                        output.data.copy_(part)

        return self._collective("scatter", outputs, run, alike=False)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        op, finish = self._operation(options)

        def run(collectives: Collectives) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter(output.data, self._parts(whole.data.contiguous()), op)
                finish(output.data)

        return self._reduction("reduce_scatter_tensor", outputs, run, alike=False)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [whole], options)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any = None
    ) -> Any:
        op, finish = self._operation(options)

        def run(collectives: Collectives) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter(output.data, [part.data.contiguous() for part in parts], op)
                finish(output.data)

        return self._reduction("reduce_scatter", outputs, run, alike=False)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None) -> Any:
        def run(collectives: Collectives) -> None:
            incoming = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
            collectives.all_to_all(incoming, [each.data.contiguous() for each in inputs])
            for output, room in zip(outputs, incoming, strict=True):
                output.data.copy_(room)

        return self._collective("all_to_all", outputs, run, alike=False)

    def alltoall_base(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any = None,
    ) -> Any:
        into, out_of = output.data, whole.data

        def run(collectives: Collectives) -> None:
            incoming = list(torch.split(into, output_sizes)) if output_sizes else self._parts(into)
            outgoing = list(torch.split(out_of, input_sizes)) if input_sizes else self._parts(out_of)
            collectives.all_to_all(incoming, outgoing)

        return self._collective("all_to_all_single", [output], run, alike=False)

    all_to_all_single = alltoall_base

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Returns one piece per rank; a contiguous tensor is not copied."""
        return list(whole.view(len(self.ranks), -1).unbind())

    def new_group(self, ranks: Sequence[int], *, group_name: str, **_: Any) -> "ReconfigurableGroup | None":
        """(torch, in `dist.new_group`) Returns a group of these global ranks that outlives its generation; None if this
        rank is not one of them. All ranks make the same groups in the same order. Raises UsageError."""
        if self.gate is None:
            raise RuntimeError(f"process group {self.label} makes no others")
        live = self.gate.new_group(ranks, group_name)
        self._made += 1
        number = self._free_number(set(ranks))
        own = self.ranks[self._own]
        if own not in ranks:
            return None
        group = ReconfigurableGroup(
            group_name,
            ranks,
            list(ranks).index(own),
            self.backend,
            gate=self.gate,
            live=live,
            number=TRAINERS_GROUPS + number,
        )
        self._add_part(group)
        return group

    def _free_number(self, ranks: set[int]) -> int:
        """Returns the lowest number that no group with one of these ranks has. Raises UsageError if there is none."""
        for number, used in enumerate(self._numbered):
            if used.isdisjoint(ranks):
                used |= ranks
                return number
        if len(self._numbered) == TRAINERS_GROUPS_MAX:
            raise UsageError(
                f"dist.new_group: a rank is in more than {TRAINERS_GROUPS_MAX} groups; use them again"
            )
        self._numbered.append(set(ranks))
        return len(self._numbered) - 1


def _gather(collectives: Collectives, parts: list[torch.Tensor], own: torch.Tensor) -> None:
    rooms = [part.data.contiguous() for part in parts]
    collectives.all_gather(rooms, own.data.contiguous())
    for part, room in zip(parts, rooms, strict=True):
        if not part.is_contiguous():
            part.data.copy_(room)

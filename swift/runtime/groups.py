"""Process groups that outlive their generation.

Pipelining stages, DistributedDataParallel, FSDP2 and device meshes hold the group that they were made with. A
`ReconfigurableGroup` is that object: torch sees one group with a name and a rank in it, and the communicator puts the
backend's group of the current generation (a `Circuit`) under it after every change of membership.

DDP's reducer does not survive an error in the middle of a backward pass (it waits for a reduction that never ends).
So with `swallow` a failed collective counts as done, and the session looks at `broken`, which keeps the error, before
anything that came out of the collective is used: the step is dropped. FSDP2 does survive it, once it is reset
(`_torch.reset_sharded`), and must see it at once: it would compute with parameters that are half gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swift.errors import UsageError
from swift.runtime import _torch
from swift.runtime.backends.base import Backend, Circuit, Collective, Collectives, Connections, Op, Pending
from swift.runtime.backends.ordered import Alone, operation
from swift.runtime.backends.runner import Task
from swift.runtime.tags import group_number
from swift.runtime.traffic import Gate, Step

_ONE_PART_EACH = frozenset(
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
"""Collectives that have a part for every rank."""


class ReconfigurableGroup(_torch.ProcessGroup):  # type: ignore[misc]
    """A process group of `ranks` (global, ascending), seen from the one at index `rank`.

    (communicator) ``attach(connections, present)``, ``register()`` in each new generation; ``detach()`` at its end
    (torch, trainer) every collective and point-to-point operation, as on any group

    In a generation in which ranks are missing, the others communicate without them; what has a part for every rank is
    refused then (UsageError).
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
        _torch.give_placeholder(self, name, backend)

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are in this generation, ascending."""
        return tuple(self.ranks[index] for index in self._present)

    def attach(self, connections: Connections, present: Sequence[int]) -> None:
        """`present`: the ranks of this group that are in the generation, in their order: the members of
        `connections`."""
        places = range(len(present))
        self._connect(connections, [self.ranks.index(rank) for rank in present], places)
        for chosen, part in self._some.items():
            self._attach_part(part, chosen)

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
            self._some[indices] = part
            if self._circuit is not None:
                self._attach_part(part, indices)
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
        self._circuit = self._connections = None

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
        self.run(lambda collectives: collectives.all_gather(parts, own))
        return parts

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
        return _MessageWork(circuit.send(tensors, self._place(to), tag), self._breaker())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        circuit = self._messaging("recv")
        return _MessageWork(circuit.recv(tensors, self._place(source), tag), self._breaker())

    def _messaging(self, kind: str) -> Circuit:
        if self.gate is not None:
            self.gate.message(kind)
        circuit = self._attached()
        if self._step is not None:
            self._step.used()
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
            return _CollectiveWork(None, result)
        if self._circuit is not None and len(self._present) < len(self.ranks) and name in _ONE_PART_EACH:
            raise UsageError(
                f"process group {self.label}: {name} has a part for ranks that are not there now"
            )
        if self._step is not None:
            self._step.used()
        gate = self.gate if len(self.ranks) > 1 else None
        if gate is not None and gate.collective(self, name, result, run, alike=alike):
            return _CollectiveWork(None, result)
        broke = self._breaker()
        if self.broken is not None and self._swallow:
            return _CollectiveWork(None, result)
        try:
            task = self.submit(run)
        except RuntimeError as error:
            self.broken = error
            if not self._swallow:
                raise
            return _CollectiveWork(None, result)
        return _CollectiveWork(task, result, broke, swallow=self._swallow)

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

    def _operation(self, options: Any) -> tuple[Op, Callable[[torch.Tensor], Any]]:
        """(what combines two tensors, what makes the result of all that are combined)."""
        op = options.reduceOp if options is not None else None
        if _torch.reduction_name(op) != "AVG":
            return operation(op), lambda total: total
        return operation(None), lambda total: total.div_(len(self.ranks))

    # Memory is handed on without autograd's view of it: a result is no computation (as in torch's own groups).

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
                collectives.all_gather(self._parts(output.data), own.data.contiguous())

        return self._collective("all_gather_into_tensor", outputs, run)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        """`outputs` is empty but on the root."""

        def run(collectives: Collectives) -> None:
            for index, own in enumerate(inputs):
                parts = outputs[index] if outputs else [torch.empty_like(own) for _ in self.ranks]
                _gather(collectives, parts, own)

        return self._collective("gather", [part for parts in outputs for part in parts], run, alike=False)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> Any:
        """`inputs` is empty but on the root."""

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

    def new_group(self, *_: Any, **__: Any) -> Any:
        """torch asks the default group for a new one."""
        if self.gate is not None:
            self.gate.new_group()
        raise RuntimeError(f"process group {self.label} makes no others")

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """One piece for every rank; a contiguous tensor is not copied."""
        return list(whole.view(len(self.ranks), -1).unbind())


def _gather(collectives: Collectives, parts: list[torch.Tensor], own: torch.Tensor) -> None:
    rooms = [part.data.contiguous() for part in parts]
    collectives.all_gather(rooms, own.data.contiguous())
    for part, room in zip(parts, rooms, strict=True):
        if not part.is_contiguous():
            part.data.copy_(room)


class _MessageWork(_torch.Work):
    """A point-to-point operation. `broke` hears of its error."""

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


class _CollectiveWork(_torch.Work):
    """A collective, over at once without a task. `broke` hears of its error; with `swallow` torch does not."""

    def __init__(
        self,
        task: Task | None,
        result: list[torch.Tensor],
        broke: Callable[[Exception], None] = lambda _error: None,
        *,
        swallow: bool = False,
    ):
        super().__init__()
        self._task = task
        self._result = result
        self._broke = broke
        self._swallow = swallow

    def wait(self, timeout: Any = None) -> bool:
        if self._task is not None:
            try:
                self._task.wait()
            except RuntimeError as error:
                self._broke(error)
                if not self._swallow:
                    raise
        return True

    def is_completed(self) -> bool:
        return self._task is None or self._task.done

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()

        def over() -> None:
            error = self._task.error if self._task is not None else None
            if error is not None:
                self._broke(error)
            if error is None or self._swallow:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        if self._task is None:
            over()
        else:
            self._task.then(over)
        return future

"""Process groups that outlive their generation.

Pipelining stages, DistributedDataParallel, FSDP2 and device meshes hold the group that they were made with. A
`ReconfigurableGroup` is that object: torch sees one group with a name and a rank in it, and the communicator puts the
gloo group of the current generation under it after every change of membership. What it communicates goes through
`swift.runtime.transport`, so that a notice frees whoever waits.

DDP's reducer does not survive an error in the middle of a backward pass (it waits for a reduction that never ends).
So with `swallow` a failed collective counts as done, and the session looks at `broken`, which keeps the error, before
anything that came out of the collective is used: the step is dropped. FSDP2 does survive it, once it is reset
(`_torch.reset_sharded`), and must see it at once: it would compute with parameters that are half gathered.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from swift.errors import UsageError
from swift.runtime import _torch
from swift.runtime.transport import GROUPS, MESSAGE_TIMEOUT, Alone, Messages, Op, Runner, Task, operation

_RUNNER_END_S = 0.02  # an idle runner ends in microseconds; a lost one is not waited for


class Gate(Protocol):
    """Decides on what a trainer communicates over a group (`swift.runtime.gate`)."""

    def collective(
        self,
        group: "ReconfigurableGroup",
        name: str,
        results: list[torch.Tensor],
        run: Callable[[Messages], None],
        *,
        alike: bool,
    ) -> bool: ...

    def message(self, name: str) -> None: ...

    def new_group(self) -> None: ...


class ReconfigurableGroup(_torch.ProcessGroup):  # type: ignore[misc]
    """A process group of `ranks` (global, ascending), seen from the one at index `rank`.

    (communicator) ``attach(inner)`` after a new generation's group is built, ``detach()`` before it ends
    (watcher thread) ``release()``: whoever waits in this group is freed
    (torch, trainer) every collective and point-to-point operation, as on any group
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, *, swallow: bool = False):
        super().__init__(rank, len(ranks))
        self.label = name
        self.ranks = tuple(ranks)
        self.broken: Exception | None = None
        self.reducing: Callable[[], None] = lambda: None  # called when a reduction of torch's is under way
        self.used: Callable[[], None] = lambda: None  # called when torch, or a trainer, communicates over it
        self.gate: Gate | None = (
            None  # only of a group over which trainers communicate, and torch beside them
        )
        self._swallow = swallow
        self._quiet = False
        self._own = rank
        self._inner: Any = None
        self._between = "connection of an ended generation"
        self._messages: Messages | None = None
        self._runner: Runner | None = None
        self._some: dict[tuple[int, ...], ReconfigurableGroup] = {}
        _torch.give_placeholder_backend(self, name)

    def attach(self, inner: Any) -> None:
        self._inner = inner
        self.broken = None
        number = group_number(self.label)
        self._messages = Messages(inner, self._own, len(self.ranks), number)
        self._runner = Runner(f"swift-{self.label}")
        _torch.register_group(self, self.label, self.ranks)
        for places, part in self._some.items():
            part.attach(_Among(inner, places))

    def part(self, places: Sequence[int]) -> "ReconfigurableGroup":
        """A group of some of these ranks, by their indices; over the same connections. Raises UsageError."""
        chosen = tuple(sorted(set(places)))
        if not chosen or chosen[0] < 0 or chosen[-1] >= len(self.ranks) or self._own not in chosen:
            raise UsageError(
                f"ranks={list(places)}: give pipeline ranks from 0 to {len(self.ranks) - 1}, this one "
                f"({self._own}) among them"
            )
        if len(chosen) == len(self.ranks):
            return self
        found = self._some.get(chosen)
        if found is None:
            label = f"{self.label}[{','.join(map(str, chosen))}]"
            found = ReconfigurableGroup(
                label, [self.ranks[place] for place in chosen], chosen.index(self._own)
            )
            self._some[chosen] = found
            if self._inner is not None:
                found.attach(_Among(self._inner, chosen))
        return found

    def stand_alone(self) -> None:
        """Torch knows the group, and nobody else is there any more."""
        self._between = "the job has finished: no other rank is there to communicate with"
        _torch.register_group(self, self.label, self.ranks)

    def release(self) -> None:
        for part in self._some.values():
            part.release()
        if self._runner is not None:
            self._runner.stop()

    def detach(self) -> None:
        self.release()
        for part in self._some.values():
            part.detach()
        if self._runner is not None:
            self._runner.join(_RUNNER_END_S)
        self._inner = self._messages = None

    def submit(self, run: Callable[[Messages], None]) -> Task:
        """Starts something over this group, in the order of the calls. Raises RuntimeError between generations."""
        messages, runner = self._messages, self._runner
        if messages is None or runner is None:
            raise RuntimeError(f"process group {self.label}: {self._between}")
        return runner.submit(lambda: messages.carry_out(run))

    def run(self, run: Callable[[Messages], None]) -> None:
        self.submit(run).wait()

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Of all its ranks, in their order."""
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in self.ranks]
        self.run(lambda messages: messages.all_gather(parts, own))
        return parts

    def plain_all_reduce(self, tensor: torch.Tensor) -> Task:
        """The backend's own sum, in its own order."""
        inner = self._inner
        return self.submit(lambda _messages: inner.allreduce([tensor], _torch.sum_options()).wait())

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
        return "gloo"

    def shutdown(self) -> None:
        """torch ends all groups together with the default one; this one stays, its inner group has ended."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        return self._message("send", tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, source, tag)

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if self.gate is not None:
            self.gate.message(kind)
        if self._inner is None or self._runner is None:
            raise RuntimeError(f"process group {self.label}: {self._between}")
        self.used()
        return _MessageWork(self._runner, getattr(self._inner, kind)(tensors, peer, tag), self._breaker())

    def _collective(
        self, name: str, result: list[torch.Tensor], run: Callable[[Messages], None], *, alike: bool = True
    ) -> Any:
        """`name`: of torch's function. `alike`: all ranks get the same result."""
        if self._quiet:
            run(Alone(self._own, len(self.ranks)))
            return _CollectiveWork(None, result)
        self.used()
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
        runner = self._runner

        def broke(error: Exception) -> None:
            if self._runner is runner:
                self.broken = self.broken or error

        return broke

    def _reduction(
        self, name: str, result: list[torch.Tensor], run: Callable[[Messages], None], *, alike: bool = True
    ) -> Any:
        work = self._collective(name, result, run, alike=alike)
        if not self._quiet:
            self.reducing()
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

        def run(messages: Messages) -> None:
            for tensor in tensors:
                messages.all_reduce(tensor.data, op)
                finish(tensor.data)

        return self._reduction("all_reduce", tensors, run)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        op, finish = self._operation(options)

        def run(messages: Messages) -> None:
            for tensor in tensors:
                whole = tensor.data.clone()
                messages.all_reduce(whole, op)
                if self._own == options.rootRank:
                    tensor.data.copy_(finish(whole))

        return self._reduction("reduce", tensors, run, alike=False)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        root = options.rootRank if options is not None else 0

        def run(messages: Messages) -> None:
            for tensor in tensors:
                messages.broadcast(tensor.data, root)

        return self._collective("broadcast", tensors, run)

    def barrier(self, opts: Any = None) -> Any:
        return self._collective("barrier", [], lambda messages: messages.barrier())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        def run(messages: Messages) -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                _gather(messages, parts, own)

        return self._collective("all_gather", [part for parts in outputs for part in parts], run)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        def run(messages: Messages) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                messages.all_gather(self._parts(output.data), own.data.contiguous())

        return self._collective("all_gather_into_tensor", outputs, run)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        """`outputs` is empty but on the root."""

        def run(messages: Messages) -> None:
            for index, own in enumerate(inputs):
                parts = outputs[index] if outputs else [torch.empty_like(own) for _ in self.ranks]
                _gather(messages, parts, own)

        return self._collective("gather", [part for parts in outputs for part in parts], run, alike=False)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any) -> Any:
        """`inputs` is empty but on the root."""

        def run(messages: Messages) -> None:
            for index, output in enumerate(outputs):
                for rank in range(len(self.ranks)):
                    part = (inputs[index][rank] if inputs else torch.empty_like(output)).data.contiguous()
                    messages.broadcast(part, options.rootRank)
                    if rank == self._own:
                        output.data.copy_(part)

        return self._collective("scatter", outputs, run, alike=False)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        op, finish = self._operation(options)

        def run(messages: Messages) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                messages.reduce_scatter(output.data, self._parts(whole.data.contiguous()), op)
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

        def run(messages: Messages) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                messages.reduce_scatter(output.data, [part.data.contiguous() for part in parts], op)
                finish(output.data)

        return self._reduction("reduce_scatter", outputs, run, alike=False)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None) -> Any:
        def run(messages: Messages) -> None:
            incoming = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
            messages.all_to_all(incoming, [each.data.contiguous() for each in inputs])
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

        def run(messages: Messages) -> None:
            incoming = list(torch.split(into, output_sizes)) if output_sizes else self._parts(into)
            outgoing = list(torch.split(out_of, input_sizes)) if input_sizes else self._parts(out_of)
            messages.all_to_all(incoming, outgoing)

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


def _gather(messages: Messages, parts: list[torch.Tensor], own: torch.Tensor) -> None:
    rooms = [part.data.contiguous() for part in parts]
    messages.all_gather(rooms, own.data.contiguous())
    for part, room in zip(parts, rooms, strict=True):
        if not part.is_contiguous():
            part.data.copy_(room)


def group_number(label: str) -> int:
    """Groups that lie over the same connections keep their messages apart by it. Parts have numbers of their own."""
    return zlib.crc32(label.encode()) % GROUPS + (GROUPS if "[" in label else 0)


class _Among:
    """The connections of a group, seen by some of its ranks."""

    def __init__(self, inner: Any, places: Sequence[int]):
        self._inner = inner
        self._places = places

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._inner.send(tensors, self._places[to], tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._inner.recv(tensors, self._places[source], tag)


class _MessageWork(_torch.Work):
    """A point-to-point operation that a runner waits for."""

    def __init__(self, runner: Runner, work: Any, broke: Callable[[Exception], None]):
        super().__init__()
        self._runner = runner
        self._work = work
        self._broke = broke

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._runner.submit(lambda: self._work.wait(MESSAGE_TIMEOUT)).wait()
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


class Mesh:
    """Where a rank stands in the mesh (pipeline, data): rank = pipeline rank * dp_size + dp_rank.

    `dp_rank` counts the workers of a stage. Of `shards` neighbours among them each holds a part of the stage's state
    (FSDP2); those with the same shard are replicas.
    """

    def __init__(self, rank: int, world_size: int, replicas: int = 1, shards: int = 1):
        self.rank, self.world_size = rank, world_size
        self.replicas, self.shards = replicas, shards
        self.dp_size = replicas * shards
        self.pipeline_ranks = world_size // self.dp_size
        self.pipeline_rank, self.dp_rank = divmod(rank, self.dp_size)
        self.replica, self.shard = divmod(self.dp_rank, shards)

    def groups(self) -> dict[str, tuple[int, ...]]:
        """name -> the ranks of each group that this rank is in.

        ``world``: all. ``pipeline``: the stages of its pipeline. ``data``: all workers of its stage. ``replicate`` and
        ``shard`` (only with shards): the two sides of the data group.
        """
        first = self.pipeline_rank * self.dp_size
        found = {
            "world": tuple(range(self.world_size)),
            "pipeline": tuple(range(self.dp_rank, self.world_size, self.dp_size)),
            "data": tuple(range(first, first + self.dp_size)),
        }
        if self.shards > 1:
            found["replicate"] = tuple(first + r * self.shards + self.shard for r in range(self.replicas))
            found["shard"] = tuple(first + self.replica * self.shards + s for s in range(self.shards))
        return found

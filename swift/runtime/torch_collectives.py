"""The collectives that torch calls on a process group, made of those that a backend has (`Collectives`).

torch has a dozen calls, and several spellings of some; a backend has few (`swift.runtime.backends.base`). Memory is
handed on without autograd's view of it: a result is no computation (as in torch's own groups).
"""

from collections.abc import Callable
from typing import Any

import torch

from swift.runtime import _torch
from swift.runtime.backends.base import Collective, Collectives, Op
from swift.runtime.backends.ordered import operation

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
"""Collectives that have a part for every rank."""


class TorchCollectives(_torch.ProcessGroup):  # type: ignore[misc]
    """The half of a group that torch sees; the other one (`ReconfigurableGroup`) carries out what it asks for."""

    ranks: tuple[int, ...]
    _own: int
    """This rank's index in `ranks`."""

    def _collective(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        """Starts `run`; gives torch's Work. `name`: of torch's function. `result`: what it fills in. `alike`: all ranks
        get the same result."""
        raise AssertionError("the group that is this class's other half carries it out")

    def _reduction(
        self, name: str, result: list[torch.Tensor], run: Collective, *, alike: bool = True
    ) -> Any:
        """The same, of gradients or others that are summed up."""
        raise AssertionError("the group that is this class's other half carries it out")

    def _place(self, index: int) -> int:
        """Of the rank at this index of the group, among those that are in this generation. Raises RuntimeError."""
        raise AssertionError("the group that is this class's other half knows of generations")

    def _operation(self, options: Any) -> tuple[Op, Callable[[torch.Tensor], Any]]:
        """(what combines two tensors, what makes the result of all that are combined)."""
        op = options.reduceOp if options is not None else None
        if _torch.reduction_name(op) != "AVG":
            return operation(op), lambda total: total
        return operation(None), lambda total: total.div_(len(self.ranks))

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
                collectives.all_gather(self._parts(output.data), own.data.reshape(-1))

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

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """One piece for every rank; a contiguous tensor is not copied."""
        return list(whole.view(len(self.ranks), -1).unbind())


def _gather(collectives: Collectives, parts: list[torch.Tensor], own: torch.Tensor) -> None:
    rooms = [part.data.contiguous() for part in parts]
    collectives.all_gather(rooms, own.data.contiguous())
    for part, room in zip(parts, rooms, strict=True):
        if not part.is_contiguous():
            part.data.copy_(room)

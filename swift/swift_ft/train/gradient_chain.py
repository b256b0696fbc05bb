"""Tensors along a line of ranks: weights down from the owner, gradients up to it, bucket by bucket.

Each rank passes a bucket on while the next one arrives, so a line of d ranks takes hardly longer than one hop: for G
bytes in buckets of b, (G + (d - 2) b) / B each way, B being the bandwidth between two ranks. Both ways together move
2 G bytes in and out of a rank, about as many as a ring all-reduce (2 (d - 1) / d G), with a fixed order of additions.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from swift_ft.comm.backend import GRADIENTS, GRADIENTS_MASK, NOTE, NOTE_PAYLOAD, WEIGHTS, Pending, Wire
from swift_ft.errors import ReplayRefused
from swift_ft.state.tensors import as_bytes, dtype_name
from swift_ft.state.tree import dtype_of

# Layout and modes that a helper's modules must share with the owner's.


def together(stages: Sequence[Any]) -> torch.nn.Module:
    return torch.nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})


def tied(modules: Sequence[torch.nn.Module]) -> bool:
    each = [id(parameter) for module in modules for parameter in module.parameters()]
    return len(set(each)) < len(each)


def parameters_and_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns names and tensors of the parameters, then of the buffers: all that a forward reads and a step changes."""
    return [*module.named_parameters(), *module.named_buffers()]


def module_layout(module: torch.nn.Module) -> list[list[Any]]:
    """Returns name, dtype, shape and strides of every tensor, as JSON. (Kernels select their algorithm by strides.)"""
    return [
        [name, dtype_name(t), list(t.shape), list(t.stride())] for name, t in parameters_and_buffers(module)
    ]


def layout_difference(wanted: list[list[Any]], module: torch.nn.Module) -> str:
    """Returns the first difference of the module's layout from `wanted`, in words; empty if they are equal."""
    here = module_layout(module)
    for one, other in zip(wanted, here, strict=False):
        if one != other:
            return f"{_words(one)} there, {_words(other)} here"
    if len(wanted) != len(here):
        return f"{len(wanted)} parameters and buffers there, {len(here)} here"
    return ""


def _words(entry: list[Any]) -> str:
    name, dtype, shape, stride = entry
    return f"{name} {dtype}{shape} (strides {stride})"


def module_modes(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the modes that a trainer may change between steps: frozen parameters, submodules in evaluation mode,
    autocast."""
    return {
        "frozen": [index for index, p in enumerate(module.parameters()) if not p.requires_grad],
        "evaluating": [index for index, part in enumerate(module.modules()) if not part.training],
        "autocast": [
            torch.is_autocast_enabled(kind := _device_type(module)),
            str(torch.get_autocast_dtype(kind)).removeprefix("torch."),
            torch.is_autocast_cache_enabled(),
        ],
    }


def set_module_modes(module: torch.nn.Module, as_there: dict[str, Any]) -> torch.autocast:
    """Applies the result of `module_modes` to a module. Returns the autocast context for the computation."""
    frozen, evaluating = set(as_there["frozen"]), set(as_there["evaluating"])
    for index, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(index not in frozen)
    for index, part in enumerate(module.modules()):
        part.training = index not in evaluating
    enabled, dtype, cached = as_there["autocast"]
    return torch.autocast(_device_type(module), dtype=dtype_of(dtype), enabled=enabled, cache_enabled=cached)


def _device_type(module: torch.nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


# Collection of single gradient addends, so that they can be added in the order of a single process.
#
# Floating point addition is not associative: gradients have the same bits only if the same numbers are added to `.grad`
# in the same order. Autograd may add several numbers per microbatch: a parameter that is used in several blocks with
# reentrant activation checkpointing is added to several times in one backward. So every single addend is kept instead
# of a microbatch's gradient, taken in the hook that autograd calls after each of its additions. The weights' part of a
# split backward calls no hook: torch's pipelining sets `.grad` itself, and the addend is taken from that assignment.

Strides = list[list[int] | None]
"""Strides of each parameter's gradient; None for a parameter without one."""


class Addends:
    """(a rank of the line, each step) Addends of its microbatches' gradients, from construction to `taken` or `close`.

    Until then `.grad` stays None, except on the `first` rank of the line: its additions come first, so autograd's own
    sum has the right bits and is used."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, first: bool = False):
        self.of: list[list[torch.Tensor]] = [[] for _ in parameters]
        self._parameters, self._first = parameters, first
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._taker(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad and not first
        ]

    def _taker(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.of[index].append(parameter.grad)
            parameter.grad = None

        return take

    def collect(self) -> list[list[torch.Tensor]]:
        """Returns the addends of each parameter, in order, and resets `.grad` to None."""
        self.close()
        if self._first:
            for addends, parameter in zip(self.of, self._parameters, strict=True):
                addends += [] if parameter.grad is None else [parameter.grad]
                parameter.grad = None
        return self.of

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """Returns the context for the weights' part of a split backward. Raises ReplayRefused at its end if two
        parameters share a gradient."""
        if self._first:
            yield
            return
        before = [len(addends) for addends in self.of]
        with _Setting(self._index, self.of):
            yield
        new = [
            addend.data_ptr()
            for addends, had in zip(self.of, before, strict=True)
            for addend in addends[had:]
            if addend.numel()
        ]
        if len(set(new)) < len(new):  # an addition to one of them would also change the other
            raise ReplayRefused("a split backward gives two parameters one gradient in the same memory")

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Setting(TorchFunctionMode):
    """A mode in which `parameter.grad = addend` collects the addend and leaves `.grad` None."""

    def __init__(self, index: dict[int, int], of: list[list[torch.Tensor]]):
        super().__init__()
        self._index, self._of = index, of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_GRADIENT and args[1] is not None and id(args[0]) in self._index:
            self._of[self._index[id(args[0])]].append(args[1])
            return None
        return func(*args, **(kwargs or {}))


_SET_GRADIENT: Any = cast(Any, torch.Tensor.grad).__set__


def added_in_order(total: torch.Tensor | None, addends: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Adds as autograd does: takes the first addend as it is (0 + -0.0 would be 0.0), adds the others in place. Returns
    None if there is no addend and no `total`."""
    for addend in addends:
        if total is None:
            total = addend
        else:
            total.add_(addend)
    return total


def first_strides(addends: Sequence[Sequence[torch.Tensor]]) -> Strides:
    """Returns the strides of each parameter's first addend, which its sum keeps. Autograd lays it out like the
    parameter; a split backward leaves it as computed."""
    return [list(addend[0].stride()) if addend else None for addend in addends]


def laid_out(total: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Returns a copy of `total` with these strides, because the bits of a sum over a gradient (a norm) depend on its
    layout. Raises ReplayRefused for strides with which elements share memory."""
    room = torch.empty_strided(total.shape, list(strides), dtype=total.dtype, device=total.device)
    try:
        return room.copy_(total)
    except RuntimeError as error:  # elements that share memory
        raise ReplayRefused(f"a gradient with strides {list(strides)}: {error}") from None


BUCKET_BYTES = 4 << 20
# Maximum number of transfers under way at a time, in each direction.
_IN_FLIGHT = 4
_NOTE_BYTES_MAX = 1 << 28


class Post:
    """Sender and receiver of tensors and notes. Sends do not wait; their tensors are kept alive until they arrive."""

    def __init__(self, wire: Wire):
        self._wire = wire
        self._sends: deque[tuple[torch.Tensor, Pending]] = deque()

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, at_most: int = 0) -> None:
        """Starts to send a tensor. `at_most`: waits until no more sends than this are under way; 0: does not wait."""
        self._sends.append((tensor, self._wire.send([tensor], to, tag)))
        while at_most and len(self._sends) > at_most:
            self._sends.popleft()[1].wait()

    def wait_sent(self) -> None:
        """Waits until all sent tensors have arrived. Raises RuntimeError if a send fails."""
        while self._sends:
            self._sends.popleft()[1].wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._wire.recv([tensor], source, tag)

    def note(self, to: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends a JSON value and the bytes of tensors; the value must describe their dtypes and shapes."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        payload = torch.cat([as_bytes(t) for t in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
        self.send(torch.tensor([data.numel(), payload.numel()]), to, NOTE)
        self.send(data, to, NOTE)
        if payload.numel():
            self.send(payload, to, NOTE_PAYLOAD)

    def read(self, source: int) -> tuple[Any, torch.Tensor]:
        """Waits for a note; returns its value and the bytes of its tensors. Raises ReplayRefused for an invalid
        header."""
        sizes = torch.zeros(2, dtype=torch.int64)
        self.receive(sizes, source, NOTE).wait()
        length, size = sizes.tolist()
        if not 0 < length <= _NOTE_BYTES_MAX or size < 0:
            raise ReplayRefused(
                f"rank {source} sent something other than a note; run one version of swift-ft on all ranks"
            )
        data = torch.empty(length, dtype=torch.uint8)
        self.receive(data, source, NOTE).wait()
        payload = torch.empty(size, dtype=torch.uint8)
        if size:
            self.receive(payload, source, NOTE_PAYLOAD).wait()
        return json.loads(data.numpy().tobytes()), payload


def taken_apart(
    payload: torch.Tensor, like: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Returns the tensors in a note's payload. `like`: their dtypes and shapes."""
    parts, at = [], 0
    for dtype, shape in like:
        tensor = torch.empty(list(shape), dtype=dtype)
        size = tensor.nbytes
        as_bytes(tensor).copy_(payload[at : at + size])
        parts.append(tensor)
        at += size
    return parts


def buckets(tensors: Sequence[torch.Tensor], size: int) -> list[list[int]]:
    """Returns the indices of `tensors` in consecutive buckets of one dtype each, of at most `size` bytes unless a
    single tensor has more."""
    in_buckets: list[list[int]] = []
    held = 0
    for index, tensor in enumerate(tensors):
        if not in_buckets or held + tensor.nbytes > size or tensors[in_buckets[-1][-1]].dtype != tensor.dtype:
            in_buckets.append([])
            held = 0
        in_buckets[-1].append(index)
        held += tensor.nbytes
    return in_buckets


class GradientChain:
    """This rank's place in the line `ranks`. The last rank of the line is the owner."""

    def __init__(
        self,
        post: Post,
        ranks: Sequence[int],
        own: int,
        check: Callable[[], None],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """`check` is called between buckets and raises if the transfer is to be ended, as when a rank is lost."""
        at = list(ranks).index(own)
        self._post = post
        self._check = check
        self._bucket_bytes = bucket_bytes
        self._before = ranks[at - 1] if at else None  # its microbatches come before this rank's
        self._behind = ranks[at + 1] if at + 1 < len(ranks) else None

    def pass_down(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the owner's tensors to all helpers, in place. Shapes and dtypes are the same on all ranks."""
        runs = buckets(tensors, self._bucket_bytes)
        arriving = self._arrivals(tensors, runs, self._behind, WEIGHTS)
        for number, run in enumerate(runs):
            self._check()
            mine = self._behind is None
            room = _packed(tensors, run) if mine else next(arriving)
            if self._before is not None and room.numel():
                self._post.send(room, self._before, WEIGHTS + number, at_most=_IN_FLIGHT)
            if not mine:
                for index, part in zip(run, _parts(room, tensors, run), strict=True):
                    tensors[index].copy_(part)

    def _arrivals(
        self, tensors: Sequence[torch.Tensor], runs: Sequence[Sequence[int]], source: int | None, tag: int
    ) -> Iterator[torch.Tensor]:
        """Yields the tensor of each run from `source`, in order. Empty runs are not sent. Posts several receives
        ahead."""
        arriving: deque[tuple[torch.Tensor, Pending | None]] = deque()
        for number in range(len(runs) + _IN_FLIGHT):
            if number < len(runs):
                room = _room(tensors, runs[number])
                pending = None
                if source is not None and room.numel():
                    pending = self._post.receive(room, source, tag + number)
                arriving.append((room, pending))
            if number >= _IN_FLIGHT - 1 and arriving:
                room, pending = arriving.popleft()
                if pending is not None:
                    pending.wait()
                yield room

    def pass_up(
        self, parameters: Sequence[torch.Tensor], addends: list[list[torch.Tensor]]
    ) -> list[torch.Tensor | None]:
        """Adds this rank's addends to the sums of the ranks before it, and passes them on. Returns the sums on the
        owner.

        `addends`: of each parameter, in order; they are consumed. The sum is None for a parameter that no rank used.
        """
        there = self._present(parameters, addends)
        runs = buckets(parameters, self._bucket_bytes)
        incoming = [[index for index in run if there[index]] for run in runs]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        arriving = self._arrivals(parameters, incoming, self._before, GRADIENTS)
        for number, run in enumerate(runs):
            self._check()
            room = next(arriving)
            parts = dict(zip(incoming[number], _parts(room, parameters, incoming[number]), strict=True))
            for index in run:
                sums[index] = added_in_order(parts.get(index), addends[index])
                addends[index] = []
            if self._behind is not None:
                self._send_on(number, run, incoming[number], room, sums)
        return sums

    def _present(self, parameters: Sequence[torch.Tensor], addends: list[list[torch.Tensor]]) -> list[bool]:
        """Returns which parameters have a sum from the ranks before, and sends the next rank the mask of those that
        have one now. Raises ReplayRefused for an addend that is sparse or of another dtype than its parameter."""
        for parameter, mine in zip(parameters, addends, strict=True):
            if any(addend.layout is not torch.strided or addend.dtype != parameter.dtype for addend in mine):
                raise ReplayRefused(
                    "a gradient is sparse or of another type than its parameter: replay alone"
                )
        mask = torch.zeros(len(parameters), dtype=torch.uint8)
        if self._before is not None:
            self._post.receive(mask, self._before, GRADIENTS_MASK).wait()
        there = [bool(value) for value in mask.tolist()]
        if self._behind is not None:
            now = [before or bool(mine) for before, mine in zip(there, addends, strict=True)]
            self._post.send(torch.tensor(now, dtype=torch.uint8), self._behind, GRADIENTS_MASK)
        return there

    def _send_on(
        self,
        number: int,
        run: list[int],
        incoming: list[int],
        room: torch.Tensor,
        sums: list[torch.Tensor | None],
    ) -> None:
        assert self._behind is not None
        present = [index for index in run if sums[index] is not None]
        if present != incoming:  # otherwise the sums are in `room`, where they arrived
            room = torch.cat([_flat(total) for total in sums if total is not None])
        if room.numel():
            self._post.send(room, self._behind, GRADIENTS + number, at_most=_IN_FLIGHT)
        for index in run:
            sums[index] = None


def _room(tensors: Sequence[torch.Tensor], run: Sequence[int]) -> torch.Tensor:
    numel = sum(tensors[index].numel() for index in run)
    return tensors[run[0]].new_empty(numel) if run else torch.empty(0, dtype=torch.uint8)


def _packed(tensors: Sequence[torch.Tensor], run: Sequence[int]) -> torch.Tensor:
    """Returns one flat tensor of a run's tensors. Joins them as bytes, because `cat` does not support every dtype."""
    return torch.cat([_flat(tensors[index]).view(torch.uint8) for index in run]).view(tensors[run[0]].dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _parts(room: torch.Tensor, tensors: Sequence[torch.Tensor], run: Sequence[int]) -> list[torch.Tensor]:
    pieces = torch.split(room, [tensors[index].numel() for index in run]) if run else ()
    return [piece.view(tensors[index].shape) for piece, index in zip(pieces, run, strict=True)]

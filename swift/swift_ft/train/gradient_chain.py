"""Tensors along a line of ranks: weights down from the owner, gradients up to it, bucket by bucket.

Each rank passes a bucket on while the next one arrives, so a line of d ranks takes hardly longer than one hop: for G
bytes in buckets of b, (G + (d - 2) b) / B each way, B being the bandwidth between two ranks. Up and down together
are 2 G bytes in and out of a rank, as a ring all-reduce has (2 (d - 1) / d G), whatever the order of additions.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from swift_ft.comm.backend import GRADIENTS, GRADIENTS_MASK, NOTE, NOTE_PAYLOAD, WEIGHTS, Pending, Wire
from swift_ft.errors import ReplayRefused
from swift_ft.state.tensors import as_bytes, dtype_name
from swift_ft.state.transfer import torch_dtype

# What stages' modules must be like on a helper: weights and buffers by name, and how they stand in a step.


def together(stages: Sequence[Any]) -> torch.nn.Module:
    """The modules of a rank's stages as one, whose names begin with the stage's."""
    return torch.nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})


def tied(modules: Sequence[torch.nn.Module]) -> bool:
    """One of them has a parameter of another."""
    each = [id(parameter) for module in modules for parameter in module.parameters()]
    return len(set(each)) < len(each)


def parameters_and_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers: all that a forward reads and a step changes."""
    return [*module.named_parameters(), *module.named_buffers()]


def module_layout(module: torch.nn.Module) -> list[list[Any]]:
    """Name, type, shape and strides of every tensor, as JSON. Kernels choose their way by strides."""
    return [
        [name, dtype_name(t), list(t.shape), list(t.stride())] for name, t in parameters_and_buffers(module)
    ]


def layout_difference(wanted: list[list[Any]], module: torch.nn.Module) -> str:
    """What the module has otherwise; empty: nothing."""
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
    """What a trainer may change between two steps: frozen parameters, parts in evaluation mode, autocast."""
    return {
        "frozen": [index for index, p in enumerate(module.parameters()) if not p.requires_grad],
        "evaluating": [index for index, part in enumerate(module.modules()) if not part.training],
        "autocast": [
            torch.is_autocast_enabled("cpu"),
            _dtype_name(torch.get_autocast_dtype("cpu")),
            torch.is_autocast_cache_enabled(),
        ],
    }


def set_module_modes(module: torch.nn.Module, as_there: dict[str, Any]) -> torch.autocast:
    """Makes it so here; the result is for the `with` around the computation."""
    frozen, evaluating = set(as_there["frozen"]), set(as_there["evaluating"])
    for index, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(index not in frozen)
    for index, part in enumerate(module.modules()):
        part.training = index not in evaluating
    enabled, dtype, cached = as_there["autocast"]
    return torch.autocast("cpu", dtype=torch_dtype(dtype), enabled=enabled, cache_enabled=cached)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The gradients of single additions, kept apart so that they can be added in the order in which one process would.
#
# Floating point addition is not associative: gradients have the same bits only if the same numbers are added to `.grad`
# in the same order. What autograd adds is not one number for each microbatch: a parameter that is used in several
# blocks with reentrant activation checkpointing is added to several times in one backward. So it is not the gradient
# of a microbatch that is kept but every single addend, taken in the hook that autograd calls behind each of its
# additions. The weights' part of a split backward calls no hook: torch's pipelining sets `.grad` itself, and there it
# is taken.

Strides = list[list[int] | None]
"""Of each parameter's gradient; None: it has none."""


class Addends:
    """What is added to the gradients of `parameters` from here to `close`, in its order; `.grad` stays None."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self.of: list[list[torch.Tensor]] = [[] for _ in parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._taker(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def _taker(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.of[index].append(parameter.grad)
            parameter.grad = None

        return take

    @contextmanager
    def weighing(self) -> Iterator[None]:
        """Around the second part of a split backward. Raises ReplayRefused if two parameters share a gradient."""
        before = [len(addends) for addends in self.of]
        with _Setting(self._index, self.of):
            yield
        new = [
            addend.data_ptr()
            for addends, had in zip(self.of, before, strict=True)
            for addend in addends[had:]
            if addend.numel()
        ]
        if len(set(new)) < len(new):  # what torch adds to one of them, it then adds to the other as well
            raise ReplayRefused("a split backward gives two parameters one gradient in the same memory")

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class OwnGradients:
    """(a rank of the line, each step) from here to `taken`, what its microbatches add to the parameters' gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, first: bool):
        """`first` in the line: its additions are the first ones, and autograd's own sum has the right bits."""
        self._parameters = parameters
        self._apart = None if first else Addends(parameters)

    def taken(self) -> list[list[torch.Tensor]]:
        """What is to be added for each parameter, in order; `.grad` is None again."""
        self.close()
        if self._apart is not None:
            return self._apart.of
        sums = [[] if parameter.grad is None else [parameter.grad] for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return sums

    def weighing(self) -> AbstractContextManager[None]:
        """Around the second part of a split backward."""
        return nullcontext() if self._apart is None else self._apart.weighing()

    def close(self) -> None:
        if self._apart is not None:
            self._apart.close()


class _Setting(TorchFunctionMode):
    """`parameter.grad = addend` keeps the addend, and `.grad` None: so the next one is not added to it."""

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
    """As autograd does it: the first gradient is taken as it is (0 + -0.0 would be 0.0), others are added in place."""
    for addend in addends:
        if total is None:
            total = addend
        else:
            total.add_(addend)
    return total


def first_strides(addends: Sequence[Sequence[torch.Tensor]]) -> Strides:
    """Of the first addend to each parameter, which the sum keeps: autograd lays it out like the parameter, a split
    backward leaves it as it was computed."""
    return [list(addend[0].stride()) if addend else None for addend in addends]


def laid_out(total: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """In memory of its own: what sums over a gradient (a norm) goes by its layout, and so do the sum's bits. Raises
    ReplayRefused for a layout whose elements share memory."""
    room = torch.empty_strided(total.shape, list(strides), dtype=total.dtype, device=total.device)
    try:
        return room.copy_(total)
    except RuntimeError as error:  # elements that share memory
        raise ReplayRefused(f"a gradient with strides {list(strides)}: {error}") from None


BUCKET_BYTES = 4 << 20
# Transfers under way at once, each way.
_IN_FLIGHT = 4
_NOTE_BYTES_MAX = 1 << 28


class Post:
    """Sends without waiting, and keeps what is under way alive."""

    def __init__(self, wire: Wire):
        self._wire = wire
        self._sends: deque[tuple[torch.Tensor, Pending]] = deque()

    def send(self, tensor: torch.Tensor, to: int, tag: int, *, at_most: int = 0) -> None:
        """`at_most`: so many may be under way behind it; 0: any number."""
        self._sends.append((tensor, self._wire.send([tensor], to, tag)))
        while at_most and len(self._sends) > at_most:
            self._sends.popleft()[1].wait()

    def wait_sent(self) -> None:
        """Waits until all that was sent has arrived."""
        while self._sends:
            self._sends.popleft()[1].wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._wire.recv([tensor], source, tag)

    def note(self, to: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """JSON, and tensors whose types and shapes it tells."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        payload = torch.cat([as_bytes(t) for t in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
        self.send(torch.tensor([data.numel(), payload.numel()]), to, NOTE)
        self.send(data, to, NOTE)
        if payload.numel():
            self.send(payload, to, NOTE_PAYLOAD)

    def read(self, source: int) -> tuple[Any, torch.Tensor]:
        """A note and the bytes of its tensors. Waits until it comes. Raises ReplayRefused for bytes that are none."""
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
    """The tensors of a note, of these types and shapes."""
    parts, at = [], 0
    for dtype, shape in like:
        tensor = torch.empty(list(shape), dtype=dtype)
        size = tensor.nbytes
        as_bytes(tensor).copy_(payload[at : at + size])
        parts.append(tensor)
        at += size
    return parts


def buckets(tensors: Sequence[torch.Tensor], size: int) -> list[list[int]]:
    """Indices of `tensors` in runs of one type, of at most `size` bytes unless one tensor has more."""
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
    """This rank's place in the line `ranks`, whose last one is the owner."""

    def __init__(
        self,
        post: Post,
        ranks: Sequence[int],
        own: int,
        check: Callable[[], None],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """`check` is called between buckets: it raises what ends the wait for a line that is gone."""
        at = list(ranks).index(own)
        self._post = post
        self._check = check
        self._bucket_bytes = bucket_bytes
        self._before = ranks[at - 1] if at else None  # whose microbatches come before this rank's
        self._behind = ranks[at + 1] if at + 1 < len(ranks) else None

    def pass_down(self, tensors: Sequence[torch.Tensor]) -> None:
        """(owner) Gives its tensors to all; (helper) takes them in. They have the same shapes and types on all."""
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
        """What comes from `source`, run by run; empty ones are not sent. Some are waited for ahead."""
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
        """Adds this rank's addends to what comes from before it, and passes it on. (owner) The sums.

        `addends` of each parameter, in their order; they are used up. A parameter that nobody has used has no sum.
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
        """Which have a gradient from before; and tells the next one which have one now."""
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
        if present != incoming:  # else the sums lie in the room that they came in
            room = torch.cat([_flat(total) for total in sums if total is not None])
        if room.numel():
            self._post.send(room, self._behind, GRADIENTS + number, at_most=_IN_FLIGHT)
        for index in run:
            sums[index] = None


def _room(tensors: Sequence[torch.Tensor], run: Sequence[int]) -> torch.Tensor:
    numel = sum(tensors[index].numel() for index in run)
    return torch.empty(numel, dtype=tensors[run[0]].dtype if run else torch.uint8)


def _packed(tensors: Sequence[torch.Tensor], run: Sequence[int]) -> torch.Tensor:
    """By way of bytes: not every type of element can be joined."""
    return torch.cat([as_bytes(tensors[index]) for index in run]).view(tensors[run[0]].dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _parts(room: torch.Tensor, tensors: Sequence[torch.Tensor], run: Sequence[int]) -> list[torch.Tensor]:
    """Views of the room in the shapes of the tensors."""
    pieces = torch.split(room, [tensors[index].numel() for index in run]) if run else ()
    return [piece.view(tensors[index].shape) for piece, index in zip(pieces, run, strict=True)]

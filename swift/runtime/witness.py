"""What a step took in and gave, remembered, and compared when the step is done again.

(channel, whole modules, engine) ``saw`` what enters from outside, what comes out of collectives, losses and outputs
(engine) ``begin`` a step; ``forget_below`` what is never done again; ``forget`` where other bits are expected

A step is done again where it was cut short by a failure, and where everybody restored a checkpoint. If it is a function
of the state that was captured, it sees the same. A rank on which it does not has something that a recovery does not
know of (a loader that is not registered, an average of its own): it is said once, and the job is not exact from then
on.
That is all that is done about it: to restore again would only differ again.

The cost is a digest of what a rank takes in and of what comes out of whole modules, where that is large of a sample.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from swift.runtime import _torch
from swift.runtime.tensors import byte_view, plain

INPUT, TARGET, RESULT, LOSS, OUTPUT = "input", "target", "result", "loss", "output"
SENT, GRADIENT = "sent", "gradient"  # in a rehearsal
SAMPLED_BYTES = 1 << 20
"""Of a larger tensor, so much is digested, evenly spaced."""

_WORDS = {
    INPUT: "external input {slot} of stage {stage}, microbatch {microbatch},",
    TARGET: "the target of stage {stage}, microbatch {microbatch},",
    RESULT: "the result of collective {slot}",
    LOSS: "the loss of microbatch {microbatch}",
    SENT: "what stage {stage} sends, microbatch {microbatch},",
    GRADIENT: "the gradient of parameter {slot} of stage {stage}",
    OUTPUT: "output {slot} of the module in its forward {microbatch}",
}
_LOADER = "is what it comes from registered (session.register(loader=...))?"
_CAPTURED = "the step depends on something that is not captured"


class Seen(NamedTuple):
    """What a tensor is in its step."""

    kind: str
    stage: int
    microbatch: int
    slot: int

    def what(self) -> str:
        return _WORDS[self.kind].format(**self._asdict())

    def words(self, step: int) -> str:
        what = self.what()
        why = _LOADER if self.kind in (INPUT, TARGET) else _CAPTURED
        return f"{what} of step {step} differs from the first time: {why}"


class Witness:
    """One rank's. Trainer's thread only."""

    def __init__(
        self,
        differs: Callable[[int, str], None],
        broken: Callable[[], bool],
        look: Callable[[int, str, torch.Tensor], None],
    ) -> None:
        """`differs(step, words)` is called once. `broken`: what a step computes is worth nothing any more.
        `look(step, what, loss)`: at every loss of a step."""
        self._look = look
        self._differs = differs
        self._broken = broken
        self._steps: dict[int, dict[Seen, bytes]] = {}
        self._step = 0
        self._seen: dict[Seen, bytes] = {}
        self._calls = 0
        self.thorough = False
        """In this step, what is sent and the gradients are looked at as well."""
        self.quiet = False
        """Nothing is looked at: it was said, or other bits are expected from here on."""

    def begin(self, step: int) -> None:
        self.thorough = self.thorough and step == self._step
        self._step = step
        self._seen = self._steps.setdefault(step, {})
        self._calls = 0

    def forget_below(self, step: int) -> None:
        """Those steps are never done again."""
        for known in [known for known in self._steps if known < step]:
            del self._steps[known]

    def forget(self) -> None:
        """What is done again from here on has other bits, and it is known why."""
        self._steps.clear()

    def saw(self, kind: str, stage: int, microbatch: int, slot: int, tensor: torch.Tensor) -> None:
        """Remembers the digest of a tensor, or compares it with the one that this step had before."""
        if self._broken() or _torch.is_transformed():
            return
        seen = Seen(kind, stage, microbatch, slot)
        if torch.is_grad_enabled() and (kind == LOSS or (kind == OUTPUT and tensor.numel() == 1)):
            self._look(self._step, seen.what(), tensor)
        if self.quiet:
            return
        digest = digest_of(tensor)
        if self._seen.setdefault(seen, digest) != digest:
            self.quiet = True
            self._differs(self._step, seen.words(self._step))

    def called(self, inputs: Any) -> None:
        """A whole module's forward begins. Those without gradients (a validation) are not looked at."""
        if not torch.is_grad_enabled():
            return
        for slot, tensor in enumerate(tensors_of(inputs)):
            self.saw(INPUT, 0, self._calls, slot, tensor)

    def returned(self, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for slot, tensor in enumerate(tensors_of(outputs)):
            self.saw(OUTPUT, 0, self._calls, slot, tensor)
        self._calls += 1


def _nobody() -> None:
    """Who watches the copy of a module."""


class _ForwardHook:
    """torch's, on a module of the trainer's, who may copy it, pickle it or compile it. A copy is not watched."""

    def __init__(self, witness: Callable[[], Witness | None], *, after: bool) -> None:
        self._witness = witness
        self._after = after

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        witness = self._witness()
        if witness is None:
            return
        if self._after:
            witness.returned(outputs)
        else:
            witness.called((args, kwargs))

    def __deepcopy__(self, memo: Any) -> "_ForwardHook":
        return _unwatched(self._after)

    def __reduce__(self) -> tuple[Callable[[bool], "_ForwardHook"], tuple[bool]]:
        return _unwatched, (self._after,)


def _unwatched(after: bool) -> _ForwardHook:
    return _ForwardHook(_nobody, after=after)


def watch_forwards(module: torch.nn.Module, holder: "HasWitness") -> None:
    """A whole module has no boundary at which its inputs are seen, so its forwards are."""
    module.register_forward_pre_hook(_ForwardHook(lambda: holder.witness, after=False), with_kwargs=True)
    module.register_forward_hook(_ForwardHook(lambda: holder.witness, after=True), with_kwargs=True)


class HasWitness(Protocol):
    """The channel."""

    @property
    def witness(self) -> Witness | None:
        """None: nobody looks."""


def tensors_of(values: Any) -> Iterable[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def digest_of(tensor: torch.Tensor, *, whole: bool = False) -> bytes:
    """Of its bits, its type and its shape. Those that hold no plain memory (sparse, meta) count by type and shape.
    `whole`: also of a large one all bits."""
    about = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not ordinary or tensor.device.type == "meta":
        return xxhash.xxh3_128_digest(about)
    flat = tensor.detach()
    if flat.nbytes > SAMPLED_BYTES and not whole:
        flat = flat.reshape(-1)[:: -(-flat.nbytes // SAMPLED_BYTES)]
    state = xxhash.xxh3_128(about)
    if flat.numel():
        state.update(byte_view(plain(flat)).data)
    return state.digest()

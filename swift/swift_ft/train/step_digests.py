"""What a step took in and gave, remembered, and compared when the step is done again.

(channel, whole modules, engine) ``saw`` what enters from outside, what comes out of collectives, losses and outputs
(engine) ``begin`` a step; ``forget_below`` what is never done again; ``forget`` where other bits are expected

A step is done again where it was cut short by a failure, where everybody restored a checkpoint, and in a rehearsal. If
it is a function of the state that was captured, it sees the same. A rank on which it does not has something that a
recovery does not know of (a loader that is not registered, an average of its own): it is said once, and the job is not
exact from then on. That is all that is done about it: to restore again would only differ again.

The cost is a digest of what a rank takes in and of what comes out of whole modules, where that is large of a sample.

A step that is recorded for a rehearsal is looked at *thoroughly*: the state that it begins with, what goes into each
module and comes out, what is sent and given to collectives, and the gradients. `transcript` is all of it, in the order
of the computation; a rehearsal compares with it (``expect``), so that the first difference is named, and not its
consequences.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from swift_ft import torch_private
from swift_ft.state.tensors import byte_view
from swift_ft.train.transcript import INPUT, LOSS, OUTPUT, Difference, Seen, Transcript
from swift_ft.train.transcript import RESULT as RESULT
from swift_ft.train.transcript import TARGET as TARGET

SAMPLED_BYTES = 1 << 20
"""Of a larger tensor, so much is digested, evenly spaced."""


class Witness:
    """One rank's. Trainer's thread, but for `gave`."""

    def __init__(
        self,
        differs: Callable[[int, str], None],
        broken: Callable[[], bool],
        look: Callable[[int, str, torch.Tensor], None],
        *,
        whole: bool = False,
    ) -> None:
        """`differs(step, words)` is called once. `broken`: what a step computes is worth nothing any more.
        `look(step, what, loss)`: at every loss of a step. `whole`: all bits of large tensors count."""
        self.whole = whole
        self._look = look
        self.differs = differs
        self._broken = broken
        self._steps: dict[int, dict[Seen, bytes]] = {}
        self._expected: dict[int, Transcript] = {}
        self._step = 0
        self._seen: dict[Seen, bytes] = {}
        self._reached: set[Seen] = set()
        self._calls = 0
        self._counted: Counter[tuple[str, str]] = Counter()
        self._digests: dict[int, tuple[weakref.ref[torch.Tensor], int, bytes]] = {}
        """By the id of a tensor that was looked at in this step: the tensor, its version and its digest then."""
        self.passing: Callable[[Seen], None] = _ignored
        """(rehearsal) Told of everything before it is looked at."""
        self.thorough = False
        """The step under way is looked at thoroughly."""
        self.quiet = False
        """Nothing is looked at: it was said, or other bits are expected from here on."""

    def begin(self, step: int) -> None:
        self._step = step
        self._seen = self._steps.setdefault(step, {})
        self._calls = 0
        self._counted.clear()
        self._digests.clear()
        self._reached = set()

    def forget_below(self, step: int) -> None:
        """Those steps are never done again."""
        for known in [known for known in self._steps if known < step]:
            del self._steps[known]

    def forget(self) -> None:
        """What is done again from here on has other bits, and it is known why."""
        self._steps.clear()

    def transcript(self) -> Transcript:
        """(a thorough step is done)"""
        return dict(self._seen)

    def expect(self, step: int, transcript: Transcript) -> None:
        """(rehearsal) That step is compared with what another process has seen of it."""
        self._expected[step] = transcript

    def check_all_seen(self) -> None:
        """(rehearsal, the step is done) It has come to all that was expected."""
        expected = self._expected[self._step]
        lacking = [seen for seen in expected if seen not in self._reached]
        if lacking and not self.quiet:
            self._tell(Difference(lacking[0], expected[lacking[0]], None))

    def _tell(self, difference: Difference) -> None:
        self.quiet = True
        self.differs(self._step, difference.words(self._step))

    def saw(
        self, kind: str, stage: int, microbatch: int, slot: int, tensor: torch.Tensor, name: str = ""
    ) -> None:
        """Remembers the digest of a tensor, or compares it with the one that this step had before."""
        if self._broken() or torch_private.is_transformed():
            return
        seen = Seen(kind, stage, microbatch, slot, name)
        if torch.is_grad_enabled() and (kind == LOSS or (kind == OUTPUT and tensor.numel() == 1)):
            self._look(self._step, seen.what(), tensor)
        if not self.quiet:
            self.note(seen, self._digest_of(tensor))

    def _digest_of(self, tensor: torch.Tensor) -> bytes:
        """What leaves a module mostly enters the next one as it is: its digest is remembered."""
        if tensor.is_inference():  # it has no version
            return digest_of(tensor, whole=self.whole)
        known = self._digests.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            known = weakref.ref(tensor), tensor._version, digest_of(tensor, whole=self.whole)
            self._digests[id(tensor)] = known
        return known[2]

    def note(self, seen: Seen, digest: bytes) -> None:
        """As `saw`, of what has its digest already."""
        if self.quiet:
            return
        self.passing(seen)
        self._reached.add(seen)
        before: bytes | None = self._seen.setdefault(seen, digest)
        expected = self._expected.get(self._step)
        if expected is not None:
            before = expected.get(seen)
        if before != digest:
            self._tell(Difference(seen, before, digest))

    def count(self, kind: str, name: str) -> int:
        """How many of these were counted in this step before."""
        number = self._counted[kind, name]
        self._counted[kind, name] += 1
        return number

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


def _ignored(_: Seen) -> None:
    """Nobody is told."""


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
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def digest_of(tensor: torch.Tensor, *, whole: bool = False) -> bytes:
    """Of its bits, its type and its shape. Those that hold no plain memory (sparse, meta) count by type and shape.
    `whole`: also of a large one all bits."""
    about = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not ordinary or tensor.device.type == "meta":
        return xxhash.xxh3_128_digest(about)
    state = xxhash.xxh3_128(about)
    with torch_private.without_modes():
        flat = tensor.detach()
        if flat.nbytes > SAMPLED_BYTES and not whole:
            flat = flat.reshape(-1)[:: -(-flat.nbytes // SAMPLED_BYTES)]
        if flat.numel():
            state.update(byte_view(flat).data)
    return state.digest()

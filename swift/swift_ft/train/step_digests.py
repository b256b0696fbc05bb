"""Digests of a step's inputs and results, compared when the step is repeated.

(channel, whole modules, engine) ``saw`` external inputs, results of collectives, losses and outputs
(engine) ``begin`` a step; ``forget_below`` the steps that are never repeated; ``forget`` if other bits are expected

A step is repeated after a failure has interrupted it, after all ranks have restored a checkpoint, and in a rehearsal.
If it is a function of the captured state, it sees equal tensors. If it does not, this rank has state that a recovery
does not restore (an unregistered loader, a running average). This is reported once, and the job is inexact from then
on. There is no other reaction, since another restore would only differ again.

The cost is a digest of a rank's inputs and of the outputs of whole modules; large tensors are sampled.

A step recorded for a rehearsal is observed *thoroughly*: its initial state, each module's inputs and outputs, tensors
sent and passed to collectives, and gradients. `transcript` returns all of it in the order of the computation. A
rehearsal compares with it (``expect``), and so reports the first difference and not its consequences.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from swift_ft import torch_private
from swift_ft.device import Readings
from swift_ft.state.digests import digest_there, digests, read
from swift_ft.train.transcript import INPUT, LOSS, OUTPUT, Difference, Seen, Transcript

SAMPLED_BYTES = 1 << 20
"""Bytes of a larger tensor that are digested, evenly spaced."""


class Witness:
    """Digests of one rank's steps. Used by the trainer's thread; in a rehearsal `note` also by the groups' threads."""

    def __init__(
        self,
        differs: Callable[[int, str], None],
        broken: Callable[[], bool],
        look: Callable[[int, str, torch.Tensor], None],
        *,
        readings: Readings | None = None,
        whole: bool = False,
    ) -> None:
        """`differs(step, words)` is called at the first difference. `broken()`: the step's results are invalid.
        `look(step, what, loss)` is called with every loss. `readings`: when a device's tensors are digested; None: at
        once, and the host waits for each. `whole`: large tensors are digested completely."""
        self.whole = whole
        self._readings = readings
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
        """id of a tensor digested in this step -> the tensor, its version and its digest."""
        self.passing: Callable[[Seen], None] = let_pass
        """(rehearsal) Called before each digest is compared."""
        self.thorough = False
        """Set while the current step is observed thoroughly."""
        self.quiet = False
        """Turns observation off: a difference was reported, or other bits are expected from here on."""

    def begin(self, step: int) -> None:
        self._step = step
        self._seen = self._steps.setdefault(step, {})
        self._calls = 0
        self._counted.clear()
        self._digests.clear()
        self._reached = set()

    def forget_below(self, step: int) -> None:
        """Drops the digests of steps that are never repeated."""
        for known in [known for known in self._steps if known < step]:
            del self._steps[known]

    def forget(self) -> None:
        """Drops all digests, because repeated steps are expected to have other bits from here on."""
        self._steps.clear()

    def transcript(self) -> Transcript:
        """(after a thorough step) Returns its digests in the order of the computation."""
        return dict(self._seen)

    def expect(self, step: int, transcript: Transcript) -> None:
        """(rehearsal) Sets the transcript of another process that the step is compared with."""
        self._expected[step] = transcript

    def check_all_seen(self) -> None:
        """(rehearsal, after the step) Reports a difference if an expected tensor was not seen."""
        expected = self._expected[self._step]
        lacking = [seen for seen in expected if seen not in self._reached]
        if lacking and not self.quiet:
            self._report(Difference(lacking[0], expected[lacking[0]], None))

    def _report(self, difference: Difference) -> None:
        self.quiet = True
        self.differs(self._step, difference.words(self._step))

    def saw(
        self, kind: str, stage: int, microbatch: int, slot: int, tensor: torch.Tensor, name: str = ""
    ) -> None:
        """Records the digest of a tensor, or compares it with that of an earlier run of this step."""
        if self._broken() or torch_private.is_transformed():
            return
        seen = Seen(kind, stage, microbatch, slot, name)
        if torch.is_grad_enabled() and (kind == LOSS or (kind == OUTPUT and tensor.numel() == 1)):
            self._look(self._step, seen.what(), tensor)
        if self.quiet:
            return
        if self._readings is None:
            self.note(seen, self._digest_of(tensor))
        elif tensor.device.type != "cpu" and _is_plain(tensor):
            about = _about(tensor)
            with torch_private.without_modes():
                there = digest_there(_sample(tensor, whole=self.whole))
            assert isinstance(there, torch.Tensor)
            self._readings.later(there, lambda host: self.note(seen, _combined(about, *read([host]))))
        else:
            digest = self._digest_of(tensor)
            self._readings.then(lambda: self.note(seen, digest))

    def _digest_of(self, tensor: torch.Tensor) -> bytes:
        """Returns the tensor's digest. Cached, since a module's output is mostly the next one's input."""
        if tensor.is_inference():  # has no version
            return digest_of(tensor, whole=self.whole)
        known = self._digests.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            known = weakref.ref(tensor), tensor._version, digest_of(tensor, whole=self.whole)
            self._digests[id(tensor)] = known
        return known[2]

    def note(self, seen: Seen, digest: bytes) -> None:
        """Does as `saw` for a digest that is already computed."""
        if self.quiet:
            return
        self.passing(seen)
        self._reached.add(seen)
        before: bytes | None = self._seen.setdefault(seen, digest)
        expected = self._expected.get(self._step)
        if expected is not None:
            before = expected.get(seen)
        if before != digest:
            self._report(Difference(seen, before, digest))

    def count(self, kind: str, name: str) -> int:
        """Returns how often this was called with the same arguments in this step before."""
        number = self._counted[kind, name]
        self._counted[kind, name] += 1
        return number

    def called(self, inputs: Any) -> None:
        """Records the inputs of a whole module's forward. Forwards without gradients (validation) are ignored."""
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


def let_pass(_: Seen) -> None:
    """Default of `Witness.passing`: does not interrupt the step."""


def watch_forwards(module: torch.nn.Module, witness: Callable[[], Witness | None]) -> None:
    """Registers hooks on a whole module's forward, since it has no stage boundary at which its inputs are seen."""

    def called(args: Any, kwargs: Any) -> None:
        if (now := witness()) is not None:
            now.called((args, kwargs))

    def returned(_args: Any, _kwargs: Any, outputs: Any) -> None:
        if (now := witness()) is not None:
            now.returned(outputs)

    module.register_forward_pre_hook(torch_private.ModuleHook(called), with_kwargs=True)
    module.register_forward_hook(torch_private.ModuleHook(returned), with_kwargs=True)


def tensors_of(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def digest_of(tensor: torch.Tensor, *, whole: bool = False) -> bytes:
    """Returns a digest of a tensor's bits, dtype and shape. Tensors without plain memory (sparse, meta) are digested by
    dtype and shape only. `whole`: all bits of a large tensor, not a sample."""
    return digests_of([tensor], whole=whole)[0]


def digests_of(tensors: Sequence[torch.Tensor], *, whole: bool = False) -> list[bytes]:
    """Returns `digest_of` each. Waits once for those of a device."""
    with torch_private.without_modes():
        plain = [_sample(tensor, whole=whole) for tensor in tensors if _is_plain(tensor)]
        found = iter(digests(plain))
    return [_combined(_about(tensor), next(found) if _is_plain(tensor) else b"") for tensor in tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return ordinary and tensor.device.type != "meta"


def _about(tensor: torch.Tensor) -> bytes:
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode()


def _sample(tensor: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Returns the elements that are digested, on the tensor's device."""
    with torch_private.without_modes():
        flat = tensor.detach()
        if flat.nbytes > SAMPLED_BYTES and not whole:
            flat = flat.reshape(-1)[:: -(-flat.nbytes // SAMPLED_BYTES)]
        return flat


def _combined(about: bytes, digest: bytes) -> bytes:
    return xxhash.xxh3_128_digest(about + digest)

"""Where a received state goes: the joiner's own tensors, and new ones for what it has none of."""

import math
import mmap
from collections.abc import Iterable
from typing import Any

import torch

from swift.checkpoint.state import stride_told
from swift.errors import ReplayRefused, ReplicaDiffers
from swift.runtime.manifest import Manifest, TensorEntry, check_fits, fits, local, placement, torch_dtype
from swift.runtime.tensors import as_bytes

# A new tensor of this many bytes lies in huge pages. The kernel clears pages when they are first written; one by
# one that takes as long as receiving does (2.4 GB/s against 7 in huge pages).
_HUGE_BYTES = 2 << 20


# What is there may have another shape from step to step.
_GROWING = ("state.optimizers.", "state.objects.")


class Destination:
    """(joiner) ``parts``: uint8 views, one per entry, that the chunks are received into … ``finish()``.

    Raises ReplicaDiffers if `into` has a tensor of another shape, type or shard than the source `source`, and
    ReplayRefused if the memory does not suffice.
    """

    def __init__(
        self,
        manifest: Manifest,
        into: dict[str, torch.Tensor],
        source: int,
        joiner: int,
        *,
        older_copy: bool = False,
    ):
        """`older_copy`: `into` is nobody's state, only memory to use again. A tensor of another shape or type gets new
        memory, whatever it is of; what is one tensor at the source is one here, and what is two is two."""
        self._older_copy = older_copy
        self._entries = manifest.entries
        self._into = into
        self._joiner = joiner
        here: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            if entry.path not in into:
                continue
            may_differ = older_copy or entry.path.startswith(_GROWING)
            if may_differ and not fits(entry, into[entry.path]):
                continue
            check_fits(entry, into[entry.path], source, joiner)
            here[entry.path] = local(into[entry.path])
        if older_copy:
            here = _each_once(self._entries, here)
        # One memory here as there: filled through the entry that it is the same as.
        tied = {e.path for e in self._entries if e.path in here and _same(here[e.path], here.get(e.same_as))}
        self._overlapping = _overlapping({path: tensor for path, tensor in here.items() if path not in tied})
        for entry in self._entries:
            if entry.path in here and entry.path not in self._overlapping and not _laid_alike(entry, here):
                del here[entry.path]  # it gets a new tensor
        tied &= here.keys()
        direct = {path for path in here if path not in self._overlapping and _is_bytes(here[path])}
        _check_memory(entry.bytes for entry in self._entries if entry.path not in direct)
        self._received = {
            entry.path: here[entry.path] if entry.path in direct else fresh(entry)
            for entry in self._entries
            if not entry.same_as
        }
        self._copies = [
            (here[entry.path], self._received[entry.same_as or entry.path])
            for entry in self._entries
            if entry.path in here and entry.path not in tied and (entry.same_as or entry.path not in direct)
        ]
        self._here = here
        empty = torch.empty(0, dtype=torch.uint8)
        self.parts = [empty if e.same_as else as_bytes(self._received[e.path]) for e in self._entries]

    def finish(self) -> dict[str, torch.Tensor]:
        """All tensors by path, the ones of `into` filled. Raises ReplicaDiffers if these share memory wrongly."""
        for destination, value in self._copies:
            destination.copy_(value)
        for entry in self._entries:  # what the source keeps apart may be one memory here: one value is gone
            if entry.path in self._overlapping:
                mine, theirs = self._here[entry.path], self._received[entry.same_as or entry.path]
                if not torch.equal(as_bytes(mine), as_bytes(theirs)):
                    raise ReplicaDiffers(
                        f"{entry.path} shares memory on rank {self._joiner} with what its replicas keep apart"
                    )
        tensors: dict[str, torch.Tensor] = {}
        laid: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            if entry.path in self._here:
                tensors[entry.path] = self._into[entry.path]
                continue
            first = entry.same_as or entry.path
            if self._older_copy and first in self._here:
                tensors[entry.path] = tensors[first]
                continue
            if first not in laid:
                laid[first] = _laid_out(self._received[first], entry.stride)
            tensors[entry.path] = self._sharded(entry, laid[first])
        return tensors

    def _sharded(self, entry: TensorEntry, tensor: torch.Tensor) -> Any:
        """A new tensor as a shard of the mesh on which a tensor of `into` is sharded the same way."""
        if not entry.placement:
            return tensor
        template: Any
        for template in self._into.values():
            if placement(template) == entry.placement:
                return type(template).from_local(
                    tensor,
                    template.device_mesh,
                    template.placements,
                    run_check=False,
                    shape=template.shape,
                    stride=template.stride(),
                )
        raise ReplicaDiffers(
            f"{entry.path} is {entry}; rank {self._joiner} has no tensor that is sharded like it"
        )


def _each_once(entries: Iterable[TensorEntry], here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that are filled: of two names of one tensor the first, here and at the source."""
    once: dict[str, torch.Tensor] = {}
    filled: set[int] = set()
    for entry in entries:
        if entry.path in here and not entry.same_as and here[entry.path].data_ptr() not in filled:
            once[entry.path] = here[entry.path]
            filled.add(here[entry.path].data_ptr())
    return once


def _laid_alike(entry: TensorEntry, here: dict[str, torch.Tensor]) -> bool:
    """Kernels choose their way by strides, so a tensor must not lie otherwise than at its source."""
    return tuple(stride_told(here[entry.path])) == entry.stride


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if not stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def fresh(entry: TensorEntry) -> torch.Tensor:
    """An uninitialised CPU tensor of an entry's shape and type, for its bytes in their order."""
    dtype = torch_dtype(entry.dtype)
    if entry.bytes < _HUGE_BYTES:
        return torch.empty(entry.shape, dtype=dtype)
    memory = mmap.mmap(-1, entry.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(entry.shape)).view(entry.shape)


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether its elements are one run of bytes that can be received into."""
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())


def _overlapping(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Paths of tensors whose memory, from the first element to the last, reaches into another one's."""
    spans = []
    for path, tensor in tensors.items():
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize, path))
    overlapping: set[str] = set()
    end, longest = 0, ""
    for begin, end_of_this, path in sorted(spans):
        if begin < end:
            overlapping |= {path, longest}
        if end_of_this > end:
            end, longest = end_of_this, path
    return overlapping


def _check_memory(sizes: Iterable[int]) -> None:
    needed = sum(sizes)
    free = available_memory()
    if free is not None and needed > free:
        raise ReplayRefused(
            f"a replica's state needs {needed >> 20} MiB, {free >> 20} MiB are free; add memory to this machine"
        )


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None

"""Replicas are compared while all is well, so that a copy of one is worth something when it is needed.

After the first step and at every checkpoint, ranks with the same state exchange digests of its parts. Parameters or
optimizer state that differ mean that memory, hardware or a kernel has gone wrong on one of them: everybody goes
back to the checkpoint. Buffers or registered objects that differ are the trainer's doing (running statistics of
each replica's own batches, a loader that knows its shard): a joiner would get its neighbour's. That is bad input.
"""

from typing import Any

import torch
import xxhash

from swift.checkpoint.state import split
from swift.errors import ReplicaDiffers, UsageError
from swift.runtime.groups import LastingGroup
from swift.runtime.state import TrainerState
from swift.runtime.tensors import byte_view
from swift.runtime.transport import Messages

_DIGEST_BYTES = 16


class Audit:
    """(every replica, at the same versions) ``compare()``."""

    def __init__(self, group: LastingGroup, state: TrainerState):
        self._group = group
        self._state = state

    def compare(self) -> None:
        """Raises ReplicaDiffers or UsageError if a part of the state is not the same on all replicas."""
        parts = self._state.parts()
        own = torch.frombuffer(bytearray(b"".join(map(_digest, parts.values()))), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in self._group.ranks]

        def run(messages: Messages) -> None:
            messages.all_gather(gathered, own)

        self._group.run(run)
        for index, name in enumerate(parts):
            place = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
            others = [
                rank
                for rank, digests in zip(self._group.ranks, gathered, strict=True)
                if not torch.equal(digests[place], own[place])
            ]
            if others:
                self._differs(name, others)

    def _differs(self, name: str, others: list[int]) -> None:
        ranks = ", ".join(map(str, others))
        if name in ("parameters", "optimizer"):
            raise ReplicaDiffers(
                f"{name} at version {self._state.version} differ from those of rank {ranks}, a replica"
            )
        raise UsageError(
            f"{name} of this rank is not the same as on rank {ranks}, so these ranks are no replicas: keep it the "
            "same on all (one position for all loaders; no running statistics of each one's own batches: GroupNorm, or "
            "track_running_stats=False), or use strategy='replay'"
        )


def _digest(part: Any) -> bytes:
    tensors, rest = split(part)
    state = xxhash.xxh3_128(repr(rest).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(name.encode())
        state.update(byte_view(tensor).data if tensor.numel() else b"")
    return state.digest()

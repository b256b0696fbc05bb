"""Replicas are compared while all is well, so that a copy of one is worth something when it is needed.

After the first step and at every checkpoint, ranks with the same state exchange digests of its parts. Parameters or
optimizer state that differ mean that memory, hardware or a kernel has gone wrong on one of them: everybody goes
back to the checkpoint. Buffers or registered objects that differ are the trainer's doing (running statistics of
each replica's own batches, a loader that knows its shard): a joiner would get its neighbour's. That is bad input.
"""

import json
import sys
from typing import Any

import torch
import xxhash

from swift import events
from swift.checkpoint.state import split
from swift.errors import ReplicaDiffers, UsageError
from swift.runtime.gradients import LEFT
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.state import HYPERPARAMETERS, TrainerState
from swift.runtime.tensors import byte_view

_DIGEST_BYTES = 16
_SIZE_BYTES = 4


class Audit:
    """(every replica, at the same versions) ``compare()``."""

    def __init__(self, group: ReconfigurableGroup, state: TrainerState):
        self._group = group
        self._state = state

    def compare(self, untold: str = "") -> None:
        """Raises ReplicaDiffers or UsageError if a part of the state is not the same on all replicas.

        `untold`: variables of the script that are of another step than this rank's state, in words.
        """
        parts = self._state.parts()
        word = untold.encode()
        own = _tensor(b"".join(map(_digest, parts.values())) + len(word).to_bytes(_SIZE_BYTES, "little"))
        gathered = self._group.gathered(own)
        for index, name in enumerate(parts):
            place = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
            others = [
                rank
                for rank, digests in zip(self._group.present, gathered, strict=True)
                if not torch.equal(digests[place], own[place])
            ]
            if others:
                # All ranks come here: each of them differs from another one.
                room = max(_size(each) for each in gathered)
                words = self._group.gathered(_tensor(word.ljust(room))) if room else []
                named = sorted({bytes(each.numpy()).decode().strip() for each in words} - {""})
                self._differs(name, others, ", ".join(named))
        self._compare_attributes()

    def _compare_attributes(self) -> None:
        """What modules keep in Python may well be each replica's own (the last loss, a map of attention), and of no
        consequence. It is not copied then, which is said once; and a job in which it is lost is not exact."""
        beside = self._state.beside.state()
        own = {path: _digest(value).hex() for path, value in (beside["values"] | beside["made"]).items()}
        data = json.dumps(own, sort_keys=True).encode()
        gathered = self._group.gathered(
            _tensor(xxhash.xxh3_128_digest(data) + len(data).to_bytes(8, "little"))
        )
        told = [bytes(each.numpy()) for each in gathered]
        apart: list[str] = []
        if len(set(told)) > 1:
            room = max(int.from_bytes(each[_DIGEST_BYTES:], "little") for each in told)
            texts = [bytes(each.numpy()).rstrip() for each in self._group.gathered(_tensor(data.ljust(room)))]
            all_of = [json.loads(text) for text in texts]
            names = {path for each in all_of for path in each}
            apart = sorted(path for path in names if len({each.get(path) for each in all_of}) > 1)
        if new := sorted(set(apart) - set(self._state.apart)):
            events.emit("attributes_apart", version=self._state.version, names=new)
            print(
                f"swift: {', '.join(new[:5])}{', …' if len(new) > 5 else ''}: each replica has a value of its own, "
                "which is lost with its rank, and then the job is not exact; make it the same on all, or say that it "
                "need not last: session.transient('NAME')",
                file=sys.stderr,
            )
        self._state.apart = apart

    def _differs(self, name: str, others: list[int], untold: str) -> None:
        ranks = ", ".join(map(str, others))
        if name in ("parameters", "optimizer"):
            if untold:
                raise UsageError(
                    f"{name} of this rank are not the same as on rank {ranks}, a replica: train_step changes {untold} "
                    "of the script, which a failure has left at another step; give them to session.register(...)"
                )
            if not self._state.updated:
                raise UsageError(
                    f"{name} of this rank are not the same as on rank {ranks}, a replica: train_step changes weights, "
                    "but no optimizer of the session has stepped, and gradients are averaged before one does; pass the "
                    "optimizer that steps to session.optimizer(...)"
                )
            raise ReplicaDiffers(
                f"{name} at version {self._state.version} differ from those of rank {ranks}, a replica"
            )
        if name == HYPERPARAMETERS:
            raise UsageError(
                f"{name} of this rank (its learning rate, say) are not the same as on rank {ranks}, a replica: is what "
                "sets them registered (session.register(scheduler=...))?"
            )
        if name == LEFT:
            raise UsageError(
                f"{name} of this rank are not the same as on rank {ranks}, a replica: what DistributedDataParallel is "
                "to average later, or what is computed behind the update, is each replica's own, and lost with it; "
                "make one step of the session of all that leads to an update"
            )
        raise UsageError(
            f"{name} of this rank is not the same as on rank {ranks}, so these ranks are no replicas: keep it the "
            "same on all (one position for all loaders; no running statistics of each one's own batches: GroupNorm, or "
            "track_running_stats=False), or use strategy='replay'"
        )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _size(told: torch.Tensor) -> int:
    """Of the words that a rank has besides its digests, in bytes."""
    return int.from_bytes(bytes(told[-_SIZE_BYTES:].numpy()), "little")


def _digest(part: Any) -> bytes:
    tensors, rest = split(part)
    state = xxhash.xxh3_128(repr(rest).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(name.encode())
        state.update(byte_view(tensor).data if tensor.numel() else b"")
    return state.digest()

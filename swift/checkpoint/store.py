"""Checkpoints of single ranks: what stands behind the log.

Every rank saves its own state under ``<directory>/v<version>/rank<r>/`` with torch.distributed.checkpoint and
no collective, so a dead rank never blocks the others. The coordinator counts a version as complete when all
ranks have reported theirs durable. The tensors go through DCP, everything else into ``state.json``, which is
written last: its presence says that the shard is whole.

Trust: DCP's own ``.metadata`` file is a pickle that torch reads back, so the checkpoint directory must be
writable by the job alone.
"""

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from swift.checkpoint.state import empty_tensors, join, split
from swift.errors import ServiceError, UsageError

# DCP says so on every save without collectives, which is what is wanted here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint took."""

    tensor_bytes: int
    file_bytes: int
    seconds: float
    """Until it was durable."""
    stall_s: float
    """For which `save` held its caller up."""


class CheckpointStore:
    """One rank's checkpoints.

    (rank, every K steps) ``save`` → (background) DCP writes, then ``on_durable(version)``
    (replacement) ``load(version)``
    (rank) ``prune(keep)`` once newer versions are complete everywhere
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self._directory = Path(directory)
        self._rank = rank
        self._pending: Future[None] | None = None
        self.saved: Saved | None = None
        """The newest one that is durable."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swift-checkpoint")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f".rank{rank}-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"checkpoint directory {directory}: {error.strerror}; name one you can write"
            ) from None

    def save(self, version: int, state: Any, on_durable: Callable[[int], None]) -> None:
        """Takes a snapshot of `state` now and writes it in the background; one write at a time.

        The snapshot is a copy of ours: DCP's staging keeps CPU tensors by reference, and training goes on.
        """
        began = time.monotonic()
        self.wait()
        tensors, skeleton = split(state)
        snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        shard = self._shard(version)
        # An older shard of this version (written before a recovery) must not look whole meanwhile.
        (shard / "state.json").unlink(missing_ok=True)
        shard.mkdir(parents=True, exist_ok=True)
        stall_s = time.monotonic() - began

        def durable() -> None:
            self.saved = Saved(
                tensor_bytes=sum(tensor.nbytes for tensor in snapshot.values()),
                file_bytes=sum(path.stat().st_size for path in shard.rglob("*") if path.is_file()),
                seconds=time.monotonic() - began,
                stall_s=stall_s,
            )
            on_durable(version)

        self._pending = self._writer.submit(self._write, version, shard, snapshot, skeleton, durable)

    def _write(
        self,
        version: int,
        shard: Path,
        snapshot: dict[str, torch.Tensor],
        skeleton: Any,
        on_durable: Callable[[], None],
    ) -> None:
        dcp_save(snapshot, checkpoint_id=str(shard / "tensors"), no_dist=True)
        checksum = _checksum(snapshot)
        _write_durably(
            shard / "state.json", json.dumps({"version": version, "checksum": checksum, "state": skeleton})
        )
        on_durable()

    def wait(self) -> None:
        """Waits for the write that is under way. Raises ServiceError if it failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except (OSError, RuntimeError, CheckpointException) as error:
            cause = (
                next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            )
            raise ServiceError(f"a checkpoint in {self._directory} was not written: {cause}") from error

    def load(self, version: int) -> Any:
        """The state saved as `version`. Raises ServiceError if it is not whole or not what was saved."""
        shard = self._shard(version)
        try:
            saved = json.loads((shard / "state.json").read_text())
            tensors: dict[str, torch.Tensor] = empty_tensors(saved["state"])
            dcp_load(tensors, checkpoint_id=str(shard / "tensors"), no_dist=True)
        except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
            raise ServiceError(f"checkpoint {shard} is not whole: {error}") from None
        if _checksum(tensors) != saved["checksum"]:
            raise ServiceError(f"checkpoint {shard} is corrupt: its checksum does not match")
        return join(saved["state"], tensors)

    def prune(self, keep: set[int]) -> None:
        """Removes this rank's shards of versions below the smallest one in `keep`."""
        if not keep:
            return
        for folder in self._directory.glob("v*"):
            version = int(folder.name[1:]) if folder.name[1:].isdigit() else None
            if version is not None and version < min(keep):
                shutil.rmtree(self._shard(version), ignore_errors=True)
                try:
                    folder.rmdir()
                except OSError:
                    continue  # another rank's shard is still there

    def _shard(self, version: int) -> Path:
        return self._directory / f"v{version:08d}" / f"rank{self._rank}"


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    """DCP keeps none of its own, and a bit that flips in a checkpoint would be trained on."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

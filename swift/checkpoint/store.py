"""Checkpoints of single ranks: what stands behind the log.

Every rank saves its own state under ``<directory>/v<version>/rank<r>/`` with torch.distributed.checkpoint and
no collective, so a dead rank never blocks the others. The coordinator counts a version as complete when all
ranks have reported theirs durable. The tensors go through DCP, everything else into ``state.json``. Both are written
beside that folder, which then gets its name: it is there whole or not at all.

What cannot be written (no space, no folder, no mount) costs no step: the snapshot is kept and written again, with
growing pauses, until that works or a newer version is saved.

Trust: DCP's own ``.metadata`` file is a pickle that torch reads back, so the checkpoint directory must be
writable by the job alone.
"""

import json
import os
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
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

# Pauses between the attempts to write one version.
_RETRY_FIRST_S = 1.0
_RETRY_LAST_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint took."""

    tensor_bytes: int
    file_bytes: int
    seconds: float
    """Until it was durable."""
    stall_s: float
    """For which `save` held its caller up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A version that could not be written yet."""

    version: int
    reason: str


class CheckpointStore:
    """One rank's checkpoints.

    (rank, every K steps) ``save`` → (background) DCP writes, then ``on_durable(version)``
    (rank) ``wait``, where nothing goes on without it; ``settle``, where it may fail
    (replacement) ``load(version)``
    (rank) ``prune(keep, given_up_below)`` when others are complete, or given up
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int):
        self._directory = Path(directory)
        self._rank = rank
        self._own = f".rank{rank}-{secrets.token_hex(4)}"
        """What this process writes, as long as it is not whole: a predecessor may not know yet that it is fenced."""
        self._writing: _Writing | None = None
        self.saved: Saved | None = None
        """The newest one that is durable."""
        self.unsaved: Unsaved | None = None
        """The newest one, if it cannot be written; it is tried again."""
        self.fenced: Callable[[], bool] = lambda: False
        """(any thread) Somebody else holds the rank: what could not be written is his to write."""

    def check(self) -> None:
        """(before the job begins) Raises UsageError if nothing can be written here."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"{self._own}.probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"checkpoint directory {self._directory}: {error.strerror}; name one you can write"
            ) from None

    def save(
        self,
        version: int,
        state: Any,
        on_durable: Callable[[int], None],
        on_failed: Callable[[Unsaved], None] = lambda _unsaved: None,
    ) -> None:
        """Takes a snapshot of `state` now and writes it in the background; one write at a time. What was saved before
        and could not be written is given up. `on_failed` is told once for every reason.

        The snapshot is a copy of ours: DCP's staging keeps CPU tensors by reference, and training goes on.
        """
        began = time.monotonic()
        self._call_off()
        tensors, skeleton = split(state)
        snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        stall_s = time.monotonic() - began

        def attempt() -> None:
            began = time.monotonic()
            file_bytes = self._write(version, snapshot, skeleton)
            self.saved = Saved(
                tensor_bytes=sum(tensor.nbytes for tensor in snapshot.values()),
                file_bytes=file_bytes,
                seconds=stall_s + time.monotonic() - began,
                stall_s=stall_s,
            )
            self.unsaved = None

        def failed(reason: str) -> None:
            told, self.unsaved = self.unsaved, Unsaved(version=version, reason=reason)
            if self.unsaved != told:
                on_failed(self.unsaved)

        self._writing = _Writing(attempt, lambda: on_durable(version), failed, self.fenced)

    def _write(self, version: int, snapshot: dict[str, torch.Tensor], skeleton: Any) -> int:
        """The bytes of its files."""
        shard = self._shard(version)
        part, older = shard.with_name(self._own), shard.with_name(f"{self._own}-old")
        try:
            part.mkdir(parents=True, exist_ok=True)
            _remove(other for other in self._left_over(shard.parent) if other != part)
            dcp_save(snapshot, checkpoint_id=str(part / "tensors"), no_dist=True)
            checksum = _checksum(snapshot)
            _write_durably(
                part / "state.json", json.dumps({"version": version, "checksum": checksum, "state": skeleton})
            )
            file_bytes = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
            if shard.is_dir():  # of this version, written before a recovery
                shard.rename(older)
            part.rename(shard)
            _sync_folder(shard.parent)
            _sync_folder(self._directory)
        except BaseException:
            _remove([part])
            with suppress(OSError):
                older.rename(shard)
            raise
        _remove([older])
        return file_bytes

    def settle(self) -> None:
        """Waits until what was saved last was tried once, however that ended."""
        if self._writing is not None:
            self._writing.tried.wait()

    def wait(self) -> None:
        """Waits until what was saved last is durable. Raises ServiceError if it cannot be written; it is not tried
        again then."""
        self.settle()
        writing = self._writing
        if writing is not None and writing.reason:
            self._call_off()
            if writing.reason:
                raise ServiceError(f"a checkpoint in {self._directory} was not written: {writing.reason}")

    def close(self) -> None:
        """Waits for the attempt that is under way; none follows."""
        self._call_off()

    def _call_off(self) -> None:
        if self._writing is not None:
            self._writing.end()
            self._writing = None

    def load(self, version: int) -> Any:
        """The state saved as `version`. Raises ServiceError if it is not whole or not what was saved. What could not be
        written before is given up."""
        self._call_off()
        self.unsaved = None
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

    def prune(self, keep: set[int], given_up_below: int = 0) -> None:
        """Removes this rank's shards of versions below the smallest one in `keep`, and of all those below
        `given_up_below` that are not in it: they will never be complete."""
        if not keep:
            return
        below = max(min(keep), given_up_below)
        for folder in self._versions():
            version = int(folder.name[1:])
            if version < below and version not in keep:
                _remove([self._shard(version), *self._left_over(folder)])
                with suppress(OSError):  # another rank's shard is still there
                    folder.rmdir()

    def _versions(self) -> list[Path]:
        try:
            return [path for path in self._directory.glob("v*") if path.name[1:].isdigit() and path.is_dir()]
        except OSError:
            return []  # it is not there at the moment

    def _left_over(self, folder: Path) -> list[Path]:
        """What this rank's processes have begun to write there, and not ended."""
        return list(folder.glob(f".rank{self._rank}-*"))

    def _shard(self, version: int) -> Path:
        return self._directory / f"v{version:08d}" / f"rank{self._rank}"


class _Writing:
    """One version on its way to the disk, in a thread of its own: tried until it is written, or called off."""

    def __init__(
        self,
        attempt: Callable[[], None],
        written: Callable[[], None],
        failed: Callable[[str], None],
        fenced: Callable[[], bool],
    ) -> None:
        self._attempt, self._written, self._failed = attempt, written, failed
        self._fenced = fenced
        self._called_off = threading.Event()
        self.tried = threading.Event()
        """Once at least."""
        self.reason = ""
        """Why it could not be written yet."""
        self._thread = threading.Thread(target=self._run, name="swift-checkpoint")
        self._thread.start()

    def end(self) -> None:
        self._called_off.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _RETRY_FIRST_S
        while not self._once():
            if not self._pause(pause_s):
                return
            pause_s = min(2 * pause_s, _RETRY_LAST_S)

    def _once(self) -> bool:
        try:
            self._attempt()
            self.reason = ""
        except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever it is: training is well)
            self.reason = _words(error)
            self._failed(self.reason)
            return False
        finally:
            if self.reason:
                self.tried.set()
        try:
            self._written()
        finally:
            self.tried.set()
        return True

    def _pause(self, seconds: float) -> bool:
        """False: nobody wants it any more, or the process ends."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._called_off.wait(min(left_s, 1.0)) or not threading.main_thread().is_alive():
                return False
        return not self._fenced()


def _words(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # torch's file writer, which is interrupted by the disk's error, has a complaint of its own.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    error = cause or error
    return " ".join(str(error).split())[:300] or type(error).__name__


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


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
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Checkpoints of single ranks, the recovery source when the log does not reach far enough.

Every rank saves its own state under ``<directory>/v<version>/rank<r>/g<generation>-<process>-<number>/`` without
coordination, so a dead rank never blocks the others. The coordinator counts a version as complete when all ranks have
reported theirs durable. `swift_ft.state.checkpoint_file` defines the folder's files. The folder is written under a
temporary name and then renamed, so it is there whole or not at all.

A process that is fenced and has not noticed may still write here. The name of its folder has the generation in which it
acted, which is older than its replacement's. So the names differ, the older folder is not the one that is loaded, and
a process writes or removes only folders of its own generation or of an older one.

A failed write (no space, no folder, no mount) costs no step. The snapshot is kept and the write is retried, with
growing pauses, until it succeeds or a newer version is saved.
"""

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import make_directory, sync_directory
from swift_ft.state.checkpoint_file import Damaged, Snapshot, read_shard, write_shard
from swift_ft.text import generation_of, version_folder, version_of

# Pauses between the attempts to write one version.
_RETRY_FIRST_S = 1.0
_RETRY_LAST_S = 30.0
# How long the report that a version is durable is repeated while it is not acknowledged; and the pauses.
_TOLD_S = 60.0
_TELL_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    tensor_bytes: int
    file_bytes: int
    seconds: float
    """Seconds until it was durable."""
    stall_s: float
    """Seconds for which `save` blocked its caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A version that could not be written yet."""

    version: int
    reason: str


class Holder(Protocol):
    """The process that holds the rank. (any thread)"""

    @property
    def fenced(self) -> bool:
        """Returns whether another process holds the rank. That process then saves the versions that are missing."""

    @property
    def entered(self) -> int:
        """Returns the generation in which this process acts. Files of a newer one are its replacement's."""


class _Past:
    """A holder's state that outlives its stores: a session that is created again has a new store."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Process names in the folders that these stores save."""
        self.begun = False
        """True once the versions of an earlier job have been set aside."""


_PASTS: "WeakKeyDictionary[Holder, _Past]" = WeakKeyDictionary()


class CheckpointStore:
    """The checkpoints of one rank.

    (rank, every K steps) ``save`` → (background) the files are written, then ``on_durable(version)``
    (rank) ``wait``, where it cannot continue without the checkpoint; ``wait_saved``, where the write may fail
    (replacement) ``load(version)``
    (rank) ``prune(keep, given_up_below)`` when other versions are complete or given up
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        holder: Holder,
        twins: Sequence[int] = (),
        half_written: Callable[[int], None] = lambda _version: None,
    ) -> None:
        """`twins`: ranks with the same state; a version that this rank lacks is read from theirs.
        `half_written(version)`: called once the version's tensors are written, before the rest of it."""
        self._twins = twins
        self._half_written = half_written
        self._directory = Path(directory)
        self._rank = rank
        self._process = secrets.token_hex(4)
        self._past = _PASTS.setdefault(holder, _Past())
        self._past.names.add(self._process)
        self._written = 0
        self._writing: _Writing | None = None
        self.saved: Saved | None = None
        """The newest durable version."""
        self.unsaved: Unsaved | None = None
        """The newest version, if its write failed; it is retried."""
        self._holder = holder

    @property
    def directory(self) -> Path:
        return self._directory

    def of_job(self, job: str) -> "CheckpointStore":
        """Returns this rank's checkpoints of another job in the same place, to load from."""
        return CheckpointStore(self._directory.with_name(job), self._rank, self._holder, self._twins)

    def check(self) -> None:
        """(before the job begins) Raises UsageError if the directory is not writable."""
        try:
            self._make(self._directory)
            probe = self._directory / f".rank{self._rank}-{self._process}.probe"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"checkpoint directory {self._directory}: {error.strerror}; name one you can write"
            ) from None

    def save(
        self,
        version: int,
        state: Any,
        on_durable: Callable[[int], bool | None],
        on_failed: Callable[[Unsaved], None],
        generation: int | None = None,
        *,
        sync: bool = False,
        late: Container[int] = (),
    ) -> None:
        """Takes a snapshot of `state` now and writes it in the background, one write at a time. An earlier version that
        is not written, or not reported, is given up. `on_durable` returns False if its report was not acknowledged: it
        is repeated for a while. `on_failed` is called once per reason. `generation`: the state's; None: this process's
        current one. With `sync`, returns once the state is durable or the first attempt has failed. `late`: as for
        `Snapshot`. Raises UsageError if the state contains a value that cannot be saved."""
        began = time.monotonic()
        self._call_off()
        snapshot = Snapshot(state, late=late)
        stall_s = time.monotonic() - began
        of = self._holder.entered if generation is None else generation

        def attempt() -> None:
            began = time.monotonic()
            file_bytes = self._write(version, of, snapshot)
            seconds = stall_s + time.monotonic() - began
            self.saved = Saved(
                tensor_bytes=snapshot.nbytes,
                file_bytes=file_bytes,
                seconds=seconds,
                stall_s=seconds if sync else stall_s,
            )
            self.unsaved = None

        def failed(reason: str) -> None:
            told, self.unsaved = self.unsaved, Unsaved(version=version, reason=reason)
            if self.unsaved != told:
                on_failed(self.unsaved)

        self._writing = _Writing(attempt, lambda: on_durable(version), failed, self._holder)
        if sync:
            self._writing.attempted.wait()

    def _write(self, version: int, generation: int, snapshot: Snapshot) -> int:
        """Writes the version durably. Returns its files' bytes."""
        self._written += 1
        folder = self._folder(version)
        shard = folder / f"g{generation}-{self._process}-{self._written}"
        part = shard.with_name(f".{shard.name}")
        if _is_linked(folder):
            raise ServiceError(f"{folder} is a link; nothing is written through it")
        try:
            self._make(folder)
            _remove(self._shards(folder, generation - 1, begun=True))
            part.mkdir(mode=0o700)
            file_bytes = write_shard(part, snapshot, version, self._rank, lambda: self._half_written(version))
            if self._holder.fenced:
                raise _FencedMeanwhile
            part.rename(shard)
            sync_directory(folder)
        except BaseException:
            _remove([part, shard])
            with suppress(OSError):  # there is something else of this version
                folder.rmdir()
            raise
        # Folders of this version that were written before a recovery.
        _remove(other for other in self._shards(folder, generation) if other != shard)
        return file_bytes

    def _make(self, folder: Path) -> None:
        """Creates the folder and its missing parents, durably."""
        for path in make_directory(folder):
            sync_directory(path.parent)

    def wait_saved(self) -> None:
        """Waits until the last save has been attempted once, successfully or not."""
        if self._writing is not None:
            self._writing.tried.wait()

    def wait(self) -> None:
        """Waits until the last save is durable. Raises ServiceError if the write has failed; it is then not retried."""
        self.wait_saved()
        writing = self._writing
        if writing is not None and writing.reason:
            self._call_off()
            if writing.reason:
                raise ServiceError(f"a checkpoint in {self._directory} was not written: {writing.reason}")

    def close(self) -> None:
        """Waits for the attempt in progress and prevents further ones."""
        self._call_off()

    def _call_off(self) -> None:
        if self._writing is not None:
            self._writing.end()
            self._writing = None

    def load(self, version: int) -> Any:
        """Returns the state saved as `version`. Raises ServiceError if it is incomplete or corrupt. A pending write is
        given up."""
        self._call_off()
        self.unsaved = None
        folder, rank = self._folder(version), self._rank
        newest = self._newest(folder)
        for twin in self._twins:
            theirs = self._newest(self._folder(version, twin))
            # A rank that was absent for a while may have a version from a history that was given up.
            if theirs is not None and (newest is None or _newer(theirs, newest)):
                newest, rank = theirs, twin
        if newest is None:
            if (folder / "state.json").exists():
                raise ServiceError(
                    f"checkpoint {folder} was written by an older swift-ft, in a format that could run code: "
                    "nothing of it is read; go on with that version, or begin under another job name"
                )
            raise ServiceError(f"checkpoint {folder} is not whole: there is nothing in it")
        try:
            return read_shard(newest, version, rank)
        except OSError as error:
            raise ServiceError(f"checkpoint {newest} is not whole: {error.strerror or error}") from None
        except Damaged as error:
            raise ServiceError(f"checkpoint {newest} is corrupt: {error}") from None
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory is exhausted
            raise ServiceError(f"checkpoint {newest} cannot be loaded: {_words(error)}") from None

    def _newest(self, folder: Path) -> Path | None:
        """Returns the newest complete shard in the folder, None if there is none. Raises ServiceError."""
        try:
            if _is_linked(folder):
                raise ServiceError(f"checkpoint {folder} is a link; nothing is read through it")
            shards = [path for path in self._shards(folder) if path.is_dir()]
            return max(
                shards, key=lambda path: (generation_of(path.name), path.stat().st_mtime_ns), default=None
            )
        except OSError as error:
            raise ServiceError(f"checkpoint {folder} cannot be read: {error.strerror}") from None

    def newest_first(self) -> Iterator[Any]:
        """Yields the states that can be loaded, the newest first."""
        for version in reversed(self.versions()):
            with suppress(ServiceError):
                yield self.load(version)

    def versions(self) -> list[int]:
        """Returns the versions of which any rank has saved a shard, ascending."""
        try:
            found = [version_of(path.name) for path in self._directory.iterdir() if path.is_dir()]
        except OSError:
            return []  # the directory is not there at the moment
        return sorted(version for version in found if version is not None)

    def set_aside(self, check_held: Callable[[], None]) -> None:
        """(a job begins) Sets an earlier job's checkpoints in this directory aside: they are kept and never loaded.
        (it begins again, in a newer generation) Removes what this process saved in older generations.

        `check_held` asks whether this process still holds its rank, and raises if it does not: a process that held
        the rank in between may have saved a version."""
        if self._past.begun:
            self._call_off()  # the previous generation's write
            for version in self.versions():
                _remove(self._own_older(self._folder(version)))
            return
        found = {folder: self._inside(folder) for folder in map(self._folder, self.versions())}
        if any(found.values()):
            check_held()  # so the folders found are no replacement's: no other process has held the rank since
        aside = sum(self._moved(folder, entries) for folder, entries in found.items())
        self._past.begun = True
        if aside:
            with suppress(OSError, ValueError):
                print(
                    f"swift: rank {self._rank} finds {aside} checkpoints of an earlier job in {self._directory}; they "
                    "are kept as .former-*, and not used: remove them when you do not need them",
                    file=sys.stderr,
                )

    def _moved(self, folder: Path, entries: Sequence[Path]) -> bool:
        """Moves exactly these entries aside and leaves any newer ones. Returns whether any were moved."""
        former = folder.with_name(f".former-{secrets.token_hex(4)}-{folder.name}")
        if not entries or self._holder.fenced:
            return False
        with suppress(OSError):
            if folder.is_symlink():
                folder.rename(former)
                return True
            former.mkdir(mode=0o700)
        for path in entries:
            with suppress(OSError):
                path.rename(former / path.name)
        for emptied in (folder, former):
            with suppress(OSError):
                emptied.rmdir()
        return former.is_dir()

    def _own_older(self, folder: Path) -> Iterator[Path]:
        """Yields the shards, complete or not, that this process saved in the folder in older generations."""
        if _is_linked(folder):
            return
        older = self._holder.entered - 1
        for path in (*self._shards(folder, older), *self._shards(folder, older, begun=True)):
            if path.name.split("-")[1] in self._past.names:
                yield path

    def prune(self, keep: set[int], given_up_below: int = 0) -> None:
        """Removes this rank's shards of versions below the smallest one in `keep`. Also removes all versions below
        `given_up_below` that are not in `keep`: they will never be complete. Shards of a newer generation stay."""
        if not keep or self._holder.fenced:
            return
        below, generation = max(min(keep), given_up_below), self._holder.entered
        for version in self.versions():
            folder = self._folder(version)
            if version < below and version not in keep and not _is_linked(folder):
                _remove([*self._shards(folder, generation), *self._shards(folder, generation, begun=True)])
                with suppress(OSError):  # a replacement's shard is there, or another rank's
                    folder.rmdir()
                with suppress(OSError):
                    folder.parent.rmdir()

    def _shards(self, folder: Path, up_to: int | None = None, *, begun: bool = False) -> Iterator[Path]:
        """Yields the folder's shards of generations `up_to` (None: all). With `begun`, the incomplete ones instead."""
        for path in list(folder.glob(".g*" if begun else "g*")):
            generation = generation_of(path.name)
            if generation is not None and (up_to is None or generation <= up_to):
                yield path

    def _inside(self, folder: Path) -> list[Path]:
        """Returns the folder's shards, incomplete ones included; or the folder itself if it is a link."""
        if folder.is_symlink():
            return [folder]
        return [*self._shards(folder), *self._shards(folder, begun=True)]

    def _folder(self, version: int, rank: int | None = None) -> Path:
        return self._directory / version_folder(version) / f"rank{self._rank if rank is None else rank}"


def _is_linked(folder: Path) -> bool:
    """Returns whether a rank's folder of a version, or the version's folder, is a link."""
    return folder.is_symlink() or folder.parent.is_symlink()


def _newer(shard: Path, than: Path) -> bool:
    return (generation_of(shard.name) or 0) > (generation_of(than.name) or 0)


class _FencedMeanwhile(Exception):
    """Another process holds the rank."""


class _Writing:
    """One version's write, in a thread of its own: retried until it succeeds or is called off."""

    def __init__(
        self,
        attempt: Callable[[], None],
        written: Callable[[], bool | None],
        failed: Callable[[str], None],
        holder: Holder,
    ) -> None:
        self._attempt, self._written, self._failed = attempt, written, failed
        self._holder = holder
        self._called_off = threading.Event()
        self.attempted = threading.Event()
        """Set after the first attempt: the version is durable, or there is a reason why not."""
        self.tried = threading.Event()
        """Set after the first attempt; if it was durable, only once that has been reported."""
        self.reason = ""
        """Error of the last attempt; "" if none."""
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
        except _FencedMeanwhile:
            self.reason = "this process does not hold its rank any more"
            return False
        except Exception as error:  # noqa: BLE001  (no failed write may end the training)
            self.reason = _words(error)
            self._failed(self.reason)
            return False
        finally:
            self.attempted.set()
            if self.reason:
                self.tried.set()
        try:
            until = time.monotonic() + _TOLD_S
            while self._written() is False and time.monotonic() < until and self._pause(_TELL_AGAIN_S):
                pass
        finally:
            self.tried.set()
        return True

    def _pause(self, seconds: float) -> bool:
        """Waits. Returns False if the write was called off, the process ends, or the rank is fenced."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._called_off.wait(min(left_s, 1.0)) or not threading.main_thread().is_alive():
                return False
        return not self._holder.fenced


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)

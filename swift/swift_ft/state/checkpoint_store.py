"""Checkpoints of single ranks: what stands behind the log.

Every rank saves its own state under ``<directory>/v<version>/rank<r>/g<generation>-<process>-<number>/`` and asks
nobody, so a dead rank never blocks the others. The coordinator counts a version as complete when all ranks have
reported theirs durable. What is in that folder: `swift_ft.state.checkpoint_file`. It is written beside it, and then
gets its name: it is there whole or not at all.

A process that was fenced and does not know it yet may still write here. Its folder has the generation that it acted in,
which is older than its heir's: so it has another name, it is not the one that is loaded, and whoever writes or
removes touches only what is of his own generation or of an older one.

What cannot be written (no space, no folder, no mount) costs no step: the snapshot is kept and written again, with
growing pauses, until that works or a newer version is saved.
"""

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import make_directory
from swift_ft.state.checkpoint_file import Damaged, Snapshot, read_shard, sync_folder, write_shard
from swift_ft.text import generation_of, version_folder, version_of

# Pauses between the attempts to write one version.
_RETRY_FIRST_S = 1.0
_RETRY_LAST_S = 30.0
# How long it is told that a version is durable, where nobody hears it; and the pauses.
_TOLD_S = 60.0
_TELL_AGAIN_S = 0.1


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


class Holder(Protocol):
    """This process, as the one that holds the rank. (any thread)"""

    @property
    def fenced(self) -> bool:
        """Somebody else holds it: what could not be written is his to write."""

    @property
    def entered(self) -> int:
        """The generation in which this process acts. What is of a newer one is its heir's."""


class _Past:
    """What a holder has done with its stores: a session that is made again has another one."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """By which they save."""
        self.begun = False
        """What was there before is set aside."""


_PASTS: "WeakKeyDictionary[Holder, _Past]" = WeakKeyDictionary()


class CheckpointStore:
    """One rank's checkpoints.

    (rank, every K steps) ``save`` → (background) the files are written, then ``on_durable(version)``
    (rank) ``wait``, where nothing goes on without it; ``wait_saved``, where it may fail
    (replacement) ``load(version)``
    (rank) ``prune(keep, given_up_below)`` when others are complete, or given up
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        holder: Holder,
        twins: Sequence[int] = (),
        half_written: Callable[[int], None] = lambda _version: None,
    ) -> None:
        """`twins`: ranks with the same state. What this rank lacks of a version is read from theirs.
        `half_written(version)`: called when the tensors of a version are written, and nothing else of it."""
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
        """The newest one that is durable."""
        self.unsaved: Unsaved | None = None
        """The newest one, if it cannot be written; it is tried again."""
        self._holder = holder

    @property
    def directory(self) -> Path:
        """The job's own."""
        return self._directory

    def of_job(self, job: str) -> "CheckpointStore":
        """This rank's checkpoints of another job in the same place, to load from."""
        return CheckpointStore(self._directory.with_name(job), self._rank, self._holder, self._twins)

    def check(self) -> None:
        """(before the job begins) Raises UsageError if nothing can be written here."""
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
    ) -> None:
        """Takes a snapshot of `state` now and writes it in the background; one write at a time. What was saved before
        and could not be written, or not be told, is given up. `on_durable` gives False if nobody has heard it: it is
        told again for a while. `on_failed` is told once for every reason. `generation`: whose state it is. `sync`:
        returns when it is durable, or cannot be written for now. Raises UsageError: the state holds what cannot be
        saved."""
        began = time.monotonic()
        self._call_off()
        snapshot = Snapshot(state)
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
        """The bytes of its files."""
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
            sync_folder(folder)
        except BaseException:
            _remove([part, shard])
            with suppress(OSError):  # there is something else of this version
                folder.rmdir()
            raise
        # Of this version, written before a recovery.
        _remove(other for other in self._shards(folder, generation) if other != shard)
        return file_bytes

    def _make(self, folder: Path) -> None:
        """With all that is above it, durably."""
        for path in make_directory(folder):
            sync_folder(path.parent)

    def wait_saved(self) -> None:
        """Waits until what was saved last was tried once, however that ended."""
        if self._writing is not None:
            self._writing.tried.wait()

    def wait(self) -> None:
        """Waits until what was saved last is durable. Raises ServiceError if it cannot be written; it is not tried
        again then."""
        self.wait_saved()
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
        folder, rank = self._folder(version), self._rank
        newest = self._newest(folder)
        for twin in self._twins:
            theirs = self._newest(self._folder(version, twin))
            # Where this rank was not there for a while, its own may be of a history that was given up.
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
        except (MemoryError, RuntimeError) as error:  # torch's word for no memory
            raise ServiceError(f"checkpoint {newest} cannot be loaded: {_words(error)}") from None

    def _newest(self, folder: Path) -> Path | None:
        """The newest whole shard in it; None: there is none. Raises ServiceError."""
        try:
            if _is_linked(folder):
                raise ServiceError(f"checkpoint {folder} is a link; nothing is read through it")
            shards = [path for path in self._shards(folder) if path.is_dir()]
            return max(
                shards, key=lambda path: (generation_of(path.name), path.stat().st_mtime_ns), default=None
            )
        except OSError as error:
            raise ServiceError(f"checkpoint {folder} cannot be read: {error.strerror}") from None

    def versions(self) -> list[int]:
        """Those of which some rank has saved something."""
        try:
            found = [version_of(path.name) for path in self._directory.iterdir() if path.is_dir()]
        except OSError:
            return []  # it is not there at the moment
        return sorted(version for version in found if version is not None)

    def set_aside(self, check_held: Callable[[], None]) -> None:
        """(a job begins) What is here under its name is of an earlier job: it is kept, and nobody takes it for ours.
        (it begins again, in a newer generation) What this process has saved before is removed.

        `check_held` asks whether this process still holds its rank, and raises if it does not: whoever held it in its
        place may have saved something by now."""
        if self._past.begun:
            self._call_off()  # of the generation before
            for version in self.versions():
                _remove(self._own_older(self._folder(version)))
            return
        found = {folder: self._inside(folder) for folder in map(self._folder, self.versions())}
        if any(found.values()):
            check_held()  # so what was found is no heir's: nobody has had the rank since
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
        """These are set aside, and nothing that has come beside them."""
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
        """What this process has saved there in older generations, or begun to."""
        if _is_linked(folder):
            return
        older = self._holder.entered - 1
        for path in (*self._shards(folder, older), *self._shards(folder, older, begun=True)):
            if path.name.split("-")[1] in self._past.names:
                yield path

    def prune(self, keep: set[int], given_up_below: int = 0) -> None:
        """Removes this rank's shards of versions below the smallest one in `keep`, and of all those below
        `given_up_below` that are not in it: they will never be complete. Shards of a newer generation stay."""
        if not keep or self._holder.fenced:
            return
        below, generation = max(min(keep), given_up_below), self._holder.entered
        for version in self.versions():
            folder = self._folder(version)
            if version < below and version not in keep and not _is_linked(folder):
                _remove([*self._shards(folder, generation), *self._shards(folder, generation, begun=True)])
                with suppress(OSError):  # an heir's shard is there, or another rank's
                    folder.rmdir()
                with suppress(OSError):
                    folder.parent.rmdir()

    def _shards(self, folder: Path, up_to: int | None = None, *, begun: bool = False) -> Iterator[Path]:
        """Those there, of generations `up_to`: whole ones, or what was begun and not ended."""
        for path in list(folder.glob(".g*" if begun else "g*")):
            generation = generation_of(path.name)
            if generation is not None and (up_to is None or generation <= up_to):
                yield path

    def _inside(self, folder: Path) -> list[Path]:
        """What was saved in it, also what was not ended; or the folder if it is elsewhere."""
        if folder.is_symlink():
            return [folder]
        return [*self._shards(folder), *self._shards(folder, begun=True)]

    def _folder(self, version: int, rank: int | None = None) -> Path:
        """Of this rank, or of another one."""
        return self._directory / version_folder(version) / f"rank{self._rank if rank is None else rank}"


def _is_linked(folder: Path) -> bool:
    """Whether a rank's folder of a version, or the version's, is elsewhere."""
    return folder.is_symlink() or folder.parent.is_symlink()


def _newer(shard: Path, than: Path) -> bool:
    """It was saved in a newer generation."""
    return (generation_of(shard.name) or 0) > (generation_of(than.name) or 0)


class _FencedMeanwhile(Exception):
    """Somebody else holds the rank."""


class _Writing:
    """One version on its way to the disk, in a thread of its own: tried until it is written, or called off."""

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
        """Once at least: it is durable, or there is a reason."""
        self.tried = threading.Event()
        """And it was told, if it is durable."""
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
        except _FencedMeanwhile:
            self.reason = "this process does not hold its rank any more"
            return False
        except Exception as error:  # noqa: BLE001  (whatever it is: training is well)
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
        """False: nobody wants it any more, or the process ends."""
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

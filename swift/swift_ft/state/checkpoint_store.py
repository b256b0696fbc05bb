"""Checkpoints of single ranks, the recovery source when the log does not reach far enough.

Every rank saves its own state without coordination, so a dead rank never blocks the others. The coordinator counts a
version as complete when all ranks have reported theirs durable. `swift_ft.state.checkpoint_file` defines a shard's two
files, `swift_ft.state.checkpoint_place` where they are: in a directory or an object store. A shard is there whole or
not at all.

A process that is fenced and has not noticed may still write here. The name of its shard has the generation in which it
acted, which is older than its replacement's. So the names differ, the older shard is not the one that is loaded, and a
process writes or removes only shards of its own generation or of an older one.

A failed write (no space, no folder, no answer of a store) costs no step. The snapshot is kept and the write is retried,
with growing pauses, until it succeeds or a newer version is saved.
"""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from swift_ft import events
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.checkpoint_file import Damaged, Snapshot, read_shard, write_shard
from swift_ft.state.checkpoint_place import Place, Shard, place_at, shard_folder

# Pauses between the attempts to write one version.
_RETRY_FIRST_S = 1.0
_RETRY_LAST_S = 30.0
# How long the report that a version is durable is repeated while it is not acknowledged; and the pauses.
_TOLD_S = 60.0
_TELL_AGAIN_S = 0.1
_LOOK_S = 0.1


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
        place: Place | str | os.PathLike[str],
        rank: int,
        holder: Holder,
        twins: Sequence[int] = (),
        half_written: Callable[[int], None] = lambda _version: None,
    ) -> None:
        """`place`: also a directory, or the URL of an object store. `twins`: ranks with the same state; a version that
        this rank lacks is read from theirs. `half_written(version)`: called once the version's tensors are written,
        before the rest of it. Raises UsageError for a URL that cannot be used."""
        self._twins = twins
        self._half_written = half_written
        self._place = place_at(place) if isinstance(place, str | os.PathLike) else place
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
    def where(self) -> str:
        return self._place.where

    def is_there(self) -> bool:
        """Returns whether anything was ever saved. Raises OSError."""
        return self._place.is_there()

    def of_job(self, job: str) -> "CheckpointStore":
        """Returns this rank's checkpoints of another job in the same place, to load from."""
        return CheckpointStore(self._place.of_job(job), self._rank, self._holder, self._twins)

    def at(self, place: Place) -> "CheckpointStore":
        """Returns this rank's checkpoints in an older place of the job, to load from."""
        return CheckpointStore(place, self._rank, self._holder, self._twins)

    @property
    def place(self) -> Place:
        return self._place

    def check(self) -> None:
        """(before the job begins) Raises UsageError if nothing can be written there."""
        try:
            self._place.check(f".rank{self._rank}-{self._process}.probe")
        except OSError as error:
            raise UsageError(
                f"checkpoint directory {self.where}: {error.strerror}; name one you can write"
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

        self._writing = _Writing(
            attempt, lambda: on_durable(version), failed, self._holder, self._place.end_stuck_write
        )
        if sync:
            self._writing.attempted.wait()

    def _write(self, version: int, generation: int, snapshot: Snapshot) -> int:
        self._written += 1
        place, rank = self._place.for_write(), self._rank
        name = f"g{generation}-{self._process}-{self._written}"
        begun = [shard for shard in place.shards(version, rank) if not shard.whole]
        place.remove(_up_to(generation - 1, begun))
        with place.new(version, rank, name) as create:
            file_bytes = write_shard(create, snapshot, version, rank, lambda: self._half_written(version))
            if self._holder.fenced:
                raise _FencedMeanwhile
        # Shards of this version that were written before a recovery.
        others = [shard for shard in place.shards(version, rank) if shard.whole and shard.name != name]
        place.remove(_up_to(generation, others))
        return file_bytes

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
                raise ServiceError(f"a checkpoint in {self.where} was not written: {writing.reason}")

    def close(self) -> None:
        """Waits for the attempt in progress and prevents further ones."""
        self._call_off()
        self._place.close()

    def _call_off(self) -> None:
        if self._writing is not None:
            self._writing.end()
            self._writing = None

    def load(self, version: int) -> Any:
        """Returns the state saved as `version`. Raises ServiceError if it is incomplete or corrupt. A pending write is
        given up."""
        self._call_off()
        self.unsaved = None
        newest = self._newest(version, self._rank)
        for twin in self._twins:
            theirs = self._newest(version, twin)
            # A rank that was absent for a while may have a version from a history that was given up.
            if theirs is not None and (newest is None or theirs.generation > newest.generation):
                newest = theirs
        if newest is None:
            raise ServiceError(
                f"checkpoint {self.where}/{shard_folder(version, self._rank)} is not whole: there is nothing in it"
            )
        try:
            return read_shard(partial(self._place.open, newest), version, newest.rank)
        except OSError as error:
            raise ServiceError(f"checkpoint {newest.where} is not whole: {error.strerror or error}") from None
        except Damaged as error:
            raise ServiceError(f"checkpoint {newest.where} is corrupt: {error}") from None
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory is exhausted
            raise ServiceError(f"checkpoint {newest.where} cannot be loaded: {_words(error)}") from None

    def _newest(self, version: int, rank: int) -> Shard | None:
        """Returns the newest complete shard, None if there is none. Raises ServiceError."""
        try:
            return self._place.newest(version, rank)
        except OSError as error:
            raise ServiceError(
                f"checkpoint {self.where}/{shard_folder(version, rank)} cannot be read: {error.strerror}"
            ) from None

    def newest_first(self) -> Iterator[Any]:
        """Yields the states that can be loaded, the newest first."""
        for version in reversed(self.versions()):
            with suppress(ServiceError):
                yield self.load(version)

    def versions(self) -> list[int]:
        return self._place.versions()

    def ranks(self) -> set[int]:
        """Returns the ranks that have saved a shard. Raises OSError."""
        return self._place.ranks()

    def set_aside(self, check_held: Callable[[], None], above: int = -1) -> None:
        """(a job begins) Sets an earlier job's checkpoints in this directory aside: they are kept and never loaded.
        (it begins again, in a newer generation) Removes what this process saved in older generations.

        `above`: the version that the job has adopted; it and older ones stay. `check_held` asks whether this process
        still holds its rank, and raises if it does not: a process that held the rank in between may have saved a
        version. Raises ServiceError if the place cannot be read."""
        if self._past.begun:
            self._call_off()  # the previous generation's write
            for version in self.versions():
                if version > above:  # an adopted one stays until `save` has written it again
                    self._place.remove(self._own_older(version))
            return
        try:
            aside = self._set_aside(check_held, above)
        except OSError as error:
            raise ServiceError(f"checkpoints in {self.where} cannot be read: {error.strerror}") from None
        self._past.begun = True
        if aside:
            with suppress(OSError, ValueError):
                print(
                    f"swift: rank {self._rank} finds {aside} checkpoints of an earlier job in {self.where}; they "
                    f"are kept as {self._place.aside}, and not used: remove them when you do not need them",
                    file=sys.stderr,
                )

    def _set_aside(self, check_held: Callable[[], None], above: int) -> int:
        versions = [version for version in self.versions() if version > above]
        for version in versions:
            self._place.unmark(version)
        found = {version: self._place.entries(version, self._rank) for version in versions}
        if any(found.values()):
            check_held()  # so what was found is no replacement's: no other process has held the rank since
        aside = 0
        for version, entries in found.items():
            if entries and not self._holder.fenced:
                aside += self._place.set_aside(version, self._rank, entries)
        return aside

    def _own_older(self, version: int) -> Iterator[Shard]:
        """Yields the shards, complete or not, that this process saved in older generations."""
        for shard in self._place.shards(version, self._rank):
            if shard.generation < self._holder.entered and shard.name.split("-")[1] in self._past.names:
                yield shard

    def unmark(self, above: int) -> None:
        """(every rank, before all restore version `above`) Newer versions do not count as complete any more. Raises
        ServiceError if the place cannot be written."""
        self._place.end_background()  # a mark that is under way would come back
        try:
            self._place.is_there()  # raises if the store does not answer; `versions` would be empty
            for version in self.versions():
                if version > above and not self._holder.fenced:
                    self._place.unmark(version)
        except OSError as error:
            raise ServiceError(f"checkpoints in {self.where} cannot be changed: {error.strerror}") from None

    def prune(
        self, keep: set[int], given_up_below: int = 0, marks: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """Removes this rank's shards of versions below the smallest one in `keep`. Also removes all versions below
        `given_up_below` that are not in `keep`: they will never be complete. Shards of a newer generation stay.
        `marks`: version -> the mark of a complete one, which is written first."""
        if keep and not self._holder.fenced:
            below, generation = max(min(keep), given_up_below), self._holder.entered
            self._place.in_background(lambda: self._prune(below, keep, generation, marks))

    def _prune(self, below: int, keep: set[int], generation: int, marks: Mapping[int, bytes]) -> None:
        place, rank = self._place, self._rank
        for version, mark in marks.items():
            try:
                place.mark(version, mark)
            except OSError as error:  # without it, only a job whose coordinator is lost cannot go on there
                events.emit("checkpoint_unmarked", rank=rank, version=version, reason=_words(error))
        for version in self.versions():
            if version < below and version not in keep:
                try:
                    place.unmark(version)
                except OSError:  # a marked version has its shards
                    continue
                place.remove(_up_to(generation, place.shards(version, rank)))
                place.tidy(version, rank)


def _up_to(generation: int, shards: Sequence[Shard]) -> list[Shard]:
    return [shard for shard in shards if shard.generation <= generation]


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
        end_stuck: Callable[[], None],
    ) -> None:
        self._end_stuck = end_stuck
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
        """Waits for the attempt in progress, for as long as it makes progress."""
        self._called_off.set()
        while self._thread.is_alive():
            self._end_stuck()
            self._thread.join(_LOOK_S)

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

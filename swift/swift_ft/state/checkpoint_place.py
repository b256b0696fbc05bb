"""Where the shards of checkpoints are kept: a directory, or an object store. A shard is one rank's state of a version.

Both have the same names and bytes: ``v<version>/rank<r>/g<generation>-<process>-<number>/`` with the two files of
`swift_ft.state.checkpoint_file`. In a directory a shard is written under a temporary name, synced, and renamed. In an
object store its tensors are uploaded first; its index is put last, only where there is none, and makes it whole.
"""

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swift_ft.errors import ServiceError
from swift_ft.files import make_directory, open_regular, read_regular, sync_directory, write_whole
from swift_ft.objects import Entry, Objects
from swift_ft.state.checkpoint_file import INDEX, Opened, Sink, Source
from swift_ft.text import generation_of, rank_of, scheme_of, version_folder, version_of


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's folder in a version's, by the name that it has there."""

    version: int
    rank: int
    name: str
    where: str
    """Its path or URL."""

    @property
    def generation(self) -> int:
        return generation_of(self.name) or 0


MARK = "complete.json"
"""Beside the ranks' folders in a version's: the mark of a complete version (`swift_ft.state.complete_mark`)."""
MARK_BYTES_MAX = 1 << 16


def shard_folder(version: int, rank: int) -> str:
    """Returns the path of a rank's folder in a version's."""
    return f"{version_folder(version)}/rank{rank}"


class Place(Protocol):
    """The shards of one job. Raises OSError; ServiceError for what must not be read or written."""

    where: str
    """The directory or URL."""
    aside: str
    """How shards are called that are set aside."""

    def of_job(self, job: str) -> "Place":
        """Returns the place of another job beside this one."""

    def is_there(self) -> bool: ...

    def check(self, probe: str) -> None:
        """Writes something of this name, and removes it."""

    def versions(self) -> list[int]:
        """Returns the versions of which any rank has saved a shard, ascending; none if the place cannot be reached."""

    def ranks(self) -> set[int]:
        """Returns the ranks that have saved a shard of any version."""

    def shards(self, version: int, rank: int, *, begun: bool = False) -> list[Shard]:
        """Returns the whole shards; with `begun`, those that are not, in its stead. None behind a link."""

    def newest(self, version: int, rank: int) -> Shard | None:
        """Returns the whole shard of the highest generation, of several the one that was written last."""

    def source(self, shard: Shard) -> Source: ...

    def new(self, version: int, rank: int, name: str) -> AbstractContextManager[Sink]:
        """(context manager) A new shard, whole and durable at the end. Nothing of it stays if the block raises."""

    def remove(self, shards: Iterable[Shard]) -> None:
        """Removes shards, as far as that is possible."""

    def tidy(self, version: int, rank: int) -> None:
        """Removes folders in which there is nothing."""

    def entries(self, version: int, rank: int) -> list[Shard]:
        """Returns all shards, whole or not; or the folder, if it is a link."""

    def set_aside(self, version: int, rank: int, entries: Sequence[Shard]) -> bool:
        """Keeps exactly these entries where they are never loaded. Returns whether there is anything to keep."""

    def mark(self, version: int, content: bytes) -> None:
        """Keeps this beside the shards of a version, durably, in the stead of what was kept."""

    def marked(self, version: int) -> bytes | None:
        """Returns what `mark` has kept; None if nothing."""

    def unmark(self, version: int) -> None: ...

    def in_background(self, work: Callable[[], None]) -> None:
        """Does the work where it delays nobody; what has not begun is given up for it."""

    def end_background(self) -> None:
        """Gives up the work in the background that has not begun, and waits for the end of the rest."""

    def for_write(self) -> "Place":
        """Returns the place as one write uses it, which `end_stuck_write` can end."""

    def end_stuck_write(self) -> None:
        """(another thread) Ends the last write if nothing has been heard of it for a while."""

    def close(self) -> None:
        """Gives up the work in the background that has not begun."""


def place_at(where: str | os.PathLike[str]) -> Place:
    """Returns the place of a directory, or of an object store's URL. Raises UsageError."""
    text = os.fspath(where)
    return ObjectPlace(Objects.at(text), text) if scheme_of(text) else DirectoryPlace(Path(text))


# --- a directory ---

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def _descriptor(path: str | Path, flags: int, inside: int | None = None) -> Iterator[int]:
    file = os.open(path, flags, 0o600, dir_fd=inside)
    try:
        yield file
    finally:
        os.close(file)


class _FolderSink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def create(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        with _descriptor(self._folder / name, _NEW) as file:

            def write(data: memoryview) -> None:
                while len(data):
                    data = data[os.write(file, data) :]

            yield write
            os.fsync(file)


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    size: int

    def read(self, into: memoryview) -> int:
        return os.readv(self.descriptor, [into])


class _FolderSource:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def open(self, name: str) -> Iterator[Opened]:
        """Opens a regular file, without following links."""
        with (
            _descriptor(self._folder.parent, _FOLDER) as above,
            _descriptor(self._folder.name, _FOLDER, above) as inside,
        ):
            file = open_regular(name, os.O_RDONLY, inside=inside)
            try:
                yield _File(file, os.fstat(file).st_size)
            finally:
                os.close(file)


class DirectoryPlace:
    aside = ".former-*"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.where = str(directory)

    def of_job(self, job: str) -> "DirectoryPlace":
        return DirectoryPlace(self._directory.with_name(job))

    def is_there(self) -> bool:
        return self._directory.is_dir()

    def check(self, probe: str) -> None:
        _make(self._directory)
        path = self._directory / probe
        os.close(os.open(path, _NEW, 0o600))
        path.unlink()

    def versions(self) -> list[int]:
        try:
            found = [version_of(path.name) for path in self._directory.iterdir() if path.is_dir()]
        except OSError:
            return []  # the directory is not there at the moment
        return sorted(version for version in found if version is not None)

    def ranks(self) -> set[int]:
        folders = self._directory.glob("v*/rank*")
        found = (
            rank_of(path.name)
            for path in folders
            if path.is_dir() and version_of(path.parent.name) is not None
        )
        return {rank for rank in found if rank is not None}

    def shards(self, version: int, rank: int, *, begun: bool = False) -> list[Shard]:
        folder = self._folder(version, rank)
        return [] if _is_linked(folder) else self._shards(version, rank, begun=begun)

    def _shards(self, version: int, rank: int, *, begun: bool = False) -> list[Shard]:
        found = self._folder(version, rank).glob(".g*" if begun else "g*")
        return [
            Shard(version, rank, path.name, str(path))
            for path in found
            if generation_of(path.name) is not None
        ]

    def newest(self, version: int, rank: int) -> Shard | None:
        folder = self._folder(version, rank)
        if _is_linked(folder):
            raise ServiceError(f"checkpoint {folder} is a link; nothing is read through it")
        shards = [shard for shard in self._shards(version, rank) if Path(shard.where).is_dir()]
        newest = max(
            shards, key=lambda shard: (shard.generation, Path(shard.where).stat().st_mtime_ns), default=None
        )
        if newest is None and (folder / "state.json").exists():
            raise ServiceError(
                f"checkpoint {folder} was written by an older swift-ft, in a format that could run code: "
                "nothing of it is read; go on with that version, or begin under another job name"
            )
        return newest

    def source(self, shard: Shard) -> Source:
        return _FolderSource(Path(shard.where))

    @contextmanager
    def new(self, version: int, rank: int, name: str) -> Iterator[Sink]:
        folder = self._folder(version, rank)
        shard = folder / name
        part = shard.with_name(f".{name}")
        if _is_linked(folder):
            raise ServiceError(f"{folder} is a link; nothing is written through it")
        try:
            _make(folder)
            part.mkdir(mode=0o700)
            yield _FolderSink(part)
            sync_directory(part)
            part.rename(shard)
            sync_directory(folder)
        except BaseException:
            for path in (part, shard):
                shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # there is something else of this version
                folder.rmdir()
            raise

    def remove(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            shutil.rmtree(shard.where, ignore_errors=True)

    def tidy(self, version: int, rank: int) -> None:
        folder = self._folder(version, rank)
        if _is_linked(folder):
            return
        with suppress(OSError):  # a replacement's shard is there, or another rank's
            folder.rmdir()
        with suppress(OSError):
            folder.parent.rmdir()

    def entries(self, version: int, rank: int) -> list[Shard]:
        folder = self._folder(version, rank)
        if folder.is_symlink():
            return [Shard(version, rank, folder.name, str(folder))]
        return [*self._shards(version, rank), *self._shards(version, rank, begun=True)]

    def set_aside(self, version: int, rank: int, entries: Sequence[Shard]) -> bool:
        folder = self._folder(version, rank)
        former = folder.with_name(f".former-{secrets.token_hex(4)}-{folder.name}")
        with suppress(OSError):
            if folder.is_symlink():
                folder.rename(former)
                return True
            former.mkdir(mode=0o700)
        for entry in entries:
            with suppress(OSError):
                Path(entry.where).rename(former / entry.name)
        for emptied in (folder, former):
            with suppress(OSError):
                emptied.rmdir()
        return former.is_dir()

    def mark(self, version: int, content: bytes) -> None:
        path = self._mark(version)
        write_whole(path, content)
        sync_directory(path.parent)

    def marked(self, version: int) -> bytes | None:
        try:
            return read_regular(self._mark(version), MARK_BYTES_MAX)
        except FileNotFoundError:
            return None

    def unmark(self, version: int) -> None:
        self._mark(version).unlink(missing_ok=True)

    def _mark(self, version: int) -> Path:
        folder = self._directory / version_folder(version)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder} is a link")
        return folder / MARK

    def in_background(self, work: Callable[[], None]) -> None:
        work()  # it takes moments

    def end_background(self) -> None:
        """There is none."""

    def for_write(self) -> Place:
        return self

    def end_stuck_write(self) -> None:
        """A write to a directory cannot be ended."""

    def close(self) -> None:
        pass

    def _folder(self, version: int, rank: int) -> Path:
        return self._directory / shard_folder(version, rank)


def _make(folder: Path) -> None:
    """Creates the folder and its missing parents, durably."""
    for path in make_directory(folder):
        sync_directory(path.parent)


def _is_linked(folder: Path) -> bool:
    """Returns whether a rank's folder of a version, or the version's folder, is a link."""
    return folder.is_symlink() or folder.parent.is_symlink()


# --- an object store ---

FORMER = "former.jsonl"
"""What the index of a shard is called that was set aside."""
_STUCK_S = 5.0
"""Seconds without an answer after which a write is ended for a newer one. Parts take less, or the link is too slow."""


class _ObjectSink:
    """Uploads the tensors, and holds the index back."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix
        self.index = b""

    @contextmanager
    def create(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        if name != INDEX:
            with self._objects.upload(f"{self._prefix}/{name}") as write:
                yield write
            return
        content = bytearray()
        yield content.extend
        self.index = bytes(content)


@dataclass(frozen=True, slots=True)
class _Object:
    size: int
    read: Callable[[memoryview], int]


class _ObjectSource:
    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix

    @contextmanager
    def open(self, name: str) -> Iterator[Opened]:
        path = f"{self._prefix}/{name}"
        size = self._objects.size(path)
        with self._objects.reader(path, size) as read:
            yield _Object(size, read)


class ObjectPlace:
    aside = FORMER

    def __init__(self, objects: Objects, where: str) -> None:
        self.where = where
        self._objects = objects
        self._writes = objects
        self._lock = threading.Lock()
        self._next: Callable[[], None] | None = None
        self._worker: threading.Thread | None = None

    def of_job(self, job: str) -> Place:
        return place_at(f"{self.where.rpartition('/')[0]}/{job}")

    def is_there(self) -> bool:
        return bool(self._objects.folders())

    def check(self, probe: str) -> None:
        self._objects.put(probe, b"")
        self._objects.remove([probe])

    def versions(self) -> list[int]:
        try:
            found = map(version_of, self._objects.folders())
        except OSError:
            return []  # the store does not answer at the moment
        return sorted(version for version in found if version is not None)

    def ranks(self) -> set[int]:
        found = set()
        for entry in self._objects.entries():
            version, _, rest = entry.path.partition("/")
            rank = rank_of(rest.partition("/")[0])
            if version_of(version) is not None and rank is not None:
                found.add(rank)
        return found

    def shards(self, version: int, rank: int, *, begun: bool = False) -> list[Shard]:
        found = self._found(version, rank)
        return [
            self._shard(version, rank, name)
            for name, files in found.items()
            if (INDEX not in files if begun else INDEX in files) and FORMER not in files
        ]

    def _found(self, version: int, rank: int) -> dict[str, dict[str, Entry]]:
        """Returns shard -> file -> its entry."""
        prefix = shard_folder(version, rank)
        found: dict[str, dict[str, Entry]] = {}
        for entry in self._objects.entries(prefix):
            name, _, file = entry.path.removeprefix(f"{prefix}/").partition("/")
            if generation_of(name) is not None:
                found.setdefault(name, {})[file] = entry
        return found

    def _shard(self, version: int, rank: int, name: str) -> Shard:
        return Shard(version, rank, name, f"{self.where}/{shard_folder(version, rank)}/{name}")

    def newest(self, version: int, rank: int) -> Shard | None:
        found = self._found(version, rank)

        def order(name: str) -> tuple[int, float, int]:
            # The store's clock may have whole seconds; the number tells two shards of one process apart.
            number = int(name.rpartition("-")[2])
            return generation_of(name) or 0, found[name][INDEX].modified_s, number

        whole = [name for name, files in found.items() if INDEX in files and FORMER not in files]
        return self._shard(version, rank, max(whole, key=order)) if whole else None

    def source(self, shard: Shard) -> Source:
        return _ObjectSource(self._objects, f"{shard_folder(shard.version, shard.rank)}/{shard.name}")

    @contextmanager
    def new(self, version: int, rank: int, name: str) -> Iterator[Sink]:
        prefix = f"{shard_folder(version, rank)}/{name}"
        sink = _ObjectSink(self._objects, prefix)
        yield sink  # what was uploaded when it fails goes with the version
        self._objects.create(f"{prefix}/{INDEX}", sink.index)

    def remove(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            prefix = f"{shard_folder(shard.version, shard.rank)}/{shard.name}"
            with suppress(OSError):
                files = [entry.path for entry in self._objects.entries(prefix)]
                # The index first: without it nothing of the shard is loaded.
                self._objects.remove(sorted(files, key=lambda path: not path.endswith(f"/{INDEX}")))

    def tidy(self, version: int, rank: int) -> None:
        """There are no folders."""

    def entries(self, version: int, rank: int) -> list[Shard]:
        found = self._found(version, rank)
        return [self._shard(version, rank, name) for name, files in found.items() if FORMER not in files]

    def set_aside(self, version: int, rank: int, entries: Sequence[Shard]) -> bool:
        aside = False
        for entry in entries:
            prefix = f"{shard_folder(version, rank)}/{entry.name}"
            with suppress(FileNotFoundError):  # it was never whole
                index = self._objects.read(f"{prefix}/{INDEX}", 0, self._objects.size(f"{prefix}/{INDEX}"))
                self._objects.create(f"{prefix}/{FORMER}", bytes(index))
                self._objects.remove([f"{prefix}/{INDEX}"])
                aside = True
        return aside

    def mark(self, version: int, content: bytes) -> None:
        self._objects.put(f"{version_folder(version)}/{MARK}", content)

    def marked(self, version: int) -> bytes | None:
        try:
            return self._objects.read_all(f"{version_folder(version)}/{MARK}", MARK_BYTES_MAX)
        except FileNotFoundError:
            return None

    def unmark(self, version: int) -> None:
        self._objects.remove([f"{version_folder(version)}/{MARK}"])

    def in_background(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._next = work
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="swift-prune", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                work, self._next = self._next, None
                if work is None:
                    self._worker = None
                    return
            with suppress(OSError):  # the next prune removes it
                work()

    def end_background(self) -> None:
        with self._lock:
            self._next, worker = None, self._worker
        if worker is not None:
            worker.join()

    def for_write(self) -> Place:
        self._writes = self._objects.sibling()
        return ObjectPlace(self._writes, self.where)

    def end_stuck_write(self) -> None:
        if time.monotonic() - self._writes.heard_s > _STUCK_S:
            self._writes.call_off()

    def close(self) -> None:
        with self._lock:
            self._next = None

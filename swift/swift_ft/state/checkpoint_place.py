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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swift_ft.errors import ServiceError
from swift_ft.files import make_directory, open_regular, read_regular, sync_directory, write_whole
from swift_ft.objects import Entry, Objects
from swift_ft.state.checkpoint_file import INDEX, Create, Opened
from swift_ft.text import generation_of, rank_of, scheme_of, version_folder, version_of


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's folder in a version's, by the name that it has there."""

    version: int
    rank: int
    name: str
    where: str
    """Its path or URL."""
    whole: bool
    modified_s: float
    """Seconds since 1970, by the place's clock. A store's may have whole seconds."""

    @property
    def number(self) -> int:
        """The place in the order of those that one process has written."""
        return int(self.name.rpartition("-")[2])

    @property
    def generation(self) -> int:
        return generation_of(self.name) or 0


MARK = "complete.json"
"""Beside the ranks' folders in a version's: the mark of a complete version (`swift_ft.state.complete_mark`)."""
MARK_BYTES_MAX = 1 << 16


def shard_folder(version: int, rank: int) -> str:
    return f"{version_folder(version)}/rank{rank}"


class Place(ABC):
    """The shards of one job. Raises OSError; ServiceError for what must not be read or written."""

    where: str
    """The directory or URL."""
    aside: str
    """How shards are called that are set aside."""

    @abstractmethod
    def of_job(self, job: str) -> "Place":
        """Returns the place of another job beside this one."""

    @abstractmethod
    def is_there(self) -> bool: ...

    @abstractmethod
    def check(self, probe: str) -> None:
        """Writes something of this name, and removes it."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Returns the versions of which any rank has saved a shard, ascending; none if the place cannot be reached."""

    @abstractmethod
    def ranks(self) -> set[int]:
        """Returns the ranks that have saved a shard of any version."""

    @abstractmethod
    def shards(self, version: int, rank: int) -> list[Shard]:
        """Returns all shards, whole or not. None behind a link."""

    def newest(self, version: int, rank: int) -> Shard | None:
        """Returns the whole shard of the highest generation, of several the one that was written last."""
        whole = [shard for shard in self.shards(version, rank) if shard.whole]
        return max(whole, key=lambda shard: (shard.generation, shard.modified_s, shard.number), default=None)

    @abstractmethod
    def open(self, shard: Shard, name: str) -> AbstractContextManager[Opened]:
        """(context manager) Opens a file of a shard (`checkpoint_file.Open`)."""

    @abstractmethod
    def new(self, version: int, rank: int, name: str) -> AbstractContextManager[Create]:
        """(context manager) A new shard, whole and durable at the end. Nothing of it stays if the block raises."""

    @abstractmethod
    def remove(self, shards: Iterable[Shard]) -> None:
        """Removes shards, as far as that is possible."""

    def entries(self, version: int, rank: int) -> list[Shard]:
        """Returns what `set_aside` takes."""
        return self.shards(version, rank)

    @abstractmethod
    def set_aside(self, version: int, rank: int, entries: Sequence[Shard]) -> bool:
        """Keeps exactly these entries where they are never loaded. Returns whether there is anything to keep."""

    @abstractmethod
    def mark(self, version: int, content: bytes) -> None:
        """Keeps this beside the shards of a version, durably, in the stead of what was kept."""

    @abstractmethod
    def marked(self, version: int) -> bytes | None:
        """Returns what `mark` has kept; None if nothing."""

    @abstractmethod
    def unmark(self, version: int) -> None: ...

    # Only a directory has folders, and only calls to a store take long.

    def tidy(self, version: int, rank: int) -> None:  # noqa: B027
        """Removes folders in which there is nothing."""

    def in_background(self, work: Callable[[], None]) -> None:
        """Does the work where it delays nobody; what has not begun is given up for it."""
        work()

    def end_background(self) -> None:  # noqa: B027
        """Gives up the work in the background that has not begun, and waits for the end of the rest."""

    def for_write(self) -> "Place":
        """Returns the place as one write uses it, which `end_stuck_write` can end."""
        return self

    def end_stuck_write(self) -> None:  # noqa: B027
        """(another thread) Ends the last write if nothing has been heard of it for a while."""

    def close(self) -> None:  # noqa: B027
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


@contextmanager
def _created(folder: Path, name: str) -> Iterator[Callable[[memoryview], None]]:
    with _descriptor(folder / name, _NEW) as file:

        def write(data: memoryview) -> None:
            while len(data):
                data = data[os.write(file, data) :]

        yield write
        os.fsync(file)


class DirectoryPlace(Place):
    aside = ".former-*"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.where = str(directory)

    def of_job(self, job: str) -> "DirectoryPlace":
        return DirectoryPlace(self._directory.with_name(job))

    def is_there(self) -> bool:
        return self._directory.is_dir()

    def check(self, probe: str) -> None:
        make_directory(self._directory, durable=True)
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

    def shards(self, version: int, rank: int) -> list[Shard]:
        folder = self._folder(version, rank)
        found = []
        for path in () if _is_linked(folder) else folder.glob("*"):
            if generation_of(path.name) is not None and path.is_dir():
                with suppress(FileNotFoundError):  # removed meanwhile
                    whole, modified_s = not path.name.startswith("."), path.stat().st_mtime
                    found.append(Shard(version, rank, path.name, str(path), whole, modified_s))
        return found

    def newest(self, version: int, rank: int) -> Shard | None:
        folder = self._folder(version, rank)
        if _is_linked(folder):
            raise ServiceError(f"checkpoint {folder} is a link; nothing is read through it")
        return super().newest(version, rank)

    @contextmanager
    def open(self, shard: Shard, name: str) -> Iterator[Opened]:
        """Opens a regular file, without following links."""
        folder = Path(shard.where)
        with (
            _descriptor(folder.parent, _FOLDER) as above,
            _descriptor(folder.name, _FOLDER, above) as inside,
        ):
            file = open_regular(name, os.O_RDONLY, inside=inside)
            try:
                yield Opened(os.fstat(file).st_size, lambda into: os.readv(file, [into]))
            finally:
                os.close(file)

    @contextmanager
    def new(self, version: int, rank: int, name: str) -> Iterator[Create]:
        folder = self._folder(version, rank)
        shard = folder / name
        part = shard.with_name(f".{name}")
        if _is_linked(folder):
            raise ServiceError(f"{folder} is a link; nothing is written through it")
        try:
            make_directory(folder, durable=True)
            part.mkdir(mode=0o700)
            yield partial(_created, part)
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
        if not _is_linked(folder):
            with suppress(OSError):  # a replacement's shard is there, or another rank's
                folder.rmdir()
            with suppress(OSError):
                folder.parent.rmdir()

    def entries(self, version: int, rank: int) -> list[Shard]:
        folder = self._folder(version, rank)
        if folder.is_symlink():  # it is set aside as it is
            return [Shard(version, rank, folder.name, str(folder), False, 0.0)]
        return self.shards(version, rank)

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
        write_whole(self._mark(version), content, durable=True)

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

    def _folder(self, version: int, rank: int) -> Path:
        return self._directory / shard_folder(version, rank)


def _is_linked(folder: Path) -> bool:
    """Returns whether a rank's folder of a version, or the version's folder, is a link."""
    return folder.is_symlink() or folder.parent.is_symlink()


# --- an object store ---

FORMER = "former.jsonl"
"""What the index of a shard is called that was set aside."""
_STUCK_S = 5.0
"""Seconds without an answer after which a write is ended for a newer one. Parts take less, or the link is too slow."""


class ObjectPlace(Place):
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

    def shards(self, version: int, rank: int) -> list[Shard]:
        folder = shard_folder(version, rank)
        found: dict[str, dict[str, Entry]] = {}
        for entry in self._objects.entries(folder):
            name, _, file = entry.path.removeprefix(f"{folder}/").partition("/")
            if generation_of(name) is not None:
                found.setdefault(name, {})[file] = entry
        return [
            Shard(version, rank, name, f"{self.where}/{folder}/{name}", INDEX in files, modified_s)
            for name, files in found.items()
            if FORMER not in files
            for modified_s in [max(entry.modified_s for entry in files.values())]
        ]

    @contextmanager
    def open(self, shard: Shard, name: str) -> Iterator[Opened]:
        path = f"{shard_folder(shard.version, shard.rank)}/{shard.name}/{name}"
        size = self._objects.size(path)
        with self._objects.reader(path, size) as read:
            yield Opened(size, read)

    @contextmanager
    def new(self, version: int, rank: int, name: str) -> Iterator[Create]:
        prefix = f"{shard_folder(version, rank)}/{name}"
        index = bytearray()

        @contextmanager
        def create(file: str) -> Iterator[Callable[[memoryview], None]]:
            """Uploads the tensors, and holds the index back."""
            if file == INDEX:
                yield index.extend
                return
            with self._objects.upload(f"{prefix}/{file}") as write:
                yield write

        yield create  # what was uploaded when it fails goes with the version
        self._objects.create(f"{prefix}/{INDEX}", bytes(index))

    def remove(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            prefix = f"{shard_folder(shard.version, shard.rank)}/{shard.name}"
            with suppress(OSError):
                files = [entry.path for entry in self._objects.entries(prefix)]
                # The index first: without it nothing of the shard is loaded.
                self._objects.remove(sorted(files, key=lambda path: not path.endswith(f"/{INDEX}")))

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

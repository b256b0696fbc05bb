"""The file system as the storage uses it. `Disk` is the seam; `RealDisk` is the one of this machine.

Segment files are written in whole blocks, around the page cache (O_DIRECT) where the file system can: it is
several times faster than through it, costs a tenth of the processor time, and does not push the trainers' pages
out of memory. A direct write needs aligned memory, so bytes are gathered in a few buffers first; while one is
written the next one is filled.
"""

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import open_regular
from swift_ft.log.directory import LOCK, held_by_strangers
from swift_ft.log.frame import Bytes
from swift_ft.log.memory import page_aligned
from swift_ft.log.segment import BLOCK_BYTES
from swift_ft_services.threads import Threads

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_OTHER_FILES = 256
_STREAMS_OPEN_MIN, _STREAMS_OPEN_MAX = 64, 1 << 17
_BUFFER_BYTES = 4 << 20
_BUFFERS = 3
_KEEP_SIZE = 1  # <linux/falloc.h>
_fallocate = (
    getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None) if sys.platform == "linux" else None
)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_NO_SUPPORT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class File(Protocol):
    """One open file. Raises OSError."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes, or fewer at the end."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills page-aligned memory with whole blocks; gives how many bytes there were."""

    def write(self, offset: int, parts: Sequence[Bytes]) -> None:
        """Whole blocks (of BLOCK_BYTES), one part after the other. If it raises, any part of it may be there."""

    def reserve(self, size: int) -> None:
        """Takes space up to there, so that writes need none. The file's size stays."""

    def resize(self, size: int) -> None:
        """It ends there, and gives back what was reserved behind it."""

    def sync(self) -> None:
        """What was written is there after a power cut."""

    def note(self, offset: int, data: bytes) -> None:
        """Any few bytes, through the page cache: there whatever becomes of this process, not after a power cut."""

    def is_there(self) -> bool:
        """It is still the file of its name."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by path. Raises OSError; links are not followed, and only regular files are opened."""

    def names(self, path: Path) -> list[tuple[str, bool]]:
        """What is in a directory, sorted; with each, whether it is a directory. Empty if there is none."""

    def make_directory(self, path: Path) -> None:
        """Unless it is there. It is there after a power cut."""

    def create(self, path: Path) -> File:
        """A new file. Its name is there after a power cut once `sync_names` has returned."""

    def open(self, path: Path) -> File: ...

    def sync_names(self, path: Path) -> None:
        """Names made in or removed from this directory stay so after a power cut."""

    def rename(self, path: Path, target: Path) -> None:
        """In place of what is there."""

    def remove(self, path: Path) -> None:
        """Unless it is gone."""

    def remove_tree(self, path: Path) -> None:
        """A directory with all that is in it."""

    def close(self) -> None: ...


def allow_open_files() -> int:
    """Takes as many descriptors as the system lets this process have, and gives how many streams may keep theirs, two
    each: some are left for readers and calls."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # the kernel's own bound may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    many = _STREAMS_OPEN_MAX if soft == resource.RLIM_INFINITY else (soft - _OTHER_FILES) // 2
    return max(_STREAMS_OPEN_MIN, min(_STREAMS_OPEN_MAX, many))


class RealDisk:
    """A directory of this machine, held by one server at a time."""

    def __init__(self, directory: Path) -> None:
        """UsageError: it cannot be used; ServiceError: another server holds it."""
        self._lock_fd = _take(directory)
        self._gatherer = _Gatherer()

    def close(self) -> None:
        self._gatherer.close()
        os.close(self._lock_fd)

    def names(self, path: Path) -> list[tuple[str, bool]]:
        try:
            with os.scandir(path) as entries:
                return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        except FileNotFoundError:
            return []

    def make_directory(self, path: Path) -> None:
        """Makes it, for this user only, and syncs its name. OSError: it is a link, or cannot be made."""
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not path.is_dir():
            path.mkdir(mode=0o700)
            try:
                self.sync_names(path.parent)
            except OSError:
                path.rmdir()  # or the next time it would be taken for safe
                raise

    def create(self, path: Path) -> "RealFile":
        return RealFile(path, os.O_CREAT | os.O_EXCL, self._gatherer)

    def open(self, path: Path) -> "RealFile":
        return RealFile(path, 0, self._gatherer)

    def sync_names(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, path: Path, target: Path) -> None:
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)


def _take(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.listdir(directory)
        fd = _locked(directory)
        if fd is None and held_by_strangers(directory):
            (directory / LOCK).unlink()
            fd = _locked(directory)
    except OSError as error:
        raise UsageError(
            f"cannot use directory {directory}: {error.strerror}; give one that can be read and written"
        ) from None
    if fd is None:
        raise ServiceError(
            f"directory {directory} is in use by another log server; stop it or give another directory"
        )
    return fd


def _locked(directory: Path) -> int | None:
    """None: somebody else holds it. Only its owner can open it, or anybody could keep the server from starting."""
    fd = open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT)
    os.fchmod(fd, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


class RealFile:
    """Reads through the page cache, writes around it where that is possible."""

    def __init__(self, path: Path, flags: int, gatherer: "_Gatherer") -> None:
        self._path = path
        self._gatherer = gatherer
        self._fd = open_regular(path, os.O_RDWR | flags)
        self._direct_fd: int | None = None
        self._can_be_direct = True

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        at = 0
        while at < len(buffer):
            got = self._directly(os.preadv, [buffer[at:]], offset + at)
            at += got
            if got == 0 or got % BLOCK_BYTES:
                break
        return at

    def write(self, offset: int, parts: Sequence[Bytes]) -> None:
        if offset % BLOCK_BYTES or sum(map(len, parts)) % BLOCK_BYTES:
            raise ValueError("only whole blocks are written")
        self._gatherer.write(self._write_block, offset, parts)

    def _write_block(self, block: memoryview, offset: int) -> None:
        while block:
            written = self._directly(os.pwritev, [block], offset)
            block = block[written:]
            offset += written
            if written % BLOCK_BYTES:
                self._forget_direct()

    def _directly(
        self, call: Callable[[int, list[memoryview], int], int], buffers: list[memoryview], offset: int
    ) -> int:
        """Calls with a descriptor that goes around the page cache, if there can be one."""
        try:
            return call(self._descriptor(), buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct_fd is None:
                raise
        self._forget_direct()  # it can be opened, not used
        return call(self._fd, buffers, offset)

    def _descriptor(self) -> int:
        if self._direct_fd is None and self._can_be_direct:
            try:
                self._direct_fd = open_regular(self._path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
            except OSError as error:
                if error.errno not in _NO_SUPPORT and self.is_there():
                    raise
                self._can_be_direct = False
            if self._direct_fd is not None and not _same(os.fstat(self._direct_fd), os.fstat(self._fd)):
                self._forget_direct()  # another file has its name by now
        return self._fd if self._direct_fd is None else self._direct_fd

    def _forget_direct(self) -> None:
        self._can_be_direct = False
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def reserve(self, size: int) -> None:
        if _fallocate is None or _fallocate(self._fd, _KEEP_SIZE, 0, size) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_SUPPORT:
            raise OSError(number, os.strerror(number), str(self._path))

    def resize(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def note(self, offset: int, data: bytes) -> None:
        os.pwrite(self._fd, data, offset)

    def is_there(self) -> bool:
        try:
            return _same(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._forget_direct()
        os.close(self._fd)


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


class _Gatherer:
    """Aligned buffers, and a thread that writes one while the next is filled. For one writer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = [page_aligned(_BUFFER_BYTES) for _ in range(_BUFFERS)]
        self._thread = Threads(1, "disk")

    def close(self) -> None:
        self._thread.shutdown()

    def write(
        self, write_block: Callable[[memoryview, int], None], offset: int, parts: Sequence[Bytes]
    ) -> None:
        """Calls ``write_block(bytes, offset)`` for all of it, in order. Raises what it raises."""
        with self._lock:
            if sum(map(len, parts)) <= _BUFFER_BYTES:
                for piece in _pieces(parts, _BUFFER_BYTES):
                    write_block(memoryview(self._memory[0])[: self._fill(0, piece)], offset)
                return
            underway: deque[futures.Future[None]] = deque()
            try:
                for index, piece in enumerate(_pieces(parts, _BUFFER_BYTES)):
                    if len(underway) == _BUFFERS - 1:
                        underway.popleft().result()
                    size = self._fill(index % _BUFFERS, piece)
                    block = memoryview(self._memory[index % _BUFFERS])[:size]
                    underway.append(self._thread.submit(write_block, block, offset))
                    offset += size
            finally:
                futures.wait(underway)
            for written in underway:
                written.result()

    def _fill(self, index: int, piece: list[memoryview]) -> int:
        memory, at = self._memory[index], 0
        for view in piece:
            memory[at : at + len(view)] = view
            at += len(view)
        return at


def _pieces(parts: Sequence[Bytes], size: int) -> Iterator[list[memoryview]]:
    """All parts in order, cut so that each piece but the last has exactly ``size`` bytes."""
    piece: list[memoryview] = []
    room = size
    for part in parts:
        view = memoryview(part)
        while view:
            piece.append(view[:room])
            view, room = view[room:], room - len(piece[-1])
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece

"""File system interface of the storage. `Disk` is the protocol; `RealDisk` accesses this machine's file system.

Segment files are written in whole blocks with O_DIRECT where the file system supports it. That is several times faster
than through the page cache, takes a tenth of the CPU time, and does not evict the trainers' pages. A direct write needs
aligned memory, so bytes are gathered in a few buffers first; while one is written the next one is filled.
"""

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import make_directory, open_regular, sync_directory
from swift_ft.log.directory import LOCK
from swift_ft.log.memory import page_aligned
from swift_ft.log.segment import BLOCK_BYTES
from swift_ft_services.logserver.shared_memory import Part, SharedBody
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
        """Reads ``size`` bytes, or fewer at the end of the file."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills page-aligned memory with whole blocks. Returns the number of bytes read."""

    def write(self, offset: int, parts: Sequence[Part]) -> bytes:
        """Writes whole blocks (of BLOCK_BYTES), part after part. Returns the last block, as it was written. If it
        raises, any part may be written. Raises BodyChanged as well."""

    def reserve(self, size: int) -> None:
        """Allocates space up to ``size``, so that writes need none. The file's size is unchanged."""

    def resize(self, size: int) -> None:
        """Truncates or extends the file to ``size``, and frees the space reserved after it."""

    def sync(self) -> None:
        """Makes all writes durable."""

    def note(self, offset: int, data: bytes) -> None:
        """Writes a few bytes through the page cache: they survive the end of this process, but not a power cut."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by path. Raises OSError; links are not followed, and only regular files are opened."""

    def names(self, path: Path) -> list[tuple[str, bool]]:
        """Returns the sorted entries of a directory, each with whether it is one; none if it does not exist."""

    def make_directory(self, path: Path) -> None:
        """Durably creates the directory, unless it exists."""

    def create(self, path: Path) -> File:
        """Creates a new file. Its name is durable once `sync_names` has returned."""

    def open(self, path: Path) -> File: ...

    def descriptor(self, path: Path) -> int:
        """Returns a read-only descriptor of an existing file."""

    def sync_names(self, path: Path) -> None:
        """Makes creations and removals of names in this directory durable."""

    def rename(self, path: Path, target: Path) -> None:
        """Renames a file; an existing target is replaced."""

    def remove(self, path: Path) -> None:
        """Removes the file, if it exists."""

    def remove_tree(self, path: Path) -> None:
        """Removes the directory and all in it, if it exists."""

    def close(self) -> None: ...


def allow_open_files() -> int:
    """Raises the descriptor limit as far as allowed. Returns how many streams may keep their two descriptors open; some
    are left for readers and calls."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # the kernel's own limit may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    many = _STREAMS_OPEN_MAX if soft == resource.RLIM_INFINITY else (soft - _OTHER_FILES) // 2
    return max(_STREAMS_OPEN_MIN, min(_STREAMS_OPEN_MAX, many))


class RealDisk:
    """A directory of this machine, locked by one server at a time."""

    def __init__(self, directory: Path, synced: Callable[[float], None] = lambda seconds: None) -> None:
        """Locks the directory. Raises UsageError if it cannot be used, ServiceError if another server holds it.

        ``synced``: called with the duration of each sync of a file.
        """
        self._lock_fd = _lock(directory)
        self._synced = synced
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
        """Creates it with mode 0700, and syncs its name. Raises OSError if it is a link or cannot be created."""
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not path.is_dir():
            path.mkdir(mode=0o700)
            try:
                self.sync_names(path.parent)
            except OSError:
                path.rmdir()  # or the next call would take it for durable
                raise

    def create(self, path: Path) -> "RealFile":
        return RealFile(path, os.O_CREAT | os.O_EXCL, self._gatherer, self._synced)

    def open(self, path: Path) -> "RealFile":
        return RealFile(path, 0, self._gatherer, self._synced)

    def descriptor(self, path: Path) -> int:
        try:
            return open_regular(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in _NO_SUPPORT:
                raise
        return open_regular(path, os.O_RDONLY)

    def sync_names(self, path: Path) -> None:
        sync_directory(path)

    def rename(self, path: Path, target: Path) -> None:
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def _lock(directory: Path) -> int:
    try:
        make_directory(directory, durable=True)
        os.listdir(directory)
        fd = open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT)
        os.fchmod(fd, 0o600)  # otherwise any user could lock it and keep the server from starting
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ServiceError(
                f"directory {directory} is in use by another log server; stop it or give another directory"
            ) from None
    except OSError as error:
        raise UsageError(
            f"cannot use directory {directory}: {error.strerror}; give one that can be read and written"
        ) from None
    return fd


class RealFile:
    """Opens with O_DIRECT for whole-block reads and writes where that is possible, else uses the page cache."""

    def __init__(
        self, path: Path, flags: int, gatherer: "_Gatherer", synced: Callable[[float], None]
    ) -> None:
        self._path = path
        self._synced = synced
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

    def write(self, offset: int, parts: Sequence[Part]) -> bytes:
        if offset % BLOCK_BYTES or sum(map(len, parts)) % BLOCK_BYTES:
            raise ValueError("only whole blocks are written")
        return self._gatherer.write(self._write_block, offset, parts)

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
        """Calls with the O_DIRECT descriptor, if there is one."""
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
                if error.errno not in _NO_SUPPORT and self._is_there():
                    raise
                self._can_be_direct = False
            if self._direct_fd is not None and not os.path.sameopenfile(self._direct_fd, self._fd):
                self._forget_direct()  # another file has this name by now
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
        began = time.monotonic()
        os.fdatasync(self._fd)
        self._synced(time.monotonic() - began)

    def note(self, offset: int, data: bytes) -> None:
        os.pwrite(self._fd, data, offset)

    def _is_there(self) -> bool:
        """Returns whether the path still names this file."""
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._forget_direct()
        os.close(self._fd)


class _Gatherer:
    """Aligned buffers, and a thread that writes one while the next is filled. For one writer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers = [memoryview(page_aligned(_BUFFER_BYTES)) for _ in range(_BUFFERS)]
        self._thread = Threads(1, "disk")

    def close(self) -> None:
        self._thread.shutdown()

    def write(
        self, write_block: Callable[[memoryview, int], None], offset: int, parts: Sequence[Part]
    ) -> bytes:
        """Calls ``write_block(bytes, offset)`` for all of it, in order. Returns the last block. Raises what it raises,
        and BodyChanged."""
        with self._lock:
            underway: deque[futures.Future[None]] = deque()
            alone = sum(map(len, parts)) <= _BUFFER_BYTES
            buffer = memoryview(b"")
            try:
                for buffer in self._filled(parts):
                    if alone:
                        write_block(buffer, offset)
                        break
                    underway.append(self._thread.submit(write_block, buffer, offset))
                    offset += len(buffer)
                    if len(underway) == _BUFFERS:  # its buffer is filled next
                        underway.popleft().result()
            finally:
                futures.wait(underway)
            for written in underway:
                written.result()
            return bytes(buffer[-BLOCK_BYTES:])

    def _filled(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """Yields the buffers in turn, each filled with the parts that come next; all but the last one are full."""
        turn = at = 0
        for part in parts:
            begin = 0
            while begin < len(part):
                end = min(len(part), begin + _BUFFER_BYTES - at)
                room = self._buffers[turn][at : at + end - begin]
                if isinstance(part, SharedBody):
                    part.copy(begin, room)
                else:
                    room[:] = memoryview(part)[begin:end]
                begin, at = end, at + len(room)
                if at == _BUFFER_BYTES:
                    yield self._buffers[turn]
                    turn, at = (turn + 1) % _BUFFERS, 0
        if at:
            yield self._buffers[turn][:at]

"""Object stores for what is written once: checkpoints, and sealed segments of the log. They are reached by `obstore`.

An object is there whole or not at all, and is never changed. So a group of objects is made complete by the one that is
put last (`Objects.create`), and nothing has to be synced. What a killed process leaves is parts of an upload, which no
listing shows: a lifecycle rule of the bucket removes them.

Every error is an OSError: FileNotFoundError, FileExistsError, or EIO with what the store has said. Calls have limits in
time, and another thread can end those under way (`Objects.call_off`).
"""

import asyncio
import errno
import importlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from swift_ft.errors import UsageError
from swift_ft.text import one_line

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
PART_BYTES = 8 << 20
"""Size of the parts in which an object is sent and fetched. S3 takes 5 MiB or more, but for the last one."""
_AT_ONCE = 8
"""Parts of one object under way. So an upload, or a download, holds 64 MiB."""
_SMALL_AT_ONCE = 32
_REQUEST_S, _CONNECT_S = 30.0, 5.0
_RETRIES = 3
_RETRIED_S = 10.0
READ_PATIENCE_S = 60.0
"""Seconds for which a read is tried again while the store gives errors: whoever reads cannot go on without it."""
_PAUSE_S, _PAUSE_S_MAX = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    size: int
    modified_s: float
    """Seconds since 1970, by the store's clock. Many stores round to whole seconds."""


class Objects:
    """The objects below one prefix, by their paths in it."""

    def __init__(self, store: Any, patience_s: float = READ_PATIENCE_S) -> None:
        """`store`: one of obstore's. `patience_s`: seconds for which a read is tried again."""
        self._store = store
        self._patience_s = patience_s
        self._calls: set[futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._called_off = False
        self.heard_s = time.monotonic()
        """When the store has answered last."""

    @classmethod
    def at(cls, url: str, patience_s: float = READ_PATIENCE_S) -> "Objects":
        """Opens a store by its URL; credentials and endpoints are in the environment. Makes no request. Raises
        UsageError."""
        scheme = url.partition("://")[0]
        client: dict[str, Any] = {"timeout": f"{_REQUEST_S:g}s", "connect_timeout": f"{_CONNECT_S:g}s"}
        if os.environ.get(_ALLOW_HTTP.get(scheme, ""), "").lower() in ("1", "true", "yes", "on"):
            client["allow_http"] = True  # obstore reads it from the environment only if there are no options
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRIED_S)}
        try:
            store = _obstore("store").from_url(url, client_options=client, retry_config=retry)
        except Exception as error:  # noqa: BLE001  (obstore has no common class for what is wrong with a URL)
            raise UsageError(f"{url[:80]}: {_first_line(error)}") from None
        return cls(store, patience_s)

    def sibling(self) -> "Objects":
        """Returns the same store with calls of its own to call off."""
        return Objects(self._store, self._patience_s)

    # --- writing ---

    @contextmanager
    def upload(self, path: str) -> Iterator[Callable[[Bytes], None]]:
        """(context manager) Yields a function that appends to a new object, which is there at the end. Parts are sent
        beside the caller. A large one leaves its parts behind if the block raises."""
        writer = _obstore().open_writer_async(
            self._store, path, buffer_size=PART_BYTES, max_concurrency=_AT_ONCE
        )
        yield lambda data: self._done(path, lambda: writer.write(data))
        self._done(path, writer.close)

    def put(self, path: str, data: Bytes) -> None:
        self._done(path, lambda: _obstore().put_async(self._store, path, data, use_multipart=False))

    def create(self, path: str, data: bytes) -> None:
        """Puts an object where there is none. Raises FileExistsError if there is another one."""
        try:
            self._done(path, lambda: _obstore().put_async(self._store, path, data, mode="create"))
        except FileExistsError:
            if self.read_all(path, len(data)) != data:  # else it is this one: its first answer was lost
                raise

    def remove(self, paths: Sequence[str]) -> None:
        """Removes objects, in order; those that are not there are passed over."""
        for path in paths:
            try:
                self._done(path, lambda path=path: _obstore().delete_async(self._store, path))  # type: ignore[misc]
            except FileNotFoundError:
                continue

    # --- reading ---

    def entries(self, below: str = "") -> list[Entry]:
        """Returns all objects below a prefix, by their whole paths."""
        found: Any = self._read(below, lambda: _obstore().list(self._store, below or None).collect_async())
        return [Entry(each["path"], each["size"], each["last_modified"].timestamp()) for each in found]

    def folders(self) -> list[str]:
        """Returns the first part of all paths that have more than one, each once."""
        found: Any = self._read("", lambda: _obstore().list_with_delimiter_async(self._store))
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    def size(self, path: str) -> int:
        found: Any = self._read(path, lambda: _obstore().head_async(self._store, path))
        return int(found["size"])

    def read_all(self, path: str, size_max: int) -> bytes:
        """Returns the content, or its first `size_max` + 1 bytes if it is larger."""
        size = min(self.size(path), size_max + 1)
        return bytes(self.read(path, 0, size))

    def read(self, path: str, offset: int, size: int) -> memoryview:
        """Returns exactly these bytes."""
        if not size:
            return memoryview(b"")
        return self._result(path, self._fetch(path, offset, size))

    def read_each(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, memoryview]]:
        """Yields the contents of small objects, in order. Several are fetched at once."""
        entries = list(entries)
        contents = self._in_order(((entry.path, 0, entry.size) for entry in entries), _SMALL_AT_ONCE)
        return zip(entries, contents, strict=True)

    @contextmanager
    def reader(self, path: str, size: int) -> Iterator[Callable[[memoryview], int]]:
        """(context manager) Yields a function that fills memory with the object's next bytes, and returns how many
        there were. Parts are fetched ahead."""
        parts = ((path, begin, min(PART_BYTES, size - begin)) for begin in range(0, size, PART_BYTES))
        rest = memoryview(b"")

        def read(into: memoryview) -> int:
            nonlocal rest
            rest = rest or next(contents, rest)
            count = min(len(into), len(rest))
            into[:count] = rest[:count]
            rest = rest[count:]
            return count

        with closing(self._in_order(parts, _AT_ONCE)) as contents:
            yield read

    def _in_order(
        self, places: Iterable[tuple[str, int, int]], at_once: int
    ) -> Generator[memoryview, None, None]:
        """Yields the bytes at (path, offset, size), in order, and fetches several ahead."""
        ahead: deque[tuple[str, futures.Future[memoryview]]] = deque()
        rest = iter(places)
        try:
            while True:
                ahead += ((place[0], self._fetch(*place)) for place in islice(rest, at_once - len(ahead)))
                if not ahead:
                    return
                yield self._result(*ahead.popleft())
        finally:
            for _, call in ahead:
                call.cancel()

    # --- calls ---

    def call_off(self) -> None:
        """(another thread) Ends all calls under way, and refuses later ones, with OSError (ECANCELED)."""
        with self._lock:
            self._called_off = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _fetch(self, path: str, offset: int, size: int) -> "futures.Future[memoryview]":
        async def fetch() -> memoryview:
            data = memoryview(
                await _obstore().get_range_async(self._store, path, start=offset, length=size)
            ).cast("B")
            if len(data) != size:
                raise OSError(errno.EIO, f"it ends after {offset + len(data)} bytes", path)
            return data

        return self._call(self._patient(fetch))

    def _read(self, path: str, request: Callable[[], Awaitable[T]]) -> T:
        return self._result(path, self._call(self._patient(request)))

    def _done(self, path: str, request: Callable[[], Awaitable[T]]) -> T:
        async def call() -> T:  # obstore wants to be called where a loop runs
            return await request()

        return self._result(path, self._call(call()))

    def _call(self, call: Coroutine[Any, Any, T]) -> "futures.Future[T]":
        with self._lock:
            if self._called_off:
                call.close()
                raise OSError(errno.ECANCELED, "called off")
            future = asyncio.run_coroutine_threadsafe(call, _loop())
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _result(self, path: str, future: "futures.Future[T]") -> T:
        try:
            result = future.result()
        except futures.CancelledError:
            raise OSError(errno.ECANCELED, "called off", path) from None
        except Exception as error:  # noqa: BLE001  (whatever a request ends with)
            raise _as_os_error(error, path) from None
        self.heard_s = time.monotonic()
        return result

    async def _patient(self, request: Callable[[], Awaitable[T]]) -> T:
        until, pause_s = time.monotonic() + self._patience_s, _PAUSE_S
        while True:
            try:
                return await request()
            except Exception as error:
                may_pass = type(error).__name__ == "GenericError"
                if not may_pass or time.monotonic() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)


_TIMES = re.compile(
    r" in [0-9.]+[a-zµ]+(, after [0-9]+ retries, max_retries: [0-9]+, retry_timeout: [0-9a-z]+)? *"
)


def _obstore(module: str = "") -> Any:
    return importlib.import_module(f"obstore.{module}" if module else "obstore")


def _as_os_error(error: Exception, path: str) -> OSError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", path)
    if isinstance(error, OSError):
        return error
    if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(errno.EEXIST, "there is another object", path)
    return OSError(errno.EIO, _first_line(error), path)


def _first_line(error: Exception) -> str:
    """Returns what the store has said, without times, which would make a new reason of the same one each time."""
    said = one_line(str(error).partition("\n\nDebug source")[0])
    return _TIMES.sub("", said)[:300] or type(error).__name__


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
_STARTING = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Returns this process's event loop, in a thread of its own. A forked process has another one."""
    with _STARTING:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            _LOOPS.clear()
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="swift-objects", daemon=True).start()
        return loop

"""MetadataStore: keys, values and revisions: all that is durable. SQLite by default; etcd fits behind it.

::

    (a coordinator)  hold     it alone has the store from here on, or is refused
                     read     once: from here on its memory is ahead of the store
                     commit   what has changed, under the condition that nobody else has changed it
                     close

Nothing is watched: whoever holds the store is the one who changes it.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from swift.log.regular import open_regular

T = TypeVar("T")


class StoreConflict(Exception):
    """Another coordinator has written this since it was read here. This one must stop."""


class StoreHeld(Exception):
    """Another coordinator has the store."""


class StoreFailed(Exception):
    """The store could not do it (no space, disk error). What was written last is as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    value: str
    revision: int
    """Of the transaction that put it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transaction:
    """All of it, or nothing."""

    expected: Mapping[str, int] = field(default_factory=dict)
    """key -> the revision that it must have; 0: it must not be there."""
    puts: Mapping[str, str] = field(default_factory=dict)
    deletes: Collection[str] = ()
    """Keys that need not be there."""


class MetadataStore(Protocol):
    """Values of text by key. Nothing blocks the loop; every method may raise StoreFailed.

    One conformance test runs over all implementations.
    """

    async def hold(self) -> None:
        """Nobody else has the store until it is closed, or this process is gone. StoreHeld: somebody has it.

        A lease that can be lost while its holder lives need not be told: whoever comes next writes, and then `commit`
        raises StoreConflict here.
        """
        ...

    async def read(self, prefix: str = "") -> dict[str, Stored]:
        """Every key that begins so, by order."""
        ...

    async def commit(self, transaction: Transaction) -> int:
        """Its revision, above all before it; durable when it returns. StoreConflict: a condition does not hold."""
        ...

    async def close(self) -> None: ...


class MemoryStore:
    """For tests."""

    def __init__(self) -> None:
        self.rows: dict[str, Stored] = {}
        self._revision = 0
        self._held = False

    async def hold(self) -> None:
        if self._held:
            raise StoreHeld("another coordinator uses it")
        self._held = True

    async def read(self, prefix: str = "") -> dict[str, Stored]:
        return {key: stored for key, stored in sorted(self.rows.items()) if key.startswith(prefix)}

    async def commit(self, transaction: Transaction) -> int:
        """As `MetadataStore.commit`."""
        for key, expected in transaction.expected.items():
            there = self.rows.get(key)
            _check(key, 0 if there is None else there.revision, expected)
        self._revision += 1
        for key in transaction.deletes:
            self.rows.pop(key, None)
        for key, value in transaction.puts.items():
            self.rows[key] = Stored(value=value, revision=self._revision)
        return self._revision

    async def close(self) -> None:
        self._held = False


class SqliteStore:
    """WAL mode with synchronous=FULL: each commit is synced before it returns. A thread of its own does the work.

    It is held by a lock on the file `lock` beside it, which the kernel takes from a process that is gone.
    """

    def __init__(self, path: Path) -> None:
        """StoreFailed: it is no sound database, or one of an older version."""
        self._lock_path = path.with_name("lock")
        self._lock: BinaryIO | None = None
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.text_factory = lambda text: text.decode(errors="replace")  # one value may be no text
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            (said,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            older = self._db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'jobs'").fetchone()
            if said == "ok" and older is None:
                self._make_tables()
        except sqlite3.Error as error:
            raise StoreFailed(f"{path}: {error}; put a copy of it back") from error
        if said != "ok":
            raise StoreFailed(f"{path} is damaged: {said}; put a copy of it back")
        if older is not None:
            raise StoreFailed(
                f"{path} was written by an older version of the coordinator: let that one finish its jobs, or give "
                "another --directory"
            )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    def _make_tables(self) -> None:
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS rows"
            " (key TEXT PRIMARY KEY, value TEXT NOT NULL, revision INTEGER NOT NULL) STRICT, WITHOUT ROWID"
        )
        self._db.execute("CREATE TABLE IF NOT EXISTS head (revision INTEGER NOT NULL) STRICT")
        self._db.execute("INSERT INTO head SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM head)")

    async def hold(self) -> None:
        """As `MetadataStore.hold`."""
        await self._in_thread(self._hold)

    async def read(self, prefix: str = "") -> dict[str, Stored]:
        """As `MetadataStore.read`."""
        return await self._in_thread(lambda: self._read(prefix))

    async def commit(self, transaction: Transaction) -> int:
        """As `MetadataStore.commit`: one transaction of SQLite."""
        return await self._in_thread(lambda: self._commit(transaction))

    async def close(self) -> None:
        """Once what was asked for is done."""
        await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StoreFailed(str(error)) from error

    def _hold(self) -> None:
        try:
            lock = os.fdopen(open_regular(self._lock_path, os.O_RDWR | os.O_CREAT), "ab")
        except OSError as error:
            raise StoreFailed(f"{self._lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StoreHeld(f"{self._lock_path.parent}: another coordinator uses it") from None
        self._lock = lock

    def _close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def _read(self, prefix: str) -> dict[str, Stored]:
        rows = self._db.execute("SELECT key, value, revision FROM rows ORDER BY key")
        return {
            key: Stored(value=value, revision=revision)
            for key, value, revision in rows
            if key.startswith(prefix)
        }

    def _commit(self, transaction: Transaction) -> int:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for key, expected in transaction.expected.items():
                there = db.execute("SELECT revision FROM rows WHERE key = ?", (key,)).fetchone()
                _check(key, 0 if there is None else there[0], expected)
            (revision,) = db.execute("UPDATE head SET revision = revision + 1 RETURNING revision").fetchone()
            db.executemany("DELETE FROM rows WHERE key = ?", [(key,) for key in transaction.deletes])
            db.executemany(
                "INSERT INTO rows VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET value = excluded.value, revision = excluded.revision",
                [(key, value, revision) for key, value in transaction.puts.items()],
            )
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite may have taken it back itself
                db.execute("ROLLBACK")
            raise
        return int(revision)


def _check(key: str, revision: int, expected: int) -> None:
    if revision != expected:
        raise StoreConflict(f"{key} is at revision {revision}, not {expected}")

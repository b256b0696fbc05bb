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
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import crc32c
import xxhash

from swift_ft.files import open_regular
from swift_ft.log.directory import sync_directory

T = TypeVar("T")

REMEDY = "put a copy of the whole directory back, or give another --directory and other names to its jobs"
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The second: SQLite's message repeats what is no text."""
_DIGITS = 20
_PLACE_BYTES = 512  # a sector, which a disk writes whole or not at all
_COLUMNS = {"rows.key", "rows.value", "rows.revision", "head.revision", "head.digest", "head.checksum"}


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


class Acknowledged:
    """A file with the last revision that a commit has returned; whoever has locked it holds the store.

    It is written in two places in turn: a write that is cut off leaves the one before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def hold(self) -> int | None:
        """The revision; None: it says none. StoreHeld; StoreFailed."""
        try:
            file = os.fdopen(open_regular(self.path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except OSError as error:
            raise StoreFailed(f"{self.path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StoreHeld(f"{self.path.parent}: another coordinator uses it") from None
        self._file = file
        said = [os.pread(file.fileno(), _PLACE_BYTES, place * _PLACE_BYTES).rstrip(b"\0") for place in (0, 1)]
        return max((int(text[:_DIGITS]) for text in said if _is_place(text)), default=None)

    def set(self, revision: int) -> None:
        """Durable when it returns. StoreFailed."""
        assert self._file is not None
        try:
            os.pwrite(self._file.fileno(), _place(revision), revision % 2 * _PLACE_BYTES)
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise StoreFailed(f"{self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _place(revision: int) -> bytes:
    digits = b"%0*d" % (_DIGITS, revision)
    return digits + b" %08x\n" % crc32c.crc32c(digits)


def _is_place(text: bytes) -> bool:
    return text[:_DIGITS].isdigit() and text == _place(int(text[:_DIGITS]))


class SqliteStore:
    """A database in WAL mode, and beside it the file `acknowledged`.

    SQLite takes a damaged frame of its write-ahead log for the end of it: what follows is gone without a word. So a
    commit is synced in the log (synchronous=FULL), and then its revision in `acknowledged`. A database that is behind
    that is refused, whatever has set it back. So is one whose rows are not those of the digest in `head`, which is over
    every key and its revision. The values carry checksums of their own (`job_record`).

    It is looked at read-only first: a connection that may write puts what it has understood of the log into the
    database when it closes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acknowledged = Acknowledged(path.with_name("acknowledged"))
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def hold(self) -> None:
        """As `MetadataStore.hold`. StoreFailed: damaged, or of an older version; nothing of it was changed then."""
        await self._in_thread(self._hold)

    async def read(self, prefix: str = "") -> dict[str, Stored]:
        """As `MetadataStore.read`. StoreFailed: it is damaged."""
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
        except _ERRORS as error:
            raise StoreFailed(f"{self._path}: {error}") from error

    def _hold(self) -> None:
        try:
            self._open(self._acknowledged.hold())
        except BaseException:
            self._close()
            raise

    def _open(self, acknowledged: int | None) -> None:
        if self._path.is_file() and self._path.stat().st_size:  # of an empty one SQLite would remove the log
            try:
                with closing(self._connect("ro")) as db:
                    self._look_at(db, acknowledged)
            except _ERRORS as error:
                raise self._damaged(str(error)) from error
        elif acknowledged:
            raise StoreFailed(f"{self._path} is empty or gone; {REMEDY}")
        self._connection = db = self._connect("rwc")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        if not _columns(db):
            _make_tables(db)
        self._acknowledged.set(self._head(db)[0])  # the last one may have died before it could
        sync_directory(self._path.parent)

    def _look_at(self, db: sqlite3.Connection, acknowledged: int | None) -> None:
        """StoreFailed unless it is sound, and has all that was acknowledged."""
        (said,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if said != "ok":
            raise self._damaged(said)
        columns = _columns(db)
        if columns and columns != _COLUMNS and acknowledged is None:
            raise StoreFailed(
                f"{self._path} was written by an older version of the coordinator: let that one finish its jobs, or "
                "give another --directory"
            )
        revision = self._rows(db)[0] if columns else 0
        if acknowledged is None and revision:
            raise StoreFailed(f"{self._acknowledged.path} is damaged or gone; {REMEDY}")
        if acknowledged is not None and revision < acknowledged:
            raise self._damaged(f"it ends at revision {revision}, and {acknowledged} was acknowledged")

    def _damaged(self, why: str) -> StoreFailed:
        return StoreFailed(f"{self._path} is damaged: {' '.join(why.split())}; {REMEDY}")

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda text: text.decode(errors="replace")  # one value may be no text
        return db

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._acknowledged.close()

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None, "held first"
        return self._connection

    def _read(self, prefix: str) -> dict[str, Stored]:
        rows = self._rows(self._db)[1]
        return {key: stored for key, stored in rows.items() if key.startswith(prefix)}

    def _rows(self, db: sqlite3.Connection) -> tuple[int, dict[str, Stored]]:
        """The revision of the newest transaction, and all rows. StoreFailed: these are not what was written."""
        revision, digest = self._head(db)
        rows = db.execute("SELECT key, value, revision FROM rows ORDER BY key").fetchall()
        if _digest(sum(_mark(key, of) for key, _, of in rows)) != digest:
            raise self._damaged("rows are missing, or of another moment")
        return revision, {key: Stored(value=value, revision=of) for key, value, of in rows}

    def _head(self, db: sqlite3.Connection) -> tuple[int, str]:
        """(revision, digest). StoreFailed: they are not what was written."""
        heads = db.execute("SELECT revision, digest, checksum FROM head").fetchall()
        if len(heads) != 1 or heads[0][2] != _checksum(*heads[0][:2]):
            raise self._damaged("the checksum of its head does not match")
        revision, digest, _ = heads[0]
        return revision, digest

    def _commit(self, transaction: Transaction) -> int:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            there = self._revisions_of({*transaction.expected, *transaction.deletes, *transaction.puts})
            for key, expected in transaction.expected.items():
                _check(key, there.get(key, 0), expected)
            revision, digest = self._head(db)
            revision += 1
            changed = {*transaction.deletes, *transaction.puts}
            marks = int(digest, 16) - sum(_mark(key, there[key]) for key in changed & there.keys())
            marks += sum(_mark(key, revision) for key in transaction.puts)
            db.executemany("DELETE FROM rows WHERE key = ?", [(key,) for key in transaction.deletes])
            db.executemany(
                "INSERT INTO rows VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET value = excluded.value, revision = excluded.revision",
                [(key, value, revision) for key, value in transaction.puts.items()],
            )
            head = (revision, _digest(marks))
            db.execute("UPDATE head SET revision = ?, digest = ?, checksum = ?", (*head, _checksum(*head)))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite may have taken it back itself
                db.execute("ROLLBACK")
            raise
        self._acknowledged.set(revision)
        return revision

    def _revisions_of(self, keys: Collection[str]) -> dict[str, int]:
        """Of those that are there."""
        asked = "SELECT key, revision FROM rows WHERE key IN (SELECT value FROM json_each(?))"
        return dict(self._db.execute(asked, (json.dumps(list(keys)),)).fetchall())


def _make_tables(db: sqlite3.Connection) -> None:
    """All of them, or none."""
    db.execute("BEGIN")
    db.execute(
        "CREATE TABLE rows (key TEXT PRIMARY KEY, value TEXT NOT NULL, revision INTEGER NOT NULL) STRICT, WITHOUT ROWID"
    )
    db.execute(
        "CREATE TABLE head (revision INTEGER NOT NULL, digest TEXT NOT NULL, checksum TEXT NOT NULL) STRICT"
    )
    head = (0, _digest(0))
    db.execute("INSERT INTO head VALUES (?, ?, ?)", (*head, _checksum(*head)))
    db.execute("COMMIT")


def _columns(db: sqlite3.Connection) -> set[str]:
    named = "SELECT t.name || '.' || c.name FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table'"
    return {name for (name,) in db.execute(named)}


def _mark(key: str, revision: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{key} {revision}".encode(errors="replace"))


def _digest(marks: int) -> str:
    return f"{marks % (1 << 64):016x}"


def _checksum(revision: int, digest: str) -> str:
    return f"{crc32c.crc32c(f'{revision} {digest}'.encode(errors='replace')):08x}"


def _check(key: str, revision: int, expected: int) -> None:
    if revision != expected:
        raise StoreConflict(f"{key} is at revision {revision}, not {expected}")

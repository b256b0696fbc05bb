"""MetadataStore: all durable state, as keys and values. SQLite by default; the interface also fits etcd.

::

    (a coordinator)  hold     takes the store exclusively, or is refused
                     read     once at the start: from then on its memory is ahead of the store
                     commit   the changes, all or none
                     holds    before anything is answered
                     close

There is no watch: only the holder of the store changes it.
"""

import asyncio
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import crc32c
import xxhash

from swift_ft.files import open_regular, sync_directory

T = TypeVar("T")

REMEDY = "put a copy of the whole directory back, or begin in another one, with other names for its jobs"
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""UnicodeDecodeError: SQLite's message repeats a value that is not text."""
_DIGITS = 20
_PLACE_BYTES = 512  # a sector, which a disk writes atomically


class StoreConflict(Exception):
    """Another coordinator has taken the store over. This one must stop."""


class StoreHeld(Exception):
    """Another coordinator holds the store."""


class StoreFailed(Exception):
    """The store failed (no space, disk error). The last commit is unchanged."""


class MetadataStore(Protocol):
    """Text values by key. No method blocks the loop; every method may raise StoreFailed.

    One conformance test runs over all implementations.
    """

    async def hold(self) -> None:
        """Takes the store exclusively until it is closed or this process ends. Raises StoreHeld if it is held.

        An implementation may use a lease that can be lost while its holder lives: see `holds`.
        """
        ...

    def holds(self) -> bool:
        """Returns whether no other process can hold the store now; False while that is not certain. Raises
        StoreConflict once this holder has lost it for good."""
        ...

    async def read(self, prefix: str = "") -> dict[str, str]:
        """Returns every key with this prefix, in order of keys."""
        ...

    async def commit(self, puts: Mapping[str, str], deletes: Collection[str] = ()) -> None:
        """Commits all durably, or nothing. Keys to delete need not exist. Raises StoreConflict if it is not held, or
        another process has written to it."""
        ...

    async def close(self) -> None: ...


class Acknowledged:
    """A file with the revision of the last acknowledged commit; its lock is the lock of the store.

    Writes alternate between two slots: an interrupted write leaves the previous slot intact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def hold(self) -> int | None:
        """Locks the file and returns its revision; None if it has none. Raises StoreHeld, StoreFailed."""
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
    """A database in WAL mode, and the file `acknowledged` next to it.

    SQLite takes a damaged frame of its write-ahead log for the end of the log: later frames are lost silently. So a
    commit is synced in the log (synchronous=FULL), and then its revision is written to `acknowledged`. A database older
    than that revision is refused, whatever the cause. So is one whose rows do not match the digest in `head`, which
    covers every key and its revision. The values carry their own checksums (`job_record`).

    The database is checked read-only first: on close, a writable connection would checkpoint the part of the log that
    it could read into the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acknowledged = Acknowledged(path.with_name("acknowledged"))
        self._connection: sqlite3.Connection | None = None
        self._revision = 0
        """Revision of the newest commit: this holder's, or the last one before it."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def hold(self) -> None:
        """As `MetadataStore.hold`. A damaged or older database is left unchanged: StoreFailed."""
        await self._in_thread(self._hold)

    def holds(self) -> bool:
        return True

    async def read(self, prefix: str = "") -> dict[str, str]:
        return await self._in_thread(lambda: self._read(prefix))

    async def commit(self, puts: Mapping[str, str], deletes: Collection[str] = ()) -> None:
        await self._in_thread(lambda: self._commit(puts, deletes))

    async def close(self) -> None:
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
        if self._path.is_file() and self._path.stat().st_size:  # SQLite removes the log of an empty one
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
        if not _has_tables(db):
            _make_tables(db)
        self._revision = self._head(db)[0]
        self._acknowledged.set(self._revision)  # the previous process may have died before it could
        sync_directory(self._path.parent)

    def _look_at(self, db: sqlite3.Connection, acknowledged: int | None) -> None:
        """Raises StoreFailed unless the database is intact and holds every acknowledged commit."""
        (said,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if said != "ok":
            raise self._damaged(said)
        revision = self._rows(db)[0] if _has_tables(db) else 0
        if acknowledged is None and revision:
            raise StoreFailed(f"{self._acknowledged.path} is damaged or gone; {REMEDY}")
        if acknowledged is not None and revision < acknowledged:
            raise self._damaged(f"it ends at revision {revision}, and {acknowledged} was acknowledged")

    def _damaged(self, why: str) -> StoreFailed:
        return StoreFailed(f"{self._path} is damaged: {' '.join(why.split())}; {REMEDY}")

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda text: text.decode(errors="replace")  # a damaged value may not be text
        return db

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._acknowledged.close()

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None, "held first"
        return self._connection

    def _read(self, prefix: str) -> dict[str, str]:
        rows = self._rows(self._db)[1]
        return {key: value for key, value in rows.items() if key.startswith(prefix)}

    def _rows(self, db: sqlite3.Connection) -> tuple[int, dict[str, str]]:
        """Returns (newest revision, all rows). Raises StoreFailed if they are not what was written."""
        revision, digest = self._head(db)
        rows = db.execute("SELECT key, value, revision FROM rows ORDER BY key").fetchall()
        if _digest(sum(_mark(key, of) for key, _, of in rows)) != digest:
            raise self._damaged("rows are missing, or of another moment")
        return revision, {key: value for key, value, _ in rows}

    def _head(self, db: sqlite3.Connection) -> tuple[int, str]:
        """Returns (revision, digest). Raises StoreFailed if they are not what was written."""
        heads = db.execute("SELECT revision, digest, checksum FROM head").fetchall()
        if len(heads) != 1 or heads[0][2] != _checksum(*heads[0][:2]):
            raise self._damaged("the checksum of its head does not match")
        revision, digest, _ = heads[0]
        return revision, digest

    def _commit(self, puts: Mapping[str, str], deletes: Collection[str]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            revision, digest = self._head(db)
            if revision != self._revision:  # a file system without locks, or the locked file was replaced
                raise StoreConflict(f"{self._path}: another coordinator has written to it")
            there = self._revisions_of([*deletes, *puts])
            revision += 1
            marks = int(digest, 16) - sum(_mark(key, of) for key, of in there.items())
            marks += sum(_mark(key, revision) for key in puts)
            db.executemany("DELETE FROM rows WHERE key = ?", [(key,) for key in deletes])
            db.executemany(
                "INSERT INTO rows VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET value = excluded.value, revision = excluded.revision",
                [(key, value, revision) for key, value in puts.items()],
            )
            head = (revision, _digest(marks))
            db.execute("UPDATE head SET revision = ?, digest = ?, checksum = ?", (*head, _checksum(*head)))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite may have rolled back itself
                db.execute("ROLLBACK")
            raise
        self._revision = revision
        self._acknowledged.set(revision)

    def _revisions_of(self, keys: list[str]) -> dict[str, int]:
        asked = "SELECT key, revision FROM rows WHERE key IN (SELECT value FROM json_each(?))"
        return dict(self._db.execute(asked, (json.dumps(keys),)).fetchall())


def _make_tables(db: sqlite3.Connection) -> None:
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


def _has_tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_schema").fetchone() is not None


def _mark(key: str, revision: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{key} {revision}".encode(errors="replace"))


def _digest(marks: int) -> str:
    return f"{marks % (1 << 64):016x}"


def _checksum(revision: int, digest: str) -> str:
    return f"{crc32c.crc32c(f'{revision} {digest}'.encode(errors='replace')):08x}"

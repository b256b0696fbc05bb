"""MetadataStore: where the rows of jobs are kept. SQLite by default; a distributed store fits behind it."""

import sqlite3
from pathlib import Path
from typing import Protocol


class StoreConflict(Exception):
    """Another coordinator has written this job since it was read here. This one must stop."""


class StoreFailed(Exception):
    """The store could not do it (no space, disk error). What was written last is as it was."""


class MetadataStore(Protocol):
    """Rows of text by job name. A write is durable when `save` returns.

    `save` is conditional, so that of two coordinators over one distributed store only one acts: etcd has it as
    a transaction on the key's revision. One conformance test runs over all implementations.
    """

    def load(self) -> dict[str, tuple[int, str]]:
        """job -> (revision, row)."""
        ...

    def save(self, job: str, row: str, *, expected_revision: int, revision: int) -> None:
        """Replaces the row of `expected_revision` (0: there is none yet). StoreConflict, StoreFailed."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """For tests."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, str]] = {}

    def load(self) -> dict[str, tuple[int, str]]:
        return dict(self._rows)

    def save(self, job: str, row: str, *, expected_revision: int, revision: int) -> None:
        stored = self._rows.get(job, (0, ""))[0]
        if stored != expected_revision:
            raise StoreConflict(f"job {job} is at revision {stored}, not {expected_revision}")
        self._rows[job] = (revision, row)

    def close(self) -> None:
        pass


class SqliteStore:
    """WAL mode with synchronous=FULL: each commit is synced before `save` returns."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.text_factory = lambda text: text.decode(errors="replace")  # one row may be no text
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS jobs"
                " (job TEXT PRIMARY KEY, revision INTEGER NOT NULL, row TEXT NOT NULL) STRICT"
            )
            (said,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.Error as error:
            raise StoreFailed(f"{path}: {error}; put a copy of it back") from error
        if said != "ok":
            raise StoreFailed(f"{path} is damaged: {said}; put a copy of it back")

    def load(self) -> dict[str, tuple[int, str]]:
        try:
            rows = self._db.execute("SELECT job, revision, row FROM jobs").fetchall()
        except sqlite3.Error as error:
            raise StoreFailed(str(error)) from error
        return {job: (revision, row) for job, revision, row in rows}

    def save(self, job: str, row: str, *, expected_revision: int, revision: int) -> None:
        """As `MetadataStore.save`. Raises StoreFailed, and StoreConflict if the row is at another revision."""
        try:
            if expected_revision == 0:
                written = self._db.execute(
                    "INSERT INTO jobs VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (job, revision, row)
                )
            else:
                written = self._db.execute(
                    "UPDATE jobs SET revision = ?, row = ? WHERE job = ? AND revision = ?",
                    (revision, row, job, expected_revision),
                )
        except sqlite3.Error as error:
            raise StoreFailed(str(error)) from error
        if written.rowcount != 1:
            raise StoreConflict(f"job {job} is not at revision {expected_revision}")

    def close(self) -> None:
        self._db.close()

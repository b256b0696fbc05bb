"""One conformance test for every MetadataStore, and what only the SQLite one can show."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from services.coordinator.store import MemoryStore, MetadataStore, SqliteStore, StoreConflict, StoreFailed

Opener = Callable[[], MetadataStore]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same store each time."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "rows.sqlite")
    memory = MemoryStore()
    return lambda: memory


def test_conformance(opener: Opener) -> None:
    store = opener()
    assert store.load() == {}
    store.save("a", "first", expected_revision=0, revision=1)
    store.save("b", "other", expected_revision=0, revision=4)
    store.save("a", "second", expected_revision=1, revision=3)
    assert store.load() == {"a": (3, "second"), "b": (4, "other")}

    for expected in (0, 1, 2, 4):
        with pytest.raises(StoreConflict):
            store.save("a", "of another coordinator", expected_revision=expected, revision=9)
    with pytest.raises(StoreConflict):
        store.save("c", "not there yet", expected_revision=1, revision=2)
    assert store.load() == {"a": (3, "second"), "b": (4, "other")}

    store.close()
    again = opener()
    assert again.load() == {"a": (3, "second"), "b": (4, "other")}
    again.close()


def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "rows.sqlite")
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    store.close()


def test_no_space_is_named_and_loses_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "rows.sqlite")
    store.save("a", "row", expected_revision=0, revision=1)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFailed, match="full"):
        store.save("a", "x" * 100_000, expected_revision=1, revision=2)
    assert store.load() == {"a": (1, "row")}
    store.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").write_text("something else, and long enough to be a header" * 100)
    with pytest.raises(StoreFailed, match=r"rows\.sqlite: file is not a database"):
        SqliteStore(tmp_path / "rows.sqlite")


def test_a_second_writer_waits_or_fails_but_never_mixes(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "rows.sqlite")
    other = sqlite3.connect(tmp_path / "rows.sqlite", isolation_level=None)
    other.execute("INSERT INTO jobs VALUES ('a', 7, 'theirs')")
    with pytest.raises(StoreConflict):
        store.save("a", "mine", expected_revision=0, revision=1)
    assert store.load() == {"a": (7, "theirs")}
    other.close()
    store.close()

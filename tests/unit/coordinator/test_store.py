"""One conformance test for every MetadataStore, and what only one of them can show."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from swift_ft._pb import etcd_pb2
from swift_ft.credentials import Credentials
from swift_ft.errors import UsageError
from swift_ft_services.coordinator import etcd_store
from swift_ft_services.coordinator.etcd_store import EtcdStore
from swift_ft_services.coordinator.store import (
    MetadataStore,
    SqliteStore,
    StoreConflict,
    StoreFailed,
    StoreHeld,
)
from tests.fake_etcd import FakeEtcd
from tests.memory_store import MemoryStore

Opener = Callable[[], Awaitable[MetadataStore]]


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    with FakeEtcd() as fake:
        yield fake


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, etcd: FakeEtcd) -> Opener:
    """Opens and holds the same store each time."""
    memory = MemoryStore()

    async def opened() -> MetadataStore:
        if request.param == "etcd":
            return await held_in(etcd)
        store = SqliteStore(tmp_path / "rows.sqlite") if request.param == "sqlite" else memory
        await store.hold()
        return store

    return opened


async def held_in(etcd: FakeEtcd, name: str = "a:1") -> EtcdStore:
    store = EtcdStore([etcd.address], "swift/test", Credentials(), name=lambda: name)
    try:
        await store.hold()
    except BaseException:
        await store.close()
        raise
    return store


async def test_what_is_committed_is_there(opener: Opener) -> None:
    store = await opener()
    assert await store.read() == {}
    await store.commit({"a/1": "one", "a/2": "two", "b": "other"})
    await store.commit({"a/1": "1", "c": "new"}, ["a/2", "x"])
    assert await store.read() == {"a/1": "1", "b": "other", "c": "new"}
    assert list(await store.read()) == ["a/1", "b", "c"]
    assert await store.read("a/") == {"a/1": "1"}
    await store.commit({}, ["c"])
    await asyncio.gather(*(store.commit({"b": str(n)}) for n in range(20)))
    await store.close()
    again = await opener()
    assert await again.read() == {"a/1": "1", "b": "19"}
    await again.commit({"c": "again"})
    await again.close()


async def test_one_has_the_store_until_it_is_closed(opener: Opener) -> None:
    store = await opener()
    with pytest.raises(StoreHeld, match="another coordinator uses it"):
        await opener()
    await store.commit({"a": "of the holder"})
    await store.close()
    again = await opener()
    assert list(await again.read()) == ["a"]
    await again.close()


BIG = {f"k{number}": "é" * (number * 2000) for number in range(300)}


async def test_a_transaction_of_any_size_is_made_whole(etcd: FakeEtcd) -> None:
    store = await held_in(etcd)
    await store.commit(BIG)
    assert etcd.transactions > 100
    assert await store.read() == BIG
    await store.commit(dict.fromkeys(BIG, ""), ["none"])
    assert await store.read() == dict.fromkeys(BIG, "")
    # One piece of each value is left, and nothing that was staged.
    assert len(etcd.rows) == len(BIG) + 2
    await store.close()


@pytest.mark.parametrize("after", [0, 1, 150, 200])
async def test_a_large_transaction_that_is_cut_off_is_made_by_the_next_holder_or_by_nobody(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The holder ends after so many of its transactions: in the midst of the staging, or of what follows the commit."""
    store = await held_in(etcd)
    await store.commit({"k1": "before", "other": "before"})
    real, left = etcd._txn, [after]

    def txn(request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        left[0] -= 1
        if left[0] < 0:
            etcd._end(next(iter(etcd._leases)))
        return real(request)

    monkeypatch.setattr(etcd, "_txn", txn)
    with pytest.raises(StoreConflict, match="another coordinator has taken the store over"):
        await store.commit(BIG)
    monkeypatch.undo()
    committed = b'"staged": 0' not in etcd.rows[b"swift/test/head"].value
    assert committed == (after == 200)
    second = await held_in(etcd, "b:1")
    there = await second.read()
    assert there == ({**BIG, "other": "before"} if committed else {"k1": "before", "other": "before"})
    assert not [key for key in etcd.rows if b"/staged/" in key]
    await store.close()
    await second.close()


async def test_a_commit_whose_answer_is_lost_is_made_once(etcd: FakeEtcd) -> None:
    store = await held_in(etcd)
    etcd.lost_answers = 1
    await store.commit({"a": "one"})
    await store.commit({"a": "two"})
    assert store._head[0] == 2
    etcd.lost_answers = 1
    await store.close()
    etcd.lost_answers = 1
    again = await held_in(etcd)
    assert (await again.read(), again._head[0]) == ({"a": "two"}, 2)
    await again.close()


async def test_an_attempt_that_is_carried_out_late_changes_nothing(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that is paused has read a request; its repetition at another member is carried out, and what follows."""
    real, asked = etcd._txn, list[etcd_pb2.TxnRequest]()

    def txn(request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        asked.append(request)
        return real(request)

    monkeypatch.setattr(etcd, "_txn", txn)
    key = b"swift/test/staged/00000000"  # an earlier holder has left it
    etcd.rows[key] = etcd_pb2.KeyValue(key=key, value=b"left", create_revision=1, mod_revision=1)
    store = await held_in(etcd)
    await store.commit(BIG)
    await store.commit({"k299": "newer"})
    before = await store.read()
    assert before["k299"] == "newer"
    assert len(asked) > 100
    assert not [request for request in asked if real(request).succeeded]
    assert await store.read() == before
    await store.close()


async def test_renewals_go_on_after_a_call_that_breaks_off(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC raises asyncio's own error where a call has ended before it was written to."""
    renewed, keep_alive = asyncio.Event(), EtcdStore._keep_alive
    errors: list[Exception] = [
        asyncio.InvalidStateError("RPC already finished"),
        UsageError("half written"),
    ]

    async def broken(self: EtcdStore, lease: int) -> int:
        if errors:
            raise errors.pop()
        renewed.set()
        return await keep_alive(self, lease)

    monkeypatch.setattr(EtcdStore, "_keep_alive", broken)
    store = await held_in(etcd)
    async with asyncio.timeout(10):
        await renewed.wait()
    assert store.holds()
    await store.close()


async def test_a_page_that_takes_longer_than_an_attempt_arrives(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "ATTEMPT_S", 0.1)
    store = await held_in(etcd)
    values = {f"k{number:02d}": "x" * 4096 for number in range(2 * etcd_store.PAGE)}
    await store.commit(values)
    etcd.bytes_per_s = etcd_store.PAGE * 4096 / 0.3
    assert await store.read("k") == values
    await store.close()


async def test_who_stands_by_writes_nothing(etcd: FakeEtcd) -> None:
    first = await held_in(etcd)
    before = etcd.revision
    for _ in range(3):
        with pytest.raises(StoreHeld, match="a:1"):
            await held_in(etcd, "b:1")
    assert etcd.revision == before
    await first.close()


async def test_a_holder_without_its_lease_answers_and_commits_nothing(etcd: FakeEtcd) -> None:
    now = [0.0]
    store = EtcdStore([etcd.address], "p", Credentials(), clock=lambda: now[0])
    await store.hold()
    assert store.holds()
    now[0] = 10.0
    assert not store.holds()  # it was stopped, and does not know yet
    etcd.end_leases()
    second = EtcdStore([etcd.address], "p", Credentials())
    await second.hold()
    await second.commit({"a": "of the second"})
    with pytest.raises(StoreConflict, match="has taken the store over"):
        await store.commit({"a": "of the first"})
    with pytest.raises(StoreConflict):
        store.holds()
    assert (await second.read())["a"] == "of the second"
    await second.close()
    await store.hold()
    assert (await store.read())["a"] == "of the second"
    await store.close()


async def held(directory: Path) -> SqliteStore:
    store = SqliteStore(directory / "rows.sqlite")
    await store.hold()
    return store


async def test_a_commit_that_was_asked_for_before_the_store_was_held_anew_is_refused(etcd: FakeEtcd) -> None:
    """Meanwhile another one may have written to it."""
    store = await held_in(etcd)
    async with store._turn:  # as while a page is read
        late = asyncio.create_task(store.commit({"a": "from before"}))
        await asyncio.sleep(0)
        etcd.end_leases()
        other = await held_in(etcd, "b:1")
        await other.commit({"a": "of another holder"})
        await other.close()
        again = asyncio.create_task(store.hold())
        while store._renewing is not None:  # it gives the old hold up, and waits for its turn
            await asyncio.sleep(0.005)
        later = asyncio.create_task(store.commit({"a": "later"}))
        await asyncio.sleep(0)
    for commit in (late, later):
        with pytest.raises(StoreConflict):
            await commit
    await again
    assert store.holds()
    assert await store.read() == {"a": "of another holder"}
    await store.close()


async def test_a_commit_over_another_one_s_is_refused(tmp_path: Path) -> None:
    """SQLite on a file system without locks."""
    first, second = SqliteStore(tmp_path / "meta.db"), SqliteStore(tmp_path / "meta.db")
    await first.hold()
    await first.commit({"a": "1"})
    (tmp_path / "acknowledged").rename(tmp_path / "locked")
    (tmp_path / "acknowledged").write_bytes((tmp_path / "locked").read_bytes())
    await second.hold()
    await second.commit({"b": "2"})
    with pytest.raises(StoreConflict, match="another coordinator has written to it"):
        await first.commit({"a": "3"})
    assert await second.read() == {"a": "1", "b": "2"}
    await first.close()
    await second.close()


async def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    store = await held(tmp_path)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    await store.close()


COMMITS = """
import asyncio, sys
from pathlib import Path
from swift_ft_services.coordinator.store import SqliteStore

async def run():
    store = SqliteStore(Path(sys.argv[1]))
    await store.hold()
    number = int((await store.read()).get("b", 0))
    while True:
        number += 1
        await store.commit({"a": "x" * 20_000, "b": str(number)}, ["c"])
        print(number, flush=True)
        await store.commit({"c": "z" * 3000})

asyncio.run(run())
"""


def test_killed_within_a_commit_it_starts_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    async def read() -> int:
        store = await held(tmp_path)
        rows = await store.read()
        await store.close()
        return int(rows["b"])

    for count in range(1, 6):
        command = [sys.executable, "-c", COMMITS, str(tmp_path / "rows.sqlite")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(7 * count)]
            process.kill()
            said += process.stdout.read().splitlines()
        assert asyncio.run(read()) >= int(said[-1])


async def test_no_space_is_named_and_loses_nothing(tmp_path: Path) -> None:
    store = await held(tmp_path)
    await store.commit({"a": "row"})
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFailed, match="full"):
        await store.commit({"b": "small", "a": "x" * 100_000})
    assert await store.read() == {"a": "row"}
    await store.close()


async def test_the_loop_turns_while_sqlite_waits(tmp_path: Path) -> None:
    """Another process has the file locked: nobody else waits for that."""
    store = await held(tmp_path)
    other = sqlite3.connect(tmp_path / "rows.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = asyncio.create_task(store.commit({"a": "mine"}))
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not writes.done()
    other.execute("COMMIT")
    await writes
    other.close()
    await store.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").write_text("something else, and long enough to be a header" * 100)
    with pytest.raises(StoreFailed, match=r"rows\.sqlite is damaged: file is not a database; put a copy"):
        asyncio.run(held(tmp_path))


def test_a_database_with_other_tables_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    older = sqlite3.connect(path, isolation_level=None)
    older.execute(
        "CREATE TABLE jobs (job TEXT PRIMARY KEY, revision INTEGER NOT NULL, row TEXT NOT NULL) STRICT"
    )
    older.execute("INSERT INTO jobs VALUES ('a', 7, 'under way')")
    with pytest.raises(StoreFailed, match=r"rows\.sqlite is damaged: no such table: head; put a copy"):
        asyncio.run(held(tmp_path))
    assert older.execute("SELECT * FROM jobs").fetchall() == [("a", 7, "under way")]
    older.close()


async def test_rows_of_another_form_are_refused_and_left_as_they_are(etcd: FakeEtcd) -> None:
    store = await held_in(etcd)
    await store.commit({"a": "under way"})
    await store.close()
    row = etcd.rows[b"swift/test/rows/a\x000000"]
    row.value = older = b"7 1\nunder way"
    with pytest.raises(StoreFailed, match=r"the value of a is damaged"):
        await held_in(etcd)
    assert row.value == older

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
from swift_ft_services.coordinator.etcd_store import EtcdStore
from swift_ft_services.coordinator.store import (
    MetadataStore,
    SqliteStore,
    StoreConflict,
    Stored,
    StoreFailed,
    StoreHeld,
    Transaction,
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


def test_what_is_committed_is_there_with_its_revision(opener: Opener) -> None:
    async def run() -> None:
        store = await opener()
        assert await store.read() == {}
        first = await store.commit(Transaction(puts={"a/1": "one", "a/2": "two", "b": "other"}))
        assert first > 0
        second = await store.commit(
            Transaction(expected={"a/1": first, "c": 0}, puts={"a/1": "1", "c": "new"}, deletes=["a/2", "x"])
        )
        assert second > first
        found = {
            "a/1": Stored(value="1", revision=second),
            "b": Stored(value="other", revision=first),
            "c": Stored(value="new", revision=second),
        }
        assert await store.read() == found
        assert list(await store.read()) == ["a/1", "b", "c"]
        assert await store.read("a/") == {"a/1": found["a/1"]}
        third = await store.commit(Transaction(expected={"c": second}, deletes=["c"]))
        assert third > second
        await store.close()
        again = await opener()
        assert await again.read() == {key: found[key] for key in ("a/1", "b")}
        # Revisions do not begin anew, whatever was deleted.
        assert await again.commit(Transaction(puts={"c": "again"})) > third
        await again.close()

    asyncio.run(run())


def test_a_condition_that_does_not_hold_undoes_all(opener: Opener) -> None:
    async def run() -> None:
        store = await opener()
        there = await store.commit(Transaction(puts={"a": "first", "b": "second"}))
        before = await store.read()
        for expected in ({"a": 0}, {"a": there + 1}, {"a": there, "c": there}, {"a": there, "b": 0}):
            with pytest.raises(StoreConflict, match="is at revision"):
                await store.commit(
                    Transaction(expected=expected, puts={"a": "of another", "n": ""}, deletes=["b"])
                )
        assert await store.read() == before
        await store.commit(Transaction(expected={"a": there}, puts={"a": "mine"}))
        await store.close()

    asyncio.run(run())


def test_transactions_that_meet_are_one_after_the_other(opener: Opener) -> None:
    async def run() -> None:
        store = await opener()
        there = await store.commit(Transaction(puts={"a": ""}))
        tries = [store.commit(Transaction(expected={"a": there}, puts={"a": str(n)})) for n in range(20)]
        found = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(one, int) for one in found) == 1
        assert sum(isinstance(one, StoreConflict) for one in found) == 19
        await store.close()

    asyncio.run(run())


def test_one_has_the_store_until_it_is_closed(opener: Opener) -> None:
    async def run() -> None:
        store = await opener()
        with pytest.raises(StoreHeld, match="another coordinator uses it"):
            await opener()
        await store.commit(Transaction(puts={"a": "of the holder"}))
        await store.close()
        again = await opener()
        assert list(await again.read()) == ["a"]
        await again.close()

    asyncio.run(run())


BIG = {f"k{number}": "é" * (number * 2000) for number in range(300)}


def test_a_transaction_of_any_size_is_made_whole(etcd: FakeEtcd) -> None:
    async def run() -> None:
        store = await held_in(etcd)
        await store.commit(Transaction(puts=BIG))
        assert etcd.transactions > 100
        assert {key: stored.value for key, stored in (await store.read()).items()} == BIG
        second = await store.commit(Transaction(puts=dict.fromkeys(BIG, ""), deletes=["none"]))
        there = await store.read()
        assert there == dict.fromkeys(sorted(BIG), Stored(value="", revision=second))
        # One piece of each value is left, and nothing that was staged.
        assert len(etcd.rows) == len(BIG) + 2
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("after", [0, 1, 150, 200])
def test_a_large_transaction_that_is_cut_off_is_made_by_the_next_holder_or_by_nobody(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The holder ends after so many of its transactions: in the midst of the staging, or of what follows the commit."""

    async def run() -> None:
        store = await held_in(etcd)
        before = await store.commit(Transaction(puts={"k1": "before", "other": "before"}))
        real, left = etcd._txn, [after]

        def txn(request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
            left[0] -= 1
            if left[0] < 0:
                etcd._end(next(iter(etcd._leases)))
            return real(request)

        monkeypatch.setattr(etcd, "_txn", txn)
        with pytest.raises(StoreConflict, match="another coordinator has taken the store over"):
            await store.commit(Transaction(expected={"k1": before}, puts=BIG))
        monkeypatch.undo()
        committed = b'"staged": 0' not in etcd.rows[b"swift/test/head"].value
        assert committed == (after == 200)
        second = await held_in(etcd, "b:1")
        there = {key: stored.value for key, stored in (await second.read()).items()}
        assert there == ({**BIG, "other": "before"} if committed else {"k1": "before", "other": "before"})
        assert not [key for key in etcd.rows if b"/staged/" in key]
        await store.close()
        await second.close()

    asyncio.run(run())


def test_a_commit_whose_answer_is_lost_is_made_once(etcd: FakeEtcd) -> None:
    async def run() -> None:
        store = await held_in(etcd)
        etcd.lost_answers = 1
        first = await store.commit(Transaction(puts={"a": "one"}))
        assert await store.commit(Transaction(expected={"a": first}, puts={"a": "two"})) == first + 1
        etcd.lost_answers = 1
        await store.close()
        etcd.lost_answers = 1
        again = await held_in(etcd)
        assert (await again.read())["a"] == Stored(value="two", revision=first + 1)
        await again.close()

    asyncio.run(run())


def test_an_attempt_that_is_carried_out_late_changes_nothing(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that is paused has read a request; its repetition at another member is carried out, and what follows."""

    async def run() -> None:
        real, asked = etcd._txn, list[etcd_pb2.TxnRequest]()

        def txn(request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
            asked.append(request)
            return real(request)

        monkeypatch.setattr(etcd, "_txn", txn)
        key = b"swift/test/staged/00000000"  # an earlier holder has left it
        etcd.rows[key] = etcd_pb2.KeyValue(key=key, value=b"left", create_revision=1, mod_revision=1)
        store = await held_in(etcd)
        await store.commit(Transaction(puts=BIG))
        await store.commit(Transaction(puts={"k299": "newer"}))
        before = await store.read()
        assert before["k299"].value == "newer"
        assert len(asked) > 100
        assert not [request for request in asked if real(request).succeeded]
        assert await store.read() == before
        await store.close()

    asyncio.run(run())


def test_renewals_go_on_after_a_call_that_breaks_off(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC raises asyncio's own error where a call has ended before it was written to."""

    async def run() -> None:
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

    asyncio.run(run())


def test_who_stands_by_writes_nothing(etcd: FakeEtcd) -> None:
    async def run() -> None:
        first = await held_in(etcd)
        before = etcd.revision
        for _ in range(3):
            with pytest.raises(StoreHeld, match="a:1"):
                await held_in(etcd, "b:1")
        assert etcd.revision == before
        await first.close()

    asyncio.run(run())


def test_a_holder_without_its_lease_answers_and_commits_nothing(etcd: FakeEtcd) -> None:
    async def run() -> None:
        now = [0.0]
        store = EtcdStore([etcd.address], "p", Credentials(), clock=lambda: now[0])
        await store.hold()
        assert store.holds()
        now[0] = 10.0
        assert not store.holds()  # it was stopped, and does not know yet
        etcd.end_leases()
        second = EtcdStore([etcd.address], "p", Credentials())
        await second.hold()
        await second.commit(Transaction(puts={"a": "of the second"}))
        with pytest.raises(StoreConflict, match="has taken the store over"):
            await store.commit(Transaction(puts={"a": "of the first"}))
        with pytest.raises(StoreConflict):
            store.holds()
        assert (await second.read())["a"].value == "of the second"
        await second.close()
        await store.hold()
        assert (await store.read())["a"].value == "of the second"
        await store.close()

    asyncio.run(run())


async def held(directory: Path) -> SqliteStore:
    store = SqliteStore(directory / "rows.sqlite")
    await store.hold()
    return store


def test_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    async def run() -> None:
        store = await held(tmp_path)
        assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        await store.close()

    asyncio.run(run())


COMMITS = """
import asyncio, sys
from pathlib import Path
from swift_ft_services.coordinator.store import SqliteStore, Transaction

async def run():
    store = SqliteStore(Path(sys.argv[1]))
    await store.hold()
    while True:
        revision = await store.commit(Transaction(puts={"a": "x" * 20_000, "b": "y"}, deletes=["c"]))
        print(revision, flush=True)
        await store.commit(Transaction(puts={"c": "z" * 3000}))

asyncio.run(run())
"""


def test_killed_within_a_commit_it_starts_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    async def read() -> int:
        store = await held(tmp_path)
        rows = await store.read()
        await store.close()
        return max(stored.revision for stored in rows.values())

    for count in range(1, 6):
        command = [sys.executable, "-c", COMMITS, str(tmp_path / "rows.sqlite")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(7 * count)]
            process.kill()
            said += process.stdout.read().splitlines()
        assert asyncio.run(read()) >= int(said[-1])


def test_no_space_is_named_and_loses_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        store = await held(tmp_path)
        revision = await store.commit(Transaction(puts={"a": "row"}))
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreFailed, match="full"):
            await store.commit(Transaction(puts={"b": "small", "a": "x" * 100_000}))
        assert await store.read() == {"a": Stored(value="row", revision=revision)}
        await store.close()

    asyncio.run(run())


def test_the_loop_turns_while_sqlite_waits(tmp_path: Path) -> None:
    """Another process has the file locked: nobody else waits for that."""

    async def run() -> None:
        store = await held(tmp_path)
        other = sqlite3.connect(tmp_path / "rows.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writes = asyncio.create_task(store.commit(Transaction(puts={"a": "mine"})))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not writes.done()
        other.execute("COMMIT")
        await writes
        other.close()
        await store.close()

    asyncio.run(run())


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").write_text("something else, and long enough to be a header" * 100)
    with pytest.raises(StoreFailed, match=r"rows\.sqlite is damaged: file is not a database; put a copy"):
        asyncio.run(held(tmp_path))


def test_a_database_of_an_older_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    older = sqlite3.connect(path, isolation_level=None)
    older.execute(
        "CREATE TABLE jobs (job TEXT PRIMARY KEY, revision INTEGER NOT NULL, row TEXT NOT NULL) STRICT"
    )
    older.execute("INSERT INTO jobs VALUES ('a', 7, 'under way')")
    with pytest.raises(StoreFailed, match=r"older version of the coordinator: let that one finish its jobs"):
        asyncio.run(held(tmp_path))
    assert older.execute("SELECT * FROM jobs").fetchall() == [("a", 7, "under way")]
    older.close()

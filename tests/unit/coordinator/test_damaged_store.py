"""The coordinator's own files, damaged by seed: what is shown is what was stored, or it is named; others are served."""

import asyncio
import os
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError, UsageError
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.__main__ import hold, open_directory
from swift_ft_services.coordinator.driver import Apart, JobApart
from swift_ft_services.coordinator.job_record import ROOT, JobRow, by_job, decode
from swift_ft_services.coordinator.service import Servicer
from swift_ft_services.coordinator.store import SqliteStore, StoreFailed
from tests.unit.coordinator.driver_world import Aborted, Caller, FakeLogs, driver_of, join, running, sender

FILE = "coordinator.sqlite"
LOG = f"{FILE}-wal"
ACKNOWLEDGED = "acknowledged"
PAGE_BYTES = 4096
FLIPS = 60
"""Of one region."""


async def held(directory: Path) -> SqliteStore:
    store = SqliteStore(directory / FILE)
    await store.hold()
    return store


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job j in the database and k in the log, as it lies there when the process was killed; and
    `older`, of before."""
    at = tmp_path_factory.mktemp("base")

    async def fill() -> None:
        logs = FakeLogs()
        (at / "meta").mkdir()
        store = await held(at / "meta")
        driver = await running(logs, store)
        driver.stop()
        await store.close()
        shutil.copytree(at / "meta", at / "older")
        store = await held(at / "meta")
        driver = await driver_of(logs, store)
        await driver.join("k", join())
        for version in (5, 10, 15):
            await driver.apply("k", pb.CheckpointRequest(**sender(), version=version, generation=0))
        driver.stop()
        await store.read()  # a commit that was under way is done then
        shutil.copytree(at / "meta", at / "killed")
        await store.close()

    asyncio.run(fill())
    return at


@pytest.fixture
def directory(base: Path, tmp_path: Path) -> Path:
    """A copy of that directory."""
    return shutil.copytree(base / "killed", tmp_path / "meta")


@pytest.fixture
def truth(base: Path, tmp_path: Path) -> "Rows":
    """What a coordinator believes that starts there."""
    return rows_of(base / "killed", tmp_path / "truth")


Rows = dict[str, JobRow | None]


def rows(directory: Path) -> Rows:
    """What a coordinator that starts there believes; None: the job is set apart. UsageError, ServiceError: it does not
    start."""
    apart = Apart()
    return {name: apart.row_of(name, parts) for name, parts in all_of(open_directory(directory)).items()}


def rows_or_refused(directory: Path) -> Rows | str:
    """Or the line with which it does not start."""
    try:
        return rows(directory)
    except (UsageError, ServiceError, StoreFailed) as error:
        said = str(error)
        assert said.count("\n") == 0
        assert any(
            words in said for words in ("put a copy of the whole directory back", "begin in another")
        ), said
        return said


def all_of(store: SqliteStore) -> dict[str, dict[str, str]]:
    """name -> the parts of that job. The store is closed then."""

    async def read() -> dict[str, str]:
        try:
            await hold(store)
            return await store.read(ROOT)
        finally:
            await store.close()

    return by_job(asyncio.run(read()))


def flip(data: bytearray, at: int, draw: random.Random) -> None:
    data[at] ^= 1 << draw.randrange(8)


def page_regions(data: bytes) -> dict[str, list[int]]:
    """Of the database: what each byte is for (sqlite.org/fileformat2.html)."""
    found: dict[str, list[int]] = {
        "file header": list(range(100)),
        "page header": [],
        "free space": [],
        "payload": [],
    }
    for page in range(0, len(data), PAGE_BYTES):
        begin = page + (100 if page == 0 else 0)
        cells, content = struct.unpack_from(">HH", data, begin + 3)
        header = {2: 12, 5: 12, 10: 8, 13: 8}.get(data[begin])
        if header is None:  # an overflow page
            found["payload"] += range(begin, page + PAGE_BYTES)
            continue
        pointers_end = begin + header + 2 * cells
        found["page header"] += range(begin, pointers_end)
        found["free space"] += range(pointers_end, page + content)
        found["payload"] += range(page + content, page + PAGE_BYTES)
    return found


def log_regions(data: bytes) -> dict[str, list[int]]:
    """Of the write-ahead log."""
    found: dict[str, list[int]] = {"log header": list(range(32)), "frame header": [], "frame": []}
    for frame in range(32, len(data), 24 + PAGE_BYTES):
        found["frame header"] += range(frame, frame + 24)
        found["frame"] += range(frame + 24, frame + 24 + PAGE_BYTES)
    return found


REGIONS: dict[str, tuple[str, Callable[[bytes], dict[str, list[int]]]]] = {
    **dict.fromkeys(("file header", "page header", "free space", "payload"), (FILE, page_regions)),
    **dict.fromkeys(("log header", "frame header", "frame"), (LOG, log_regions)),
    "shared memory": (f"{FILE}-shm", lambda data: {"shared memory": list(range(len(data)))}),
    "acknowledged": (ACKNOWLEDGED, lambda data: {"acknowledged": list(range(len(data)))}),
}


@pytest.mark.parametrize("region", REGIONS)
def test_after_a_flipped_bit_it_knows_the_same_or_says_that_it_does_not(
    base: Path, tmp_path: Path, truth: Rows, region: str
) -> None:
    name, regions = REGIONS[region]
    data = (base / "killed" / name).read_bytes()
    draw = random.Random(region)
    places = regions(data)[region]
    assert places
    refused = 0
    for at in draw.sample(places, min(len(places), FLIPS)):
        shutil.copytree(base / "killed", tmp_path / "meta")
        changed = bytearray(data)
        flip(changed, at, draw)
        (tmp_path / "meta" / name).write_bytes(changed)
        found = rows_or_refused(tmp_path / "meta")
        if isinstance(found, str):
            refused += 1
        else:
            assert found.keys() == truth.keys(), (at, found.keys())
            assert all(row in (None, truth[job]) for job, row in found.items()), at
        shutil.rmtree(tmp_path / "meta")
    if region in ("log header", "frame"):  # behind each of them is something that was acknowledged
        assert refused == min(len(places), FLIPS)


def test_a_refused_directory_is_left_as_it_is(base: Path, directory: Path, truth: Rows) -> None:
    """Else a bit that was only read wrong would be lost for good, with all that is behind it in the log."""
    data = bytearray((directory / LOG).read_bytes())
    flip(data, 32 + 24 + 100, random.Random(0))
    (directory / LOG).write_bytes(data)
    before = {name: (directory / name).read_bytes() for name in (FILE, LOG, ACKNOWLEDGED)}
    for _ in range(2):
        assert "was acknowledged; put a copy of the whole directory back" in str(rows_or_refused(directory))
        assert {name: (directory / name).read_bytes() for name in before} == before
    (directory / LOG).write_bytes((base / "killed" / LOG).read_bytes())
    assert rows(directory) == truth


@pytest.mark.parametrize("name", [FILE, LOG, ACKNOWLEDGED])
@pytest.mark.parametrize("how", ["lost", "emptied", "older"])
def test_a_file_that_is_lost_or_of_before_is_noticed(
    base: Path, directory: Path, truth: Rows, name: str, how: str
) -> None:
    older = base / "older" / name
    if how == "older" and older.exists():
        shutil.copy(older, directory / name)
    elif how == "emptied":
        (directory / name).write_bytes(b"")
    else:
        (directory / name).unlink()
    found = rows_or_refused(directory)
    if how == "older" and name != LOG:  # nothing is lost: the rest is in the log
        assert found == truth
    else:
        assert isinstance(found, str)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM rows WHERE key = 'jobs/j/holders/0'",
        "DELETE FROM rows WHERE key LIKE 'jobs/k/%'",
        "UPDATE rows SET revision = revision - 1 WHERE key = 'jobs/k/row'",
        "UPDATE rows SET key = 'jobs/l/row' WHERE key = 'jobs/k/row'",
        "UPDATE head SET revision = revision + 1",
        "UPDATE head SET digest = 'none'",
        "DELETE FROM head",
    ],
)
def test_rows_that_are_missing_or_of_another_moment_are_noticed(directory: Path, change: str) -> None:
    """In a database that is sound to SQLite."""
    with closing(sqlite3.connect(directory / FILE, isolation_level=None)) as db:
        assert db.execute(change).rowcount > 0
    assert "is damaged: " in str(rows_or_refused(directory))


def test_a_commit_that_was_cut_off_is_no_damage_unless_it_was_acknowledged(tmp_path: Path) -> None:
    """Wherever the log ends in it, and whether the revision was written by then."""
    first = {"a": "first", "gone": ""}

    async def fill() -> None:
        (tmp_path / "meta").mkdir()
        store = await held(tmp_path / "meta")
        await store.commit(first)
        shutil.copytree(tmp_path / "meta", tmp_path / "first")
        await store.commit({"a": "second", "b": "x" * 9000}, ["gone"])
        shutil.copytree(tmp_path / "meta", tmp_path / "second")
        await store.close()

    async def read(directory: Path) -> dict[str, str] | None:
        store = SqliteStore(directory / FILE)
        try:
            await store.hold()
            return await store.read()
        except StoreFailed:
            return None
        finally:
            await store.close()

    asyncio.run(fill())
    begin, end = ((tmp_path / name / LOG).stat().st_size for name in ("first", "second"))
    for length in [*range(begin, end, 499), end]:
        for acknowledged in ("first", "second"):
            directory = tmp_path / "cut"
            shutil.copytree(tmp_path / "second", directory)
            os.truncate(directory / LOG, length)
            shutil.copy(tmp_path / acknowledged / ACKNOWLEDGED, directory / ACKNOWLEDGED)
            found = asyncio.run(read(directory))
            if length == end:
                assert found is not None
                assert found == {"a": "second", "b": "x" * 9000}
            elif acknowledged == "first":
                assert found == first
            else:
                assert found is None
            shutil.rmtree(directory)


def spoil(directory: Path, older: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(path for path in directory.iterdir() if path.stat().st_size))
    data = bytearray(path.read_bytes())
    what = draw.choice(["flip", "flip", "flip", "cut", "extend", "zero", "older", "lose", "swap"])
    at = draw.randrange(len(data))
    match what:
        case "flip":
            for _ in range(draw.choice([1, 1, 4])):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case "cut":
            del data[at:]
        case "extend":
            data += draw.randbytes(draw.choice([1, 100, 4096]))
        case "zero":
            data[at : at + 512] = bytes(512)
        case "older":
            there = older / path.name
            data = bytearray(there.read_bytes() if there.exists() else b"")
        case "lose":
            data = bytearray()
        case "swap":
            other = draw.choice(sorted(directory.iterdir()))
            theirs = other.read_bytes()
            other.write_bytes(data)
            data = bytearray(theirs)
    path.write_bytes(data)
    return f"{what} {path.name}"


@pytest.mark.parametrize("seed", range(120))
def test_nothing_wrong_is_believed_and_nothing_is_forgotten(
    base: Path, directory: Path, truth: Rows, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    did = [spoil(directory, base / "older", draw) for _ in range(draw.choice([1, 1, 2]))]
    before = rows_of(base / "older", tmp_path / "b")
    found = rows_or_refused(directory)
    if isinstance(found, str) or found == truth:
        return
    if len(did) > 1 and any(ACKNOWLEDGED in one for one in did):
        # What says how far it went was damaged as well: log servers know of the newer one.
        assert all(
            row in (None, truth[name], before.get(name)) or row.revision < truth[name].revision
            for name, row in found.items()
        ), did
        return
    assert found.keys() == truth.keys(), did
    assert all(row in (None, truth[name]) for name, row in found.items()), did


def rows_of(directory: Path, copy: Path) -> Rows:
    shutil.copytree(directory, copy)
    return rows(copy)


def test_every_bit_of_a_row_counts(directory: Path) -> None:
    stored = all_of(open_directory(directory))["j"]
    whole = decode("j", stored)
    draw = random.Random(0)
    for _ in range(300):
        key = draw.choice(sorted(stored))
        data = stored[key].encode()
        at = draw.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        row = Apart().row_of("j", {**stored, key: changed.decode(errors="replace")})
        assert row is None or row == whole


async def test_one_damaged_row_is_that_jobs_trouble(directory: Path, logs: FakeLogs) -> None:
    path = directory / FILE
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE rows SET value = replace(value, ' 1', ' 2') WHERE key = 'jobs/j/generation'")
        (count,) = db.execute("SELECT changes()").fetchone()
        assert count == 1
    store = await held(path.parent)
    driver = await driver_of(logs, store)
    assert (await driver.status("k")).view.job == "k"
    for call in (
        lambda: driver.apply("j", m.Tick()),
        lambda: driver.join("j", join()),
        lambda: driver.status("j"),
    ):
        with pytest.raises(
            JobApart,
            match=r"the checksum of jobs/j/generation does not match.*put a copy of the whole directory",
        ):
            await call()
    listed = {job.job: job.reason for job in (await driver.jobs(lambda _: True)).jobs}
    assert "is set apart" in listed["j"]
    assert listed["k"] == ""
    servicer = Servicer(driver)
    with pytest.raises(Aborted, match="is set apart"):
        await servicer.Status(pb.StatusRequest(job="j"), Caller())  # type: ignore[arg-type]
    with pytest.raises(Aborted, match="is set apart"):
        await anext(servicer.Watch(pb.WatchRequest(job="j"), Caller()))  # type: ignore[arg-type]
    driver.stop()
    await store.close()


@pytest.mark.parametrize("name", [ACKNOWLEDGED, FILE, LOG, f"{FILE}-shm"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "dangling"])
def test_something_else_in_the_place_of_its_files(
    base: Path, directory: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """It starts without it, or says in one line why not; it never waits for it."""
    path = directory / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(base / "older" / name)
        case _:
            path.symlink_to(tmp_path / "nowhere" / "x")
    said = str(directory)
    try:
        rows(directory)
    except (UsageError, ServiceError) as error:
        said = str(error)
    assert "\n" not in said
    assert str(directory) in said

"""The coordinator's own files, damaged by seed: what is shown is what was stored, or it is named; others are served."""

import asyncio
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from services.coordinator import commands as m
from services.coordinator.__main__ import hold, open_directory
from services.coordinator.apart import Apart, JobApart
from services.coordinator.parts import ROOT, by_job, decode
from services.coordinator.row import JobRow
from services.coordinator.servicer import Servicer
from services.coordinator.store import MemoryStore, SqliteStore, Stored, StoreFailed
from swift._pb import coordinator_pb2 as pb
from swift.errors import ServiceError, UsageError
from tests.unit.coordinator.driver_world import FakeLogs, driver_of, join, run_to_running, scenario, sender

FILE = "coordinator.sqlite"


class Aborted(Exception):
    pass


class Caller:
    """A context."""

    async def abort(self, _code: object, words: str, _trailers: object) -> None:
        raise Aborted(words)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with jobs j and k, as it lies there when the process was killed, and `older`, of before."""
    at = tmp_path_factory.mktemp("base")

    @scenario
    async def fill(logs: FakeLogs, _store: MemoryStore) -> None:
        (at / "meta").mkdir()
        sqlite = SqliteStore(at / "meta" / FILE)
        driver = await driver_of(logs, sqlite)
        await run_to_running(driver)
        shutil.copytree(at / "meta", at / "older")
        await driver.join("k", join())
        for version in (5, 10, 15):
            await driver.apply("k", m.CheckpointDurable(sender=sender(), version=version, generation=0))
        driver.stop()
        shutil.copytree(at / "meta", at / "killed")
        await sqlite.close()

    fill()
    return at


def rows(directory: Path) -> dict[str, JobRow]:
    """What a coordinator that starts there believes. StoreFailed, UsageError, ServiceError: it does not start."""
    apart = Apart()
    stored = all_of(open_directory(directory))
    found = {name: apart.row_of(name, parts) for name, parts in stored.items()}
    return {name: row for name, row in found.items() if row is not None}


def all_of(store: SqliteStore) -> dict[str, dict[str, str]]:
    """name -> the parts of that job. The store is closed then."""

    async def read() -> dict[str, Stored]:
        try:
            await hold(store)
            return await store.read(ROOT)
        finally:
            await store.close()

    stored = by_job(asyncio.run(read()))
    return {name: {key: part.value for key, part in parts.items()} for name, parts in stored.items()}


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
def test_nothing_wrong_is_believed(base: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    directory = tmp_path / "meta"
    shutil.copytree(base / "killed", directory)
    did = [spoil(directory, base / "older", draw) for _ in range(draw.choice([1, 1, 2]))]
    truth, before = rows_of(base / "killed", tmp_path / "a"), rows_of(base / "older", tmp_path / "b")
    try:
        found = rows(directory)
    except (UsageError, ServiceError, StoreFailed) as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert said.count("\n") == 0
        return
    for name, row in found.items():
        # A journal that was cut, or is of before, leaves what was there before; log servers know of the newer one.
        assert row == truth[name] or row.revision < truth[name].revision, did
        assert row.revision != before.get(name, row).revision or row == before.get(name, row), did


def rows_of(directory: Path, copy: Path) -> dict[str, JobRow]:
    shutil.copytree(directory, copy)
    return rows(copy)


def test_every_bit_of_a_row_counts(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "killed", tmp_path / "meta")
    stored = all_of(SqliteStore(tmp_path / "meta" / FILE))["j"]
    whole = decode("j", stored)
    draw = random.Random(0)
    for _ in range(300):
        key = draw.choice(sorted(stored))
        data = stored[key].encode()
        at = draw.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        row = Apart().row_of("j", {**stored, key: changed.decode(errors="replace")})
        assert row is None or row == whole


def test_one_damaged_row_is_that_jobs_trouble(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "killed", tmp_path / "meta")
    path = tmp_path / "meta" / FILE
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(
            "UPDATE rows SET value = replace(value, '\"generation\":1', '\"generation\":2') WHERE key = 'jobs/j/row'"
        )
        (count,) = db.execute("SELECT changes()").fetchone()
        assert count == 1

    @scenario
    async def served(logs: FakeLogs, _store: MemoryStore) -> None:
        store = SqliteStore(path)
        driver = await driver_of(logs, store)
        assert (await driver.status("k")).view.job == "k"
        for call in (
            lambda: driver.apply("j", m.Tick()),
            lambda: driver.join("j", join()),
            lambda: driver.status("j"),
        ):
            with pytest.raises(
                JobApart, match=r"the checksum of jobs/j/row does not match.*put a copy of coordinator.sqlite"
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

    served()


@pytest.mark.parametrize("name", ["lock", FILE, f"{FILE}-wal", f"{FILE}-shm"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "dangling"])
def test_something_else_in_the_place_of_its_files(base: Path, tmp_path: Path, name: str, kind: str) -> None:
    """It starts without it, or says in one line why not; it never waits for it."""
    directory = tmp_path / "meta"
    shutil.copytree(base / "killed", directory)
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

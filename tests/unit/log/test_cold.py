"""The cold tier: what is moved is read as before, also after a restart; what goes is removed; a store that fails harms
nothing."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from obstore.store import MemoryStore

from swift_ft.errors import LogUnavailable, SwiftError, UsageError
from swift_ft.log import admin
from swift_ft.log.manifest import MANIFEST, JobMeta, ManifestDamaged, StreamMeta
from swift_ft.log.reader import LogReader, lost_copy, never
from swift_ft.log.record import RecordKey
from swift_ft.log.segment import Stub, stub_path
from swift_ft.objects import Objects
from swift_ft.tools.inspect import DirectoryLog
from swift_ft.tools.inspect import main as inspect
from swift_ft_services.logserver.administration import LostServers, Tiering
from swift_ft_services.logserver.cold import ColdTier
from swift_ft_services.logserver.quotas import SpaceConfig
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage_interface import Write
from tests.patience import eventually
from tests.unit.log.append_call import append
from tests.unit.log.clients import following
from tests.unit.log.frames import JOB, STREAM, body_of, frame_of, records_of
from tests.unit.log.service import InProcess
from tests.unit.log.storages import (
    FIVE_A_SEGMENT,
    OnDisk,
    check_frames,
    crash,
    fill,
    frame_in,
    on_disk,
    reopened,
)

URL = "s3://bucket/log"


class Cold:
    """A store that outlives servers, and fails when it is told to."""

    def __init__(self) -> None:
        self.objects = Objects(MemoryStore(), 0.1)
        self.fails = False
        test = self

        class Failing(ColdTier):
            def move(self, key: str, source: object, stub: bytes) -> None:
                if test.fails:
                    raise OSError(5, "the store is away")
                super().move(key, source, stub)  # type: ignore[arg-type]

            def read(self, key: str, offset: int, size: int) -> memoryview:
                if test.fails:
                    raise OSError(110, "the object store: it is away")
                return super().read(key, offset, size)

            def stubs(self, folder: str) -> dict[str, dict[int, Stub]]:
                if test.fails:
                    raise OSError(5, "it is away")
                return super().stubs(folder)

            def remove(self, key: str) -> None:
                if test.fails:
                    raise OSError(5, "the store is away")
                super().remove(key)

        self.tier = Failing(self.objects, URL)

    @property
    def keys(self) -> list[str]:
        return self.tier.keys("")


@pytest.fixture
def cold() -> Cold:
    return Cold()


def opened(directory: Path, cold: Cold, records: int = 0) -> OnDisk:
    return on_disk(directory, FIVE_A_SEGMENT, records=records, cold=cold.tier)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / JOB / STREAM).iterdir())


def test_a_job_may_come_while_a_lost_servers_objects_are_removed(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold)

    class Looked:
        @property
        def uid(self) -> str:
            storage.save("another", JobMeta(generation=1))
            return ""

    storage._metas["looked"] = Looked()  # type: ignore[assignment]
    storage.drop_lost(JOB, f"{'0' * 32}/0.0")
    storage.clean_cold()
    assert not storage._objects_of_lost


def test_segments_move_one_after_the_other_and_are_read_as_before(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 16)
    before = [(tmp_path / JOB / STREAM / name).read_bytes() for name in names(tmp_path)[:2]]
    place = storage.locate(JOB, STREAM, 1)
    assert [storage.move_oldest(JOB) for _ in range(2)] == [(STREAM, 5), (STREAM, 10)]
    assert [Path(name).suffix for name in names(tmp_path)] == [".cold", ".cold", ".seg", ".seg"]
    assert [bytes(cold.objects.read_all(key, 1 << 20)) for key in cold.keys] == before
    assert bytes(storage.read(place, 24, memoryview(bytearray(9000)))) == frame_of(1)[1][:24], (
        "located before"
    )
    check_frames(storage, 0, 16)
    assert storage.move_oldest(JOB) == (STREAM, 15)
    assert storage.move_oldest(JOB) is None, "the last one is written, and small"
    fill(storage, 16, 40)
    check_frames(storage, 0, 40)


def test_a_restart_reads_stubs_and_asks_nothing_of_the_store(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 17)
    storage.move_oldest(JOB)
    storage.move_oldest(JOB)
    crash(storage)
    cold.fails = True
    again, found = reopened(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    assert list(found.by_sequence) == list(range(17))
    assert (found.cold_below, found.appended, found.holes) == (10, 17, [])
    with pytest.raises(OSError, match="it is away"):
        frame_in(again, STREAM, 3)
    cold.fails = False
    check_frames(again, 0, 17)
    fill(again, 17, 22)
    check_frames(again, 0, 22)


@pytest.mark.parametrize("killed_at", ["upload", "stub", "unlink"])
def test_a_kill_at_any_point_loses_nothing_and_leaves_nothing(
    tmp_path: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    class Killed(Exception):
        pass

    def kill(*_: object) -> None:
        raise Killed

    storage = opened(tmp_path, cold, 12)
    with monkeypatch.context() as patch:
        if killed_at == "upload":  # it is there, and its answer is not
            move = cold.tier.move
            patch.setattr(cold.tier, "move", lambda *words: (move(*words), kill()))
        elif killed_at == "stub":
            patch.setattr("swift_ft_services.logserver.storage.replace_small_file", kill)
        else:
            patch.setattr(storage._disk, "remove", lambda path: kill() if path.suffix == ".seg" else None)
        with pytest.raises(Killed):
            storage.move_oldest(JOB)
    crash(storage)
    again = opened(tmp_path, cold)
    check_frames(again, 0, 12)
    again.clean_left()
    assert cold.keys == []
    assert again.move_oldest(JOB) == (STREAM, 5)
    check_frames(again, 0, 12)


def test_what_is_trimmed_or_dropped_is_removed_there_too_once_the_store_answers(
    tmp_path: Path, cold: Cold
) -> None:
    storage = opened(tmp_path, cold, 22)
    for _ in range(4):
        storage.move_oldest(JOB)
    storage.save(JOB, JobMeta(generation=1, streams={STREAM: StreamMeta(10, 22, "")}))
    cold.fails = True
    storage.remove(JOB, STREAM, 10)
    with pytest.raises(OSError, match="away"):
        storage.clean_cold()
    with pytest.raises(FileNotFoundError):
        storage.locate(JOB, STREAM, 4)
    crash(storage)
    cold.fails = False
    storage = opened(tmp_path, cold)  # finds the stubs of what was trimmed
    assert len(cold.keys) == 4
    storage.clean_cold()
    assert len(cold.keys) == 2
    check_frames(storage, 10, 22)
    assert [name for name in names(tmp_path) if name.endswith(".cold")] == [
        f"{first:020d}.cold" for first in (10, 15)
    ]
    storage.drop(JOB)  # and the process is killed before it removes anything
    crash(storage)
    storage = opened(tmp_path, cold)
    storage.clean_cold()
    assert cold.keys == []


def test_objects_of_a_dropped_job_are_owed_across_restarts(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 22)
    storage.move_oldest(JOB)
    cold.fails = True
    storage.drop(JOB)()
    for _ in range(2):
        assert not list(tmp_path.glob(".dropped-*/*/*")), "its own space is free"
        with pytest.raises(OSError, match="away"):
            storage.clean_cold()
        crash(storage)
        storage = OnDisk(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
        assert storage.recover() == []
    assert cold.keys
    cold.fails = False
    storage.clean_cold()
    assert cold.keys == []
    assert not list(tmp_path.glob(".dropped-*"))


def test_a_job_that_was_dropped_without_its_server_leaves_no_objects(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 22)
    storage.move_oldest(JOB)
    crash(storage)
    assert inspect(["--directory", str(tmp_path), "--drop-job", JOB, "--force"]) == 0
    assert not list(tmp_path.glob(".dropped-*/*/*"))
    storage = OnDisk(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    assert storage.recover() == []
    storage.clean_cold()
    assert cold.keys == []


def test_inspect_shows_what_was_moved(tmp_path: Path, cold: Cold, capsys: pytest.CaptureFixture[str]) -> None:
    storage = opened(tmp_path, cold, 22)
    storage.close()
    facts = DirectoryLog(tmp_path).facts().jobs[0]
    assert (facts.records, facts.problem, facts.streams[0].problems) == (22, "", [])
    storage = opened(tmp_path, cold)
    storage.move_oldest(JOB)
    storage.move_oldest(JOB)
    stub = stub_path(tmp_path / JOB / STREAM / f"{0:020d}.seg")
    for runs in (True, False):
        moved = DirectoryLog(tmp_path).facts(verify=True)
        assert (moved.server_runs, moved.cold, moved.used_bytes) == (runs, URL, facts.bytes * 12 // 22)
        assert moved.verified is not None
        assert (moved.verified.records, moved.verified.damage) == (12, [])
        of = moved.jobs[0].streams[0]
        assert (of.records, of.bytes, of.moved_bytes) == (22, facts.bytes, facts.bytes * 10 // 22)
        assert [each.ending for each in of.segments or []] == ["moved", "moved", *["sealed"] * 3]
        if runs:
            crash(storage)
    assert inspect(["--directory", str(tmp_path)]) == 0
    assert f"in {URL}: 2 segments, " in capsys.readouterr().out
    stub.write_bytes(stub.read_bytes()[:-1])
    assert inspect(["--directory", str(tmp_path)]) == 1
    assert "is damaged: its checksum does not match" in capsys.readouterr().err


def test_a_later_job_of_that_name_keeps_its_stubs(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 12)
    storage.move_oldest(JOB)
    storage.remove(JOB, STREAM, 5)  # and before its object is gone
    storage.drop(JOB)()
    storage.save(JOB, JobMeta(generation=1))
    fill(storage, 0, 12)
    storage.move_oldest(JOB)
    storage.clean_cold()
    storage.clean_left()
    check_frames(storage, 0, 12)
    crash(storage)
    storage = opened(tmp_path, cold)
    check_frames(storage, 0, 12)
    assert len(cold.keys) == 1


def test_objects_of_a_quarantined_job_stay(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 12)
    storage.move_oldest(JOB)
    crash(storage)
    manifest = tmp_path / JOB / MANIFEST
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-3])
    storage = OnDisk(tmp_path, FIVE_A_SEGMENT, cold=cold.tier)
    (job,) = storage.recover()
    assert job.apart
    storage.clean_left()
    storage.clean_cold()
    crash(storage)
    manifest.write_bytes(content)
    storage = opened(tmp_path, cold)
    check_frames(storage, 0, 12)


def test_a_damaged_segment_stays(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 12)
    path = tmp_path / JOB / STREAM / names(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    assert storage.move_oldest(JOB) is None
    assert cold.keys == []


def test_a_file_that_somebody_has_removed_holds_up_no_other_stream(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 12)
    fill(storage, 0, 12, "s1.F")
    min((tmp_path / JOB / "s1.F").iterdir()).unlink()  # the one that would go first
    assert [storage.move_oldest(JOB) for _ in range(3)] == [None, (STREAM, 5), (STREAM, 10)]


def test_the_store_is_remembered(tmp_path: Path, cold: Cold) -> None:
    crash(opened(tmp_path, cold))
    without = OnDisk(tmp_path, FIVE_A_SEGMENT)
    with pytest.raises(UsageError, match=f"are in an object store: add --cold {URL}"):
        without.recover()
    crash(without)
    other = OnDisk(tmp_path, FIVE_A_SEGMENT, cold=ColdTier(cold.objects, "s3://bucket/other"))
    with pytest.raises(UsageError, match=f"are in {URL}: give that one"):
        other.recover()
    crash(other)
    (tmp_path / ".cold").write_text("x" * 5000)
    damaged = OnDisk(tmp_path, FIVE_A_SEGMENT)
    with pytest.raises(UsageError, match=r"\.cold: it has 5000 bytes, .*: write the URL of the object store"):
        damaged.recover()


def test_a_stub_that_is_damaged_is_no_stub(tmp_path: Path, cold: Cold) -> None:
    stub = Stub(5000, [(0, b"abc"), (4000, b"defg")])
    data = stub.encode()
    again = Stub.decode(data)
    parts = again.read(0, 9), again.read(4002, 1), again.read(100, 9)
    assert (again.size, parts) == (5000, (b"abc", b"f", b""))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ManifestDamaged):
            Stub.decode(bytes(damaged))
        with pytest.raises(ManifestDamaged):
            Stub.decode(data[:at])
    storage = opened(tmp_path, cold, 12)
    storage.move_oldest(JOB)
    crash(storage)
    path = stub_path(tmp_path / JOB / STREAM / f"{0:020d}.seg")
    path.write_bytes(path.read_bytes()[:-1])
    (job,) = OnDisk(tmp_path, FIVE_A_SEGMENT, cold=cold.tier).recover()
    assert "is damaged: its checksum does not match" in job.apart


# --- a server ---

QUOTA, BODY = 200_000, 4_000


@contextmanager
def serving(directory: Path, cold: Cold) -> Iterator[tuple[InProcess, Tiering]]:
    storage = OnDisk(directory, 20_000, cold=cold.tier)
    config = EngineConfig(space=SpaceConfig(quota_bytes=QUOTA))
    with InProcess(storage, config, jobs=storage.recover()) as server:
        tiering = Tiering(server.engine.state, storage, server.engine.watch)
        tiering.start()
        server.engine.lost = LostServers(server.engine.state, storage, server.engine.take_over)
        yield server, tiering
        tiering.stop()


def send(server: InProcess, begin: int, end: int) -> None:
    """As a writer that waits while the server has no room."""
    for sequence in range(begin, end):
        eventually(lambda: server.engine.state.space.refuses(JOB, BODY + 200) is None)
        append(server, frame_of(sequence, body=body_of(sequence, BODY))[1])


def test_a_job_of_several_quotas_is_taken_and_read(tmp_path: Path, cold: Cold) -> None:
    with serving(tmp_path, cold) as (server, tiering):
        send(server, 0, 120)
        space, tally = server.engine.state.space, server.engine.state.core.jobs[JOB].tally
        assert tally.bytes > 2 * QUOTA
        assert space.server.used_bytes == tally.hot_bytes <= QUOTA
        eventually(lambda: space.server.part() < space.config.low_water)
        assert not space.wants_checkpoint(JOB)
        assert server.read() == b"".join(
            frame_of(sequence, body=body_of(sequence, BODY))[1] for sequence in range(120)
        )
        tiering.stop()
        hot = tally.hot_bytes
    with serving(tmp_path, cold) as (server, _):
        assert server.engine.state.core.jobs[JOB].tally.hot_bytes == hot
        assert server.engine.administration.trim(JOB, 110) == 110
        eventually(lambda: len(cold.keys) <= 1)
        server.engine.administration.drop(JOB, force=True)
        eventually(lambda: cold.keys == [])
        assert server.engine.state.space.server.used_bytes == 0


def test_a_flipped_bit_in_an_object_is_damage_of_that_record(tmp_path: Path, cold: Cold) -> None:
    with serving(tmp_path, cold) as (server, tiering):
        send(server, 0, 60)
        eventually(lambda: len(cold.keys) >= 2)
        tiering.stop()
        content = bytearray(cold.objects.read_all(cold.keys[0], 1 << 20))
        content[6000] ^= 1
        cold.objects.put(cold.keys[0], content)
        with pytest.raises(Exception, match="checksum does not match"):
            server.read()


def test_a_large_job_with_nothing_to_move_is_passed_over(
    tmp_path: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = OnDisk(tmp_path, 20_000, cold=cold.tier)
    with InProcess(
        storage, EngineConfig(space=SpaceConfig(quota_bytes=QUOTA)), jobs=storage.recover()
    ) as server:
        send(server, 0, 24)
        damaged = tmp_path / JOB / STREAM / names(tmp_path)[0]
        content = bytearray(damaged.read_bytes())
        content[6000] ^= 1
        damaged.write_bytes(content)
        server.engine.administration.fence("other", 1)
        monkeypatch.setattr("tests.unit.log.append_call.JOB", "other")
        monkeypatch.setattr("tests.unit.log.test_cold.frame_of", partial(frame_of, job="other"))
        send(server, 0, 15)
        space = server.engine.state.space
        server.engine.watch.check()
        assert space.to_move() == [JOB, "other"]
        tiering = Tiering(server.engine.state, storage, server.engine.watch)
        tiering._move()
        assert space.jobs["other"].used_bytes < space.jobs[JOB].used_bytes / 4
        assert cold.keys


# --- a server that is lost with its disk ---


@pytest.fixture
def lost(tmp_path: Path, cold: Cold) -> Iterator[tuple[InProcess, str]]:
    """A server beside a lost one, which has moved the first ten records of twelve; and where it has moved them."""
    storage = opened(tmp_path / "lost", cold, 12)
    storage.move_oldest(JOB)
    storage.move_oldest(JOB)
    folder = storage.cold_folder(JOB)
    storage.close()
    shutil.rmtree(tmp_path / "lost")
    with serving(tmp_path / "other", cold) as (server, _):
        yield server, folder


def test_another_server_reads_what_a_lost_one_has_moved(
    lost: tuple[InProcess, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, folder = lost
    other = [frame_of(sequence, step=sequence + 5, generation=1, body=b"other")[1] for sequence in range(3)]
    append(server, *other)
    (stream,) = admin.inventory(server.address, JOB, 10.0, folder)
    assert (stream.records, stream.first_step, stream.last_step, stream.corrupt) == (10, 0, 9, False)
    assert [each.records for each in admin.inventory(server.address, JOB, 10.0)] == [3], "its own"
    assert server.read(follow=True, cold=folder) == b"".join(frame_of(sequence)[1] for sequence in range(10))
    assert server.read() == b"".join(other)
    assert server.engine.state.space.server.used_bytes == sum(map(len, other))
    assert inspect(["--server", server.address]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if " s0.F " in line] == [JOB, f"{JOB}@{folder}"]


def test_a_reader_takes_what_was_moved_and_then_what_follows(lost: tuple[InProcess, str]) -> None:
    """Records of step 7 on count where training went on without the lost server, whatever that one has moved."""
    server, folder = lost
    append(server, *(frame_of(sequence, step=sequence + 7, body=b"new")[1] for sequence in range(4)))
    reader = LogReader({STREAM: [lost_copy(server.address, folder, 7), server.address]}, JOB)
    with following(reader, STREAM, 0) as cursor:
        bodies = [bytes(cursor.get(RecordKey(step, 0, 0), 10.0, never).body) for step in range(11)]
    assert bodies == [*(body_of(sequence) for sequence in range(7)), *[b"new"] * 4]
    moved = reader.digests(STREAM, 0, lost_copy(server.address, folder, 7), cancelled=never)
    assert sorted(key.step for key in moved) == list(range(7))
    digests = reader.digests(STREAM, 0, cancelled=never)
    assert {key.step: digest for key, digest in digests.items()} == {
        **{step: frame_of(step)[0].digest for step in range(7)},
        **{step: frame_of(step, body=b"new")[0].digest for step in range(7, 11)},
    }
    reader.close()


def test_a_flipped_bit_in_what_was_moved_is_found(lost: tuple[InProcess, str], cold: Cold) -> None:
    server, folder = lost
    key = cold.keys[1]
    content = bytearray(cold.objects.read_all(key, 1 << 20))
    content[400] ^= 1
    cold.objects.put(key, content)
    with pytest.raises(grpc.RpcError, match="checksum does not match"):
        server.read(follow=True, cold=folder)


def test_a_part_that_is_missing_or_not_the_jobs_is_damage(lost: tuple[InProcess, str], cold: Cold) -> None:
    server, folder = lost
    first, second = cold.keys
    content = cold.objects.read_all(first, 1 << 20)
    cold.objects.remove([first])
    (stream,) = admin.inventory(server.address, JOB, 10.0, folder)
    assert (stream.first_step, stream.last_step, stream.corrupt) == (5, 9, False)
    server.engine.state.core.jobs.pop(f"{JOB}@{folder}")
    cold.objects.put(first, content)
    cold.objects.put(f"{folder}/s7.F/{Path(first).name}", content)
    stub = f"{Path(first).stem}.cold"
    cold.objects.put(f"{folder}/s7.F/{stub}", cold.objects.read_all(f"{Path(first).parent}/{stub}", 1 << 20))
    found = {each.stream: each for each in admin.inventory(server.address, JOB, 10.0, folder)}
    assert not found[STREAM].corrupt
    assert (found["s7.F"].corrupt, found["s7.F"].records) == (True, 0)
    assert admin.inventory(server.address, JOB, 10.0, f"{'0' * 32}/0.0") == []
    assert second in cold.keys


def test_while_the_store_is_away_nothing_is_known_and_then_all(
    lost: tuple[InProcess, str], cold: Cold
) -> None:
    server, folder = lost
    cold.fails = True
    with pytest.raises(LogUnavailable, match="the object store: it is away"):
        admin.inventory(server.address, JOB, 10.0, folder)
    cold.fails = False
    assert [each.records for each in admin.inventory(server.address, JOB, 10.0, folder)] == [10]


def test_it_is_removed_once_nobody_needs_it(lost: tuple[InProcess, str], cold: Cold) -> None:
    server, folder = lost
    assert admin.inventory(server.address, JOB, 10.0, folder)
    for _ in range(2):
        admin.trim(server.address, JOB, 20, 10.0, folder)
        eventually(lambda: not cold.keys)
        assert admin.inventory(server.address, JOB, 10.0, folder) == []


def test_nobody_removes_what_is_of_another_job_or_of_a_server_that_is_there(
    lost: tuple[InProcess, str], cold: Cold
) -> None:
    server, folder = lost
    before = cold.keys
    with pytest.raises(SwiftError, match="is not a lost server's of job"):
        admin.trim(server.address, "other", 20, 10.0, folder)
    with pytest.raises(SwiftError, match="is not a lost server's of job"):
        admin.trim(server.address, JOB, 20, 10.0, admin.fence(server.address, JOB, 1, 10.0))
    for place in (folder.partition("/")[0], f"{folder}/{STREAM}"):
        with pytest.raises(SwiftError, match="no server moves records there"):
            admin.trim(server.address, JOB, 20, 10.0, place)
    assert cold.keys == before


def test_it_is_removed_with_the_job_once_the_store_answers(lost: tuple[InProcess, str], cold: Cold) -> None:
    server, folder = lost
    assert admin.inventory(server.address, JOB, 10.0, folder)
    cold.fails = True
    admin.drop(server.address, JOB, 10.0, force=True)
    assert list(server.engine.state.core.jobs) == []
    assert cold.keys
    cold.fails = False
    eventually(lambda: not cold.keys)


def test_a_segment_of_which_the_stub_is_missing_is_removed_too(
    lost: tuple[InProcess, str], cold: Cold
) -> None:
    server, folder = lost
    cold.objects.remove([entry.path for entry in cold.objects.entries("") if entry.path.endswith(".cold")])
    assert admin.inventory(server.address, JOB, 10.0, folder) == []
    with pytest.raises(SwiftError, match="is not a lost server's of job"):
        admin.trim(server.address, "other", 20, 10.0, folder)
    assert cold.keys
    admin.trim(server.address, JOB, 20, 10.0, folder)
    eventually(lambda: not cold.keys)


def test_a_drop_removes_nothing_of_another_job(lost: tuple[InProcess, str], cold: Cold) -> None:
    server, folder = lost
    before = cold.keys
    server.engine.administration.fence("other", 1)
    admin.inventory(server.address, "other", 10.0, folder)
    admin.drop(server.address, "other", 10.0, force=True)
    eventually(lambda: not server.storage._objects_of_lost)
    assert cold.keys == before


@pytest.mark.parametrize("folder", ["../x", "", "0" * 32, f"{'0' * 32}/0.0/x", f"{'A' * 32}/0.0"])
def test_other_places_are_refused(lost: tuple[InProcess, str], folder: str) -> None:
    server, _ = lost
    if folder:
        with pytest.raises(SwiftError, match="no server moves records there"):
            admin.inventory(server.address, JOB, 10.0, folder)
    else:
        with InProcess() as other, pytest.raises(SwiftError, match="this server has no object store"):
            admin.inventory(other.address, JOB, 10.0, f"{'0' * 32}/0.0")


def test_what_a_reset_has_dropped_is_not_moved_before_it_is_removed(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path, cold, 12)
    meta = JobMeta(generation=2, reset_generation=2, streams={STREAM: StreamMeta(12, 12, "")})
    storage.save(JOB, meta)
    assert storage.move_oldest(JOB) is None
    assert cold.keys == []


def test_what_a_reset_has_dropped_is_not_found_behind_it(tmp_path: Path, cold: Cold) -> None:
    """Objects are removed later, and the server may be lost before that."""
    with serving(tmp_path, cold) as (server, _):
        before = admin.fence(server.address, JOB, 1, 10.0)
        send(server, 0, 40)
        eventually(lambda: len(cold.keys) >= 2)
        cold.fails = True
        server.engine.administration.fence(JOB, 2)
        after = admin.reset(server.address, JOB, 2, 10.0)
        assert after != before
        assert admin.fence(server.address, JOB, 2, 10.0) == after
        assert cold.keys
        assert cold.tier.keys(before)
        assert cold.tier.keys(after) == []
        cold.fails = False
        eventually(lambda: not cold.keys)


def test_what_follows_a_reset_is_in_no_segment_with_what_was_before_it(tmp_path: Path, cold: Cold) -> None:
    """Records may follow before anything is removed, and the server may be lost then."""
    with serving(tmp_path / "lost", cold) as (server, tiering):
        tiering.stop()
        admin.fence(server.address, JOB, 1, 10.0)
        send(server, 0, 3)
        with server.engine.administration._removing:  # it is busy with another stream
            folder = admin.reset(server.address, JOB, 1, 10.0, number=1)
            append(server, *(frame_of(n, step=n - 2, body=body_of(n, BODY))[1] for n in range(3, 9)))
        removed = threading.Event()
        server.engine.administration._janitor_work.put(removed.set)
        assert removed.wait(20)
        assert server.storage.move_oldest(JOB) is not None
    with serving(tmp_path / "other", cold) as (other, _):
        (moved,) = admin.inventory(other.address, JOB, 10.0, folder)
        assert (moved.first_step, moved.corrupt) == (1, False)
        records = list(records_of(other.read(follow=True, cold=folder)))
        assert [record.key.step for record in records] == list(range(1, 1 + moved.records))
        assert bytes(records[0].body) == body_of(3, BODY)


def test_no_record_of_before_the_reset_counts_wherever_it_is(tmp_path: Path, cold: Cold) -> None:
    storage = opened(tmp_path / "lost", cold, 3)
    storage.save(JOB, JobMeta(generation=2))
    storage.commit([Write(JOB, STREAM, n, [frame_of(n, generation=2)[1]]) for n in range(3, 7)], True)
    storage.commit([Write(JOB, STREAM, 7, [frame_of(7, generation=2)[1]])], True)
    storage.move_oldest(JOB)
    folder = f"{storage.cold_folder(JOB).partition('/')[0]}/2.0"
    crash(storage)
    for entry in list(cold.objects.entries("")):
        content = cold.objects.read_all(entry.path, 1 << 20)
        cold.objects.put(f"{folder}/{STREAM}/{Path(entry.path).name}", content)
    other = opened(tmp_path / "other", cold)
    (stream,) = other.read_lost(JOB, folder).streams
    assert stream.first == 3
    assert list(stream.by_sequence) == list(range(3, stream.appended))
    assert stream.by_sequence

"""What comes at a bad moment, or asks for what is not there: it costs nobody but itself, and leaves nothing."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft._pb import log_pb2
from swift_ft.log.directory import age_s
from swift_ft.log.protocol import Reason, reason_of
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey
from swift_ft_services.logserver import reading as server_reading
from swift_ft_services.logserver.core import Hole, LogCore
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.quotas import SpaceConfig
from swift_ft_services.logserver.segments import StorageBusy
from swift_ft_services.logserver.service import LogServicer
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage_interface import Place
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.append_call import Call
from tests.unit.log.clients import TIMEOUT_S, following, key, reading, writing
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import InProcess
from tests.unit.log.storages import check_frames, failing, failing_calls, on_disk, write
from tests.unit.log.test_core import trimmed

# -- jobs that are not there ----------------------------------------------------------------------------


def kept(engine: LogEngine) -> tuple[set[str], set[str], set[str]]:
    state = engine.state
    return set(state.core.jobs), set(state.touched), set(state.space.jobs)


def test_asking_for_a_job_makes_none() -> None:
    config = EngineConfig(jobs_max=1, space=SpaceConfig(job_quota_bytes=1 << 20))
    with InProcess(config=config) as server:
        before = kept(server.engine)
        assert server.read(job="nobody") == b""
        asked = log_pb2.DigestsRequest(job="nobody", stream=STREAM)
        assert list(server.stub.Digests(asked, timeout=TIMEOUT_S)) == []
        with pytest.raises(grpc.RpcError) as reset:
            server.stub.Reset(log_pb2.ResetRequest(job="nobody", generation=1), timeout=TIMEOUT_S)
        assert reason_of(reset.value) == Reason.UNKNOWN
        call = Call(server)
        call.ask(job="nobody")
        assert call.refused()[1] == Reason.LIMIT
        assert kept(server.engine) == before == ({JOB}, {JOB}, set())


def test_an_open_that_no_generation_allows_makes_no_job(server: InProcess) -> None:
    before = kept(server.engine)
    call = Call(server)
    call.ask(job="nobody")
    assert call.refused()[1] == Reason.NOT_GRANTED
    assert kept(server.engine) == before


def test_a_reader_that_follows_may_come_before_its_job(server: InProcess) -> None:
    replies = server.stub.Read(log_pb2.ReadRequest(job="late", stream=STREAM, follow=True), timeout=TIMEOUT_S)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(next(replies).frames))
    reader.start()
    server.engine.administration.fence("late", 1)
    writer = LogWriter([server.address], "late", 1)
    writer.append(STREAM, RecordKey(0, 0, 0), "uint8", (3,), b"abc")
    writer.close()
    reader.join(TIMEOUT_S)
    assert found
    assert found[0].endswith(b"abc")
    assert list(server.engine.state.core.jobs["late"].readers.values()) == [0]
    replies.cancel()


# -- calls that are over --------------------------------------------------------------------------------


class Over:
    """The context of a call that ended before its handler began."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def test_a_call_that_is_over_already_leaves_no_session() -> None:
    engine = LogEngine(MemoryStorage(), EngineConfig())
    replies = LogServicer(engine).append(iter([]), Over())  # type: ignore[arg-type]
    assert list(replies) == []
    assert not engine.state.sessions


# -- reads that fail ------------------------------------------------------------------------------------


class Unreadable(MemoryStorage):
    """``errors`` come first."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[int] = []

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        if self.errors:
            failing(self.errors.pop())()
        return super().read(place, size, buffer)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_read_that_the_server_has_no_means_for_makes_no_hole(number: int) -> None:
    storage = Unreadable()
    with InProcess(storage) as server:
        fill_stream(server, 2)
        storage.errors = [number]
        with pytest.raises(grpc.RpcError, match=os.strerror(number)) as caught:
            server.read()
        assert reason_of(caught.value) == Reason.BUSY
        assert server.engine.state.core.jobs[JOB].streams[STREAM].holes == []
        # A reader asks again.
        storage.errors = [number]
        with reading(server) as reader, following(reader, STREAM, 0) as cursor:
            assert [cursor.get(key(at), TIMEOUT_S, never).body[0] for at in range(2)] == [0, 1]


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG])
def test_bytes_that_are_lost_are_a_hole(number: int) -> None:
    storage = Unreadable()
    with InProcess(storage) as server:
        fill_stream(server, 2)
        storage.errors = [number]
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match=os.strerror(number)) as caught:
                server.read()
            assert reason_of(caught.value) == Reason.CORRUPT
        (hole,) = server.engine.state.core.jobs[JOB].streams[STREAM].holes
        assert (hole.sequence, hole.end_sequence) == (0, 1)


def test_no_memory_to_read_into_is_no_damage(server: InProcess) -> None:
    fill_stream(server, 1)
    none_left = mock.patch.object(server_reading, "page_aligned", failing(errno.ENOMEM))
    with none_left, pytest.raises(grpc.RpcError) as caught:
        server.read()
    assert reason_of(caught.value) == Reason.BUSY
    assert server.read()


def fill_stream(server: InProcess, count: int) -> None:
    with writing(server) as writer:
        for step in range(count):
            writer.append(STREAM, key(step), "uint8", (1,), bytes([step]))
        writer.flush(TIMEOUT_S)


@given(st.permutations(range(6)))
def test_holes_stay_in_order_however_they_are_found(order: list[int]) -> None:
    """A trim goes up to the first one that it does not cover."""
    core = LogCore()
    core.fence(JOB, 1)
    stream = core.open(JOB, STREAM, 1, 0)
    for sequence in range(6):
        core.append(stream, 1, frame_of(sequence)[0])
    core.made_durable(stream, 6)
    for sequence in order:
        stream.insert_hole(Hole(sequence, sequence + 1, sequence + 1, f"hole {sequence}"))
    for below in range(6):
        trimmed(core, core.jobs[JOB], below)
        assert stream.first == below
        assert stream.corrupt_reason == f"hole {below}"


# -- no descriptor to spare -----------------------------------------------------------------------------


def test_without_a_descriptor_the_storage_is_where_it_was(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=1)
    with failing_calls(open=errno.EMFILE), pytest.raises(StorageBusy, match="Too many open files"):
        storage.commit([write(1), write(0, "s1.F")], True)
    storage.commit([write(1), write(0, "s1.F")], True)
    check_frames(storage, 0, 2)
    check_frames(storage, 0, 1, "s1.F")


# -- threads that go on ---------------------------------------------------------------------------------


def test_the_janitor_outlives_its_work(caplog: pytest.LogCaptureFixture) -> None:
    engine = LogEngine(MemoryStorage(), EngineConfig())
    engine.start([])
    done = threading.Event()

    def broken() -> None:
        raise KeyError("made up")

    engine.administration._janitor_work.put(broken)
    engine.administration._janitor_work.put(done.set)
    assert done.wait(TIMEOUT_S)
    assert "the janitor failed" in caplog.text
    engine.drain()
    engine.close()


def test_the_disk_is_looked_at_whatever_happened_the_last_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LogEngine(MemoryStorage(), EngineConfig())
    engine.start([])
    looks = [0]

    def look() -> None:
        looks[0] += 1
        raise KeyError("made up")

    monkeypatch.setattr(engine.watch, "check", look)
    eventually(lambda: looks[0] >= 2)
    assert "looking at the disk" in caplog.text
    monkeypatch.undo()
    engine.drain()
    engine.close()


def test_a_job_that_is_dropped_while_its_age_is_asked_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / JOB / STREAM).mkdir(parents=True)
    age = age_s(tmp_path, JOB)
    assert age is not None
    assert age < time.time()

    def gone(self: Path, pattern: str) -> list[Path]:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(Path, "glob", gone)
    assert age_s(tmp_path, JOB) is None

"""Quotas, a full disk and forgotten jobs, through a whole server in this process."""

import random
import time

import pytest

from swift_ft.errors import LogUnavailable, ServiceError, UsageError
from swift_ft.log import admin
from swift_ft.log.directory import LIVES_S
from swift_ft.log.record import RecordKey
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.quotas import DiskState, SpaceConfig
from swift_ft_services.logserver.state import EngineConfig
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess, impatient_about

BODY = 10_000
FRAME = BODY + 128 + 8
TIMEOUT_S = 10.0


def put(writer: LogWriter, step: int, stream: str = "s0.F") -> None:
    body = random.Random(step).randbytes(BODY)
    writer.append(stream, RecordKey(step, 0, 0), "uint8", (BODY,), body)


def config_of(**space: int) -> EngineConfig:
    return EngineConfig(space=SpaceConfig(**space))  # type: ignore[arg-type]


def test_a_full_quota_waits_for_a_trim_and_says_whose_it_is() -> None:
    with InProcess(config=config_of(job_quota_bytes=10 * FRAME)) as server:
        writer = LogWriter([server.address], JOB, 1)
        for step in range(12):
            put(writer, step)
        eventually(lambda: writer.sending.links[server.address].core._full)
        writer.sending.patience_s = 0.1
        with pytest.raises(LogUnavailable, match=rf"no room for job {JOB}: its quota is full"):
            writer.flush(TIMEOUT_S)
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert found.records == 10
        status = admin.space(server.address, JOB, 1, TIMEOUT_S)
        assert status is not None
        assert status.wants_checkpoint
        # Another job is not touched by it.
        server.engine.administration.fence("other", 1)
        other = LogWriter([server.address], "other", 1)
        put(other, 0)
        other.close()
        assert admin.trim(server.address, JOB, 5, TIMEOUT_S) == 5
        writer.set_generation(1)  # forgets the error
        writer.sending.patience_s = TIMEOUT_S
        writer.flush(TIMEOUT_S)
        writer.close()
        status = admin.status(server.address, TIMEOUT_S)
        used = {job.job: job.space.used_bytes for job in status.jobs}
        assert used == {JOB: 7 * FRAME, "other": FRAME}
        assert status.space.used_bytes == 8 * FRAME


def test_a_full_disk_alarm_ends_without_a_writer_when_space_is_back() -> None:
    storage, free = MemoryStorage(space=5 * FRAME), [0]
    server = InProcess(storage)
    state = server.engine.state
    server.engine.watch.free_bytes = lambda: free[0]
    health: list[bool] = []
    state.on_health = health.append
    with server:
        writer = LogWriter([server.address], JOB, 1)
        for step in range(4):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        for step in range(4, 8):
            put(writer, step)
        impatient_about(writer, server.address, "no space left")
        with pytest.raises(LogUnavailable, match=r"the disk of log server .* is full; .* no space left"):
            writer.flush(TIMEOUT_S)
        writer.close(0.0)
        assert health == [False]
        status = admin.status(server.address, TIMEOUT_S)
        assert status.space.alarm == 2
        assert "no space left" in status.space.reason
        # Reading, trimming and fencing work.
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert len(server.read()) == found.records * FRAME > 0
        admin.fence(server.address, JOB, 2, TIMEOUT_S)
        assert admin.trim(server.address, JOB, found.records, TIMEOUT_S) == found.records
        # Trimmed, but the disk says that others have taken the room.
        eventually(lambda: time.monotonic() > state.space._until)
        server.engine.watch.check()
        assert health == [False]
        assert state.space.disk is DiskState.FULL
        free[0] = 64 << 20
        eventually(lambda: state.space.disk is DiskState.TRYING)
        assert health == [False]
        eventually(lambda: health == [False, True])
        assert admin.status(server.address, TIMEOUT_S).space.alarm == 0


def test_a_job_that_lives_is_not_dropped() -> None:
    storage, skew = MemoryStorage(), [0.0]
    with InProcess(storage, clock=lambda: time.monotonic() + skew[0]) as server:
        writer = LogWriter([server.address], JOB, 1)
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        with pytest.raises(UsageError, match=r"no job nobody here$"):
            admin.drop(server.address, "nobody", TIMEOUT_S)
        with pytest.raises(ServiceError, match=r"last spoken for \d s ago \(generation 1\)"):
            admin.drop(server.address, JOB, TIMEOUT_S)
        # Nor while it is quiet, but has a writer; nor soon after its coordinator has asked for it.
        state = server.engine.state
        skew[0] = 2 * LIVES_S
        with pytest.raises(ServiceError, match="last spoken for"):
            admin.drop(server.address, JOB, TIMEOUT_S)
        writer.close()
        eventually(lambda: not state.holders)
        admin.space(server.address, JOB, 1, TIMEOUT_S)
        with pytest.raises(ServiceError, match="last spoken for"):
            admin.drop(server.address, JOB, TIMEOUT_S)
        skew[0] = 4 * LIVES_S
        admin.status(server.address, TIMEOUT_S, JOB)  # an operator who looks is nobody's coordinator
        assert admin.drop(server.address, JOB, TIMEOUT_S) == (1, FRAME)
        assert admin.status(server.address, TIMEOUT_S).jobs == []
        assert storage.frames == {}
        assert storage.metas == {}
        assert server.engine.state.space.server.used_bytes == 0


def test_a_forced_drop_cuts_writers_off_and_the_name_is_free() -> None:
    with InProcess() as server:
        writer = LogWriter([server.address], JOB, 1)
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert admin.drop(server.address, JOB, TIMEOUT_S, force=True) == (1, FRAME)
        put(writer, 1)
        impatient_about(writer, server.address, "is not granted")
        with pytest.raises(LogUnavailable, match="is not granted"):
            writer.flush(TIMEOUT_S)
        writer.close(0.0)
        assert [job.job for job in admin.status(server.address, TIMEOUT_S).jobs] == []
        admin.fence(server.address, JOB, 1, TIMEOUT_S)
        heir = LogWriter([server.address], JOB, 1)
        put(heir, 0)
        heir.close()
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert (found.records, found.next_sequence) == (1, 1)


def test_a_drop_that_the_disk_refuses_keeps_the_job() -> None:
    storage = MemoryStorage()
    with InProcess(storage) as server:
        writer = LogWriter([server.address], JOB, 1)
        put(writer, 0)
        writer.close()
        storage.failing = "made up"
        with pytest.raises(LogUnavailable, match="made up"):
            admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        storage.failing = ""
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert found.records == 1
        assert server.engine.state.space.job(JOB).used_bytes == FRAME


@pytest.mark.parametrize(
    ("age_s", "skew_s", "dropped"), [(50.0, 100.0, False), (200.0, 70.0, False), (200.0, 101.0, True)]
)
def test_an_age_limit_drops_what_files_and_server_both_call_old(
    age_s: float, skew_s: float, dropped: bool
) -> None:
    """The wall clock alone, which the age of files is told by, drops nothing."""
    skew = [0.0]
    engine = LogEngine(
        MemoryStorage(), EngineConfig(), age_s=lambda job: age_s, clock=lambda: time.monotonic() + skew[0]
    )
    engine.start([])
    engine.administration.fence(JOB, 1)
    skew[0] = skew_s
    engine.retention.drop_old(100.0)
    assert (JOB not in engine.state.core.jobs) is dropped
    engine.drain()
    engine.close()


def test_without_an_age_limit_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def age_s(job: str) -> float:
        asked.append(job)
        return 1e9

    engine = LogEngine(MemoryStorage(), EngineConfig(), age_s=age_s)
    engine.start([])
    engine.administration.fence(JOB, 1)
    looks = [0]

    def look() -> None:
        looks[0] += 1

    monkeypatch.setattr(engine.watch, "check", look)
    eventually(lambda: looks[0] >= 2)
    assert asked == []
    engine.drain()
    engine.close()


def test_space_taken_ahead_is_given_back_once_when_nobody_writes_the_job() -> None:
    skew, storage = [0.0], MemoryStorage()
    with InProcess(storage, clock=lambda: time.monotonic() + skew[0]) as server:
        retention, state = server.engine.retention, server.engine.state
        retention.stop()
        for given_back in ([JOB], [JOB, JOB]):
            writer = LogWriter([server.address], JOB, 1)
            put(writer, len(given_back))
            writer.flush(TIMEOUT_S)
            skew[0] += 60.0
            retention.give_back()
            assert storage.given_back == given_back[1:], "it has a writer"
            writer.close()
            eventually(lambda: not state.holders)
            skew[0] += 60.0
            retention.give_back()
            retention.give_back()
            assert storage.given_back == given_back

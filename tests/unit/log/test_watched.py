"""What watches a log server changes nothing of it; and its health follows from its state."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft.errors import LogUnavailable
from swift_ft.log.protocol import SERVICE
from swift_ft.log.record import RecordKey
from swift_ft.metrics import Distribution
from swift_ft_services.logserver.disk import RealDisk
from swift_ft_services.logserver.metrics import ObservedDisk, ObservedFile, ObservedStorage, usage
from swift_ft_services.logserver.segments import StorageFailed, StorageFull
from swift_ft_services.logserver.storage import DirectoryStorage, JobMeta
from swift_ft_services.logserver.storage_interface import Write
from tests.log_client import LogWriter
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess, impatient_about


def status(service: InProcess) -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10).status)


def test_a_storage_that_is_watched_says_what_it_would_say() -> None:
    inner = MemoryStorage(space=100)
    watched = ObservedStorage(inner)
    watched.commit([Write("a", "s", 0, [b"12345"]), Write("b", "s", 0, [b"123"])], True)
    assert (watched.appended_records, watched.appended_bytes) == ({"a": 1, "b": 1}, {"a": 5, "b": 3})
    with pytest.raises(StorageFull):
        watched.commit([Write("a", "s", 1, [bytes(200)])], True)
    assert watched.appended_records["a"] == 2
    assert watched.acknowledged_records == {"a": 1, "b": 1}
    inner.failing = "EIO"
    with pytest.raises(StorageFailed):
        watched.commit([], True)
    assert watched.failures == {"StorageFull": 1, "StorageFailed": 1}
    assert watched.commit_s.read()[0][-1] == ("+Inf", 1.0)
    inner.failing = ""
    watched.save("a", JobMeta(generation=3))
    assert inner.metas["a"].generation == 3
    watched.close()
    assert inner.closed


def test_a_disk_that_is_watched_is_the_same_disk(tmp_path: Path) -> None:
    disk = ObservedDisk(RealDisk(tmp_path / "d"))
    storage = DirectoryStorage(tmp_path / "d", 1 << 20, disk.as_disk())
    storage.recover()
    storage.save("a", JobMeta(generation=1))
    before = disk.sync_s.read()[0][-1][1]
    assert before > 0
    storage.commit([Write("a", "s", 0, [bytes(5000)])], False)
    created = disk.sync_s.read()[0][-1][1]
    storage.commit([Write("a", "s", 1, [bytes(5000)])], True)
    assert disk.sync_s.read()[0][-1][1] == created + 1
    segments, used = usage(tmp_path / "d")
    assert segments == 1
    assert used >= 10_000
    storage.close()


class Synced:
    """A file that counts its syncs."""

    syncs = 0
    size = 7

    def sync(self) -> None:
        self.syncs += 1

    def write(self, offset: int, parts: object) -> None: ...

    def read(self, offset: int, size: int) -> bytes:
        return b""


def test_a_file_that_is_watched_is_synced() -> None:
    file, times = Synced(), Distribution((1.0,))
    watched = ObservedFile(file, times)  # type: ignore[arg-type]
    watched.sync()
    watched.sync()
    assert (file.syncs, watched.size, times.read()[0][-1]) == (2, 7, ("+Inf", 2.0))


def test_what_vanishes_is_left_out(tmp_path: Path) -> None:
    assert usage(tmp_path / "absent") == (0, 0)


def test_health_follows_the_state_whoever_sets_it() -> None:
    """A commit that finds space again during a drain must not make it SERVING."""
    with InProcess() as service:
        assert status(service) == health_pb2.HealthCheckResponse.SERVING
        service.engine.drain()
        assert status(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        service.engine.state.on_health(True)
        assert status(service) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_failed_storage_is_not_serving_and_says_so_in_its_snapshot() -> None:
    storage = MemoryStorage()
    with InProcess(storage) as service:
        writer = LogWriter([service.address], JOB, 1)
        storage.failing = "EIO, made up"
        writer.append("s0.F", RecordKey(0, 0, 0), "uint8", (3,), b"abc")
        impatient_about(writer, service.address, "made up")
        with pytest.raises(LogUnavailable, match="made up"):
            writer.flush(10)
        assert status(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        snapshot = service.engine.snapshot()
        assert (snapshot.state, snapshot.queued_records) == ("failed", 0)
        writer.close(0.0)

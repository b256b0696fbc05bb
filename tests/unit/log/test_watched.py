"""What watches a log server changes nothing of it; and its health follows from its state."""

from pathlib import Path

from grpc_health.v1 import health_pb2

from swift_ft_services.logserver.disk import RealDisk
from swift_ft_services.logserver.metrics import LogMetrics
from swift_ft_services.logserver.storage import DirectoryStorage, JobMeta
from swift_ft_services.logserver.storage_interface import Write
from tests.unit.log.service import InProcess


def test_commits_are_counted(tmp_path: Path) -> None:
    metrics = LogMetrics(tmp_path)

    def counted(name: str) -> dict[str, int]:
        return dict(metrics._counts[f"swift_log_{name}_total"])

    mending = Write("b", "s", 0, [b"123"], mends=True)
    metrics.committed([Write("a", "s", 0, [b"12345"]), mending], 0.1, "")
    metrics.committed([Write("a", "s", 1, [bytes(200)])], 0.1, "StorageFull")
    metrics.close()
    assert (counted("appended_records"), counted("appended_bytes")) == ({"a": 2, "b": 1}, {"a": 205, "b": 3})
    assert counted("commit_failures") == {"StorageFull": 1}
    assert metrics.commit_s.read()[0][-1] == ("+Inf", 1.0)


def test_syncs_are_timed(tmp_path: Path) -> None:
    syncs: list[float] = []
    storage = DirectoryStorage(tmp_path / "d", 1 << 20, RealDisk(tmp_path / "d", syncs.append))
    storage.recover()
    storage.save("a", JobMeta(generation=1))
    storage.commit([Write("a", "s", 0, [bytes(5000)])], False)
    created = len(syncs)
    assert created
    storage.commit([Write("a", "s", 1, [bytes(5000)])], True)
    assert len(syncs) == created + 1
    storage.close()


def test_health_follows_the_state_whoever_sets_it() -> None:
    """A commit that finds space again during a drain must not make it SERVING."""
    with InProcess() as service:
        assert service.health_status() == health_pb2.HealthCheckResponse.SERVING
        service.engine.drain()
        assert service.health_status() == health_pb2.HealthCheckResponse.NOT_SERVING
        service.engine.state.on_health(True)
        assert service.health_status() == health_pb2.HealthCheckResponse.NOT_SERVING

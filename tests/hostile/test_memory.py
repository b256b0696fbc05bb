"""What clients can make a log server keep in memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from swift_ft._pb import log_pb2
from swift_ft.log import admin
from swift_ft.log.protocol import CALLS_PER_CONNECTION, SERVICE, Fsync, code_of, reason_of
from swift_ft.log.record import RecordKey
from swift_ft.tokens import LOG
from swift_ft_services.logserver.core import IndexEntry
from swift_ft_services.logserver.quotas import SpaceConfig
from swift_ft_services.logserver.state import EngineConfig
from tests.health_probe import check_service
from tests.hostile.clients import Connection
from tests.hostile.world import BOUND_S, STREAM, Neighbour, Server, frame, message, opening
from tests.integration.logserver_world import LogServer
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.clients import following, reading

GROWTH_MAX = 96 << 20
MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LogServer]:
    with LogServer(tmp_path / "log", "--fsync", "never") as server:
        yield server


def resident(server: LogServer) -> int:
    assert server.process is not None
    return int(psutil.Process(server.process.pid).memory_info().rss)


def test_acknowledgements_that_nobody_reads_are_not_kept(server: LogServer) -> None:
    """One record, sent again and again: each time it is acknowledged, and the window is 0.

    Kept, each acknowledgement took about 900 bytes: 217 MB for what is sent here. What there may be does not depend on
    how much was sent: it is what gRPC takes ahead of its reader, a window that it makes as large as the line was quick
    while the server stood still (25 MB were seen on a busy machine, none on a quiet one).
    """
    server.fence(1)
    again = message(*[frame("job", 0, 0)] * 2000)
    with Connection(server.address) as deaf:
        stream = deaf.begin(LOG + "Append")
        deaf.message(stream, opening("job"))
        deaf.message(stream, message(frame("job", 0, 0)))
        for _ in range(20):
            deaf.message(stream, again)
        before = resident(server)
        for _ in range(120):
            deaf.message(stream, again)
        assert resident(server) - before < GROWTH_MAX
        Neighbour().use(server.address)


def test_readers_that_do_not_read_share_what_is_read_ahead(server: LogServer) -> None:
    server.fence(1)
    body = bytes(MIB)
    writer = LogWriter([server.address], "job", 1, patience_s=BOUND_S)
    for step in range(12):
        writer.append(STREAM, RecordKey(step, 0, 0), "uint8", (MIB,), body)
    writer.flush(BOUND_S)
    writer.close()
    before = resident(server)
    request = log_pb2.ReadRequest(job="job", stream=STREAM, follow=True).SerializeToString()
    with ExitStack() as stack:
        for call in range(100):
            if call % CALLS_PER_CONNECTION == 0:
                deaf = stack.enter_context(Connection(server.address))
            deaf.message(deaf.begin(LOG + "Read"), request, end=True)
        eventually(lambda: admin.status(server.address, BOUND_S, "job").jobs[0].readers == 100)
        Neighbour().use(server.address)
        assert resident(server) - before < 400 * MIB
        with reading(server.address) as reader, following(reader, STREAM, 0) as cursor:
            for step in range(12):
                assert bytes(cursor.get(RecordKey(step, 0, 0), BOUND_S, lambda: False).body) == body


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", LOG + "Fence"])
def test_large_requests_are_refused_before_there_is_memory_for_them(server: LogServer, method: str) -> None:
    before, peak = resident(server), [0]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident(server))

    looking = threading.Thread(target=look)
    looking.start()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        for size in (5 * MIB, 150 * MIB):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method)(bytes(size), timeout=20))
            assert code_of(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
    done.set()
    looking.join()
    assert peak[0] - before < GROWTH_MAX
    assert check_service(server.address).status == "SERVING"


def test_records_of_a_job_are_limited_and_a_trim_makes_room(tmp_path: Path) -> None:
    config = EngineConfig(job_records_max=10)
    with Server(tmp_path / "log", config) as server:
        admin.fence(server.address, "job", 1, BOUND_S)
        for sequence in range(10):
            server.put([opening("job"), message(frame("job", sequence, sequence))], sequence + 1)
        (status,) = admin.status(server.address, BOUND_S, "job").jobs
        assert "10 records of the 10" in status.wants_checkpoint
        with pytest.raises(grpc.RpcError, match="--job-records-max") as caught:
            server.put([opening("job"), message(frame("job", 10, 10))], 11)
        assert (code_of(caught.value), reason_of(caught.value)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "over-quota",
        )
        neighbour = Neighbour()
        neighbour.use(server.address)
        admin.trim(server.address, "job", 5, BOUND_S)
        server.put([opening("job"), message(frame("job", 10, 10))], 11)
        assert admin.inventory(server.address, "job", BOUND_S)[0].records == 6


def test_a_full_quota_is_seen_by_health_at_once_and_its_end_too(tmp_path: Path) -> None:
    size = len(frame("job", 0, 0))
    config = EngineConfig(space=SpaceConfig(quota_bytes=4 * size))
    with Server(tmp_path / "log", config) as server:
        admin.fence(server.address, "job", 1, BOUND_S)
        server.put([opening("job"), message(*[frame("job", at, at) for at in range(4)])], 4)
        with pytest.raises(grpc.RpcError, match="a checkpoint lets it be trimmed"):
            server.put([opening("job"), message(frame("job", 4, 4))], 5)
        for name in ("", SERVICE):
            assert check_service(server.address, name).status == "NOT_SERVING"
        status = admin.status(server.address, BOUND_S)
        assert status.space.alarm == log_pb2.FULL
        assert "the server keeps" in status.space.reason
        admin.trim(server.address, "job", 4, BOUND_S)
        eventually(lambda: check_service(server.address).status == "SERVING", BOUND_S)


def test_names_of_jobs_are_told_to_nobody_and_an_unknown_one_is_unknown_among_many(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        for number in range(300):
            server.engine.state.core.fence(f"secret-job-with-a-name-{number:03}", 1)
        for call, request in (
            (server.stub.Fence, log_pb2.FenceRequest(job="nobody", generation=2, held=True)),
            (server.stub.Reset, log_pb2.ResetRequest(job="nobody", generation=2)),
            (server.stub.Drop, log_pb2.DropRequest(job="nobody")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=BOUND_S)
            assert (code_of(caught.value), reason_of(caught.value)) == (
                grpc.StatusCode.NOT_FOUND,
                "unknown-job",
            )
            assert "secret" not in str(caught.value)


def test_a_job_that_is_large_does_not_hold_up_another_one(tmp_path: Path) -> None:
    """Inventories, digests, trims and a reset of half a million records' job, while another one appends."""
    with Server(tmp_path / "log") as server:
        core = server.engine.state.core
        core.fence("large", 1)
        fill(server, 100, 2000)
        quiet = appends(server, 60)
        stop = threading.Event()
        attackers = [threading.Thread(target=ask_again_and_again, args=(server, stop)) for _ in range(4)]
        for attacker in attackers:
            attacker.start()
        try:
            busy = appends(server, 60)
        finally:
            stop.set()
            for attacker in attackers:
                attacker.join()
        # In one process all share the interpreter: what is looked for is a call that holds the lock for its length.
        assert sorted(busy)[len(busy) // 2] < 0.1, (quiet, busy)


def fill(server: Server, streams: int, records: int) -> None:
    """Records that only the index has."""
    job = server.engine.state.core.job("large")
    for number in range(streams):
        stream = job.stream(f"s{number}.F")
        for sequence in range(records):
            stream.add(IndexEntry(sequence, RecordKey(sequence, 0, 0), bytes(16), 1, 137))
        stream.durable = stream.appended = records


def ask_again_and_again(server: Server, stop: threading.Event) -> None:
    step = 0
    while not stop.is_set():
        server.stub.Inventory(log_pb2.InventoryRequest(job="large"), timeout=30)
        step += 10
        server.stub.Trim(log_pb2.TrimRequest(job="large", below_step=step), timeout=30)


def appends(server: Server, count: int) -> list[float]:
    """How long each took to be acknowledged."""
    core = server.engine.state.core
    if core.generation_of("other") == 0:
        admin.fence(server.address, "other", 1, BOUND_S)
    job = core.jobs["other"]
    took = []
    for _ in range(count):
        stream = job.streams.get("s0.F")
        sequence = 0 if stream is None else stream.appended
        began = time.monotonic()
        server.put([opening("other"), message(frame("other", sequence, sequence))], sequence + 1)
        took.append(time.monotonic() - began)
    return took


def test_streams_of_one_record_take_little_of_the_disk(tmp_path: Path) -> None:
    """Space is taken ahead: by what a file has, not by what it may come to have."""
    with Server(tmp_path / "log", EngineConfig(fsync=Fsync.NEVER)) as server:
        admin.fence(server.address, "job", 1, BOUND_S)
        names = [f"s{number}" for number in range(40)]
        for name in names:
            server.put([opening("job", stream=name), message(frame("job", 0, 0, stream=name))], 1)
        blocks = [path.stat().st_blocks for path in (tmp_path / "log" / "job").rglob("*") if path.is_file()]
    assert len(blocks) > len(names)
    assert sum(blocks) * 512 < len(names) * 256 << 10

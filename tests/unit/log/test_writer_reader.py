"""The Python API end to end against a server in this process: writer, reader, cursor, admin."""

import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import (
    Divergence,
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    RecordMissing,
    RecordTrimmed,
    SequenceConflict,
    ServiceError,
    StaleGeneration,
    UsageError,
)
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, StreamCursor, never
from swift_ft.log.record import RecordKey, digest_of
from swift_ft.log.writer import LogWriter
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess, eventually

TIMEOUT_S = 10.0


def key(step: int, microbatch: int = 0, slot: int = 0) -> RecordKey:
    return RecordKey(step, microbatch, slot)


@pytest.fixture
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running


@contextmanager
def writing(server: InProcess, **options: object) -> Iterator[LogWriter]:
    writer = LogWriter([server.address], JOB, 1, **options)  # type: ignore[arg-type]
    try:
        yield writer
    finally:
        writer.close(0.0)


@contextmanager
def reading(server: InProcess, **options: int) -> Iterator[LogReader]:
    reader = LogReader([server.address], JOB, **options)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def following(reader: LogReader, stream: str, from_step: int) -> Iterator[StreamCursor]:
    cursor = reader.follow(stream, from_step)
    try:
        yield cursor
    finally:
        cursor.close()


def put(
    writer: LogWriter, step: int, microbatch: int = 0, stream: str = "s0.F", value: int | None = None
) -> None:
    value = step * 100 + microbatch if value is None else value
    writer.append(stream, key(step, microbatch), "int64", (1,), struct.pack("<q", value))


def value_of(body: memoryview) -> int:
    return int(struct.unpack("<q", body)[0])


def test_append_flush_read(server: InProcess) -> None:
    with writing(server) as writer, reading(server) as reader:
        for step in range(3):
            for microbatch in (2, 0, 1):
                put(writer, step, microbatch)
        writer.append("s0.B", key(0), "bfloat16", (2, 0), b"")
        writer.flush(TIMEOUT_S)
        assert (writer.stats.records, writer.stats.bytes, writer.stats.verified) == (10, 72, 0)
        with following(reader, "s0.F", 1) as cursor:
            for microbatch in (0, 1, 2):
                record = cursor.get(key(1, microbatch), TIMEOUT_S, never)
                assert value_of(record.body) == 100 + microbatch
                assert (record.key, record.dtype, record.shape) == (key(1, microbatch), "int64", (1,))
                assert (record.generation, record.digest) == (1, digest_of("int64", (1,), record.body))
        with following(reader, "s0.B", 0) as cursor:
            record = cursor.get(key(0), TIMEOUT_S, never)
            assert (record.dtype, record.shape, record.body.nbytes) == ("bfloat16", (2, 0), 0)
        digests = reader.digests("s0.F", 1, cancelled=never)
        assert digests == {
            key(step, microbatch): digest_of("int64", (1,), struct.pack("<q", step * 100 + microbatch))
            for step in (1, 2)
            for microbatch in range(3)
        }
        assert reader.digests("never", 0, cancelled=never) == {}
    inventory = {stream.stream: stream for stream in admin.inventory(server.address, JOB, TIMEOUT_S)}
    assert (inventory["s0.F"].records, inventory["s0.F"].first_step, inventory["s0.F"].last_step) == (9, 0, 2)
    assert (inventory["s0.F"].next_sequence, inventory["s0.F"].durable_sequence) == (9, 9)
    assert admin.inventory(server.address, "unknown", TIMEOUT_S) == []


def test_codec_by_stream(server: InProcess) -> None:
    zeros = bytes(1 << 16)
    with writing(server, codec={"a": "lz4"}) as writer, reading(server) as reader:
        for stream in ("a", "b"):
            writer.append(stream, key(0), "uint8", (1 << 16,), zeros)
        writer.flush(TIMEOUT_S)
        sizes = {stream.stream: stream.bytes for stream in admin.inventory(server.address, JOB, TIMEOUT_S)}
        assert sizes["a"] < 2000 < len(zeros) < sizes["b"]
        for stream in ("a", "b"):
            with following(reader, stream, 0) as cursor:
                assert cursor.get(key(0), TIMEOUT_S, never).body == zeros


# -- verify or fill ---------------------------------------------------------------------------------


def test_a_key_appended_before_is_compared_not_sent(server: InProcess) -> None:
    with writing(server) as writer:
        put(writer, 0)
        put(writer, 0)  # an aborted step that is redone
        put(writer, 1)
        writer.flush(TIMEOUT_S)
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert (writer.stats.records, writer.stats.verified) == (2, 2)
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert stream.records == 2


def test_expected_keys_are_compared_and_holes_are_filled(server: InProcess) -> None:
    with writing(server) as writer:
        put(writer, 0)
        put(writer, 1)
        writer.flush(TIMEOUT_S)
    with writing(server) as replaying, reading(server) as reader:
        replaying.expect("s0.F", reader.digests("s0.F", 0, cancelled=never))
        for step in range(4):
            put(replaying, step)
        replaying.flush(TIMEOUT_S)
        assert (replaying.stats.verified, replaying.stats.records) == (2, 2)
        assert sorted(reader.digests("s0.F", 0, cancelled=never)) == [key(step) for step in range(4)]


def test_divergence_names_the_record(server: InProcess) -> None:
    with writing(server) as writer:
        writer.expect("s2.B", {key(7, 3): digest_of("int64", (1,), struct.pack("<q", 1))})
        put(writer, 7, 3, "s2.B", value=2)
        with pytest.raises(Divergence, match=r"s2.B step 7 microbatch 3 slot 0"):
            writer.flush(TIMEOUT_S)
        with pytest.raises(Divergence):  # until the next generation
            put(writer, 8, stream="s2.B")
        writer.set_generation(1)
        put(writer, 8, stream="s2.B")
        writer.flush(TIMEOUT_S)
        assert isinstance(writer.unlogged.refusal(), Divergence)  # the record does not come again
        assert writer.unlogged.refusal() is None
    with writing(server) as writer:
        put(writer, 1, value=5)
        put(writer, 1, value=6)
        with pytest.raises(Divergence):
            writer.flush(TIMEOUT_S)


def test_which_streams_a_server_has(server: InProcess) -> None:
    """Where it lacks a stream, its digests are none; where they cannot be had, it does not say so."""
    with writing(server) as writer, reading(server) as reader:
        for step in range(3):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        held = reader.holdings(server.address)
        assert held is not None
        assert (held.lacks("s0.B", 0), held.lacks("s0.F", 0)) == (True, False)
        assert reader.digests("s0.B", 0, cancelled=never) == {}
        admin.trim(server.address, JOB, 2, TIMEOUT_S)
        held = reader.holdings(server.address)
        assert held is not None
        assert (held.lacks("s0.B", 2), held.lacks("s0.B", 1)) == (True, False)
        with pytest.raises(RecordTrimmed):
            reader.digests("s0.B", 1, cancelled=never)
        assert reader.holdings("127.0.0.1:1") is None, "nobody answers"
    other = LogReader([server.address], "other")
    assert other.holdings(server.address) is None, "it does not know the job"
    other.close()


def test_a_server_makes_the_digests_answer_without_keeping_others_waiting(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(server) as writer:
        put(writer, 1)
        writer.flush(TIMEOUT_S)
    changed, free = server.engine.state.changed, []
    make = log_pb2.RecordDigest

    def making(**fields: object) -> log_pb2.RecordDigest:
        def look() -> None:
            free.append(changed.acquire(timeout=1.0))
            if free[-1]:
                changed.release()

        other = threading.Thread(target=look)
        other.start()
        other.join()
        return make(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(log_pb2, "RecordDigest", making)
    (found,) = server.engine.reading.digests(log_pb2.DigestsRequest(job=JOB, stream="s0.F"))
    assert [record.step for record in found] == [1]
    assert free == [True]


def test_forgotten_keys_are_sent_and_the_server_answers(server: InProcess) -> None:
    """Nobody does this rightly: the server has the key, so it refuses a second record of the same name."""
    with writing(server) as writer:
        for step in (1, 2):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        writer.forget_below(2)
        put(writer, 2)
        writer.flush(TIMEOUT_S)
        assert writer.stats.verified == 1
        put(writer, 1)
        with pytest.raises(SequenceConflict, match="is record 0 already"):
            writer.flush(TIMEOUT_S)


# -- generations ------------------------------------------------------------------------------------


def test_a_fence_and_the_next_generation(server: InProcess) -> None:
    with writing(server, patience_s=1.0) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        admin.fence(server.address, JOB, 2, TIMEOUT_S)
        put(writer, 1)  # queued; the server has said that the generation is stale
        with pytest.raises(StaleGeneration, match="generation 1 of job job was fenced"):
            writer.flush(TIMEOUT_S)
        writer.set_generation(2)
        writer.flush(TIMEOUT_S)
        put(writer, 2)
        writer.flush(TIMEOUT_S)
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert stream.records == 3
        with pytest.raises(UsageError, match="older"):
            writer.set_generation(1)


def test_fences_under_load_lose_and_double_nothing(server: InProcess) -> None:
    with writing(server) as writer, reading(server) as reader:
        for generation in range(2, 8):
            for step in range(generation * 40, generation * 40 + 40):
                put(writer, step)
            admin.fence(server.address, JOB, generation, TIMEOUT_S)
            writer.set_generation(generation)
        writer.flush(TIMEOUT_S)
        assert sorted(reader.digests("s0.F", 0, cancelled=never)) == [key(step) for step in range(80, 320)]
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert (stream.records, stream.next_sequence) == (240, 240)


def test_a_generation_that_is_not_granted_yet_is_waited_for(server: InProcess) -> None:
    with writing(server) as writer:
        writer.set_generation(3)
        put(writer, 0)
        with pytest.raises(ServiceError, match=r"within 0.3 s"):
            writer.flush(0.3)
        admin.fence(server.address, JOB, 3, TIMEOUT_S)
        writer.flush(TIMEOUT_S)
    with pytest.raises(StaleGeneration, match="older than the granted 3"):
        admin.fence(server.address, JOB, 2, TIMEOUT_S)


@pytest.mark.parametrize("others", [1, 2])
def test_somebody_else_writes_the_stream(server: InProcess, others: int) -> None:
    """It cannot be under fencing; if it is done, a record is never taken for another one's."""
    with writing(server) as writer, writing(server) as other:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        for step in range(others):
            put(other, 1 + step)
        other.flush(TIMEOUT_S)
        put(writer, 9)
        with pytest.raises(SequenceConflict, match=r"sent again as|somebody else has written"):
            writer.flush(TIMEOUT_S)


def test_reset_and_restart(server: InProcess) -> None:
    """The log cannot be trusted: everybody restores a checkpoint and computes other bits than were logged."""
    with writing(server) as writer, reading(server) as reader:
        for step in range(5):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        admin.fence(server.address, JOB, 2, TIMEOUT_S)
        with pytest.raises(StaleGeneration):
            admin.reset(server.address, JOB, 1, TIMEOUT_S)
        writer.set_generation(2)
        put(writer, 3, value=1)
        with pytest.raises(Divergence):
            writer.flush(TIMEOUT_S)
        admin.reset(server.address, JOB, 2, TIMEOUT_S)
        assert reader.digests("s0.F", 0, cancelled=never) == {}
        writer.restart(2)
        put(writer, 3, value=1)
        writer.flush(TIMEOUT_S)
        assert list(reader.digests("s0.F", 0, cancelled=never)) == [key(3)]
        with following(reader, "s0.F", 0) as cursor:
            record = cursor.get(key(3), TIMEOUT_S, never)
            assert (value_of(record.body), record.sequence) == (1, 5)


# -- bounds, interruption, patience --------------------------------------------------------------------


class Gate(MemoryStorage):
    """Commits nothing while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def commit(self, writes: object, sync: bool) -> None:
        assert self.open.wait(TIMEOUT_S)
        super().commit(writes, sync)  # type: ignore[arg-type]


def test_append_blocks_on_a_full_queue_and_goes_on() -> None:
    gate = Gate()
    with InProcess(gate) as server, writing(server, queue_bytes=10_000) as writer:
        gate.open.clear()
        done = threading.Event()

        def work() -> None:
            for step in range(40):
                writer.append("a", key(step), "uint8", (1000,), bytes(1000))
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: writer.queued_bytes > 5_000)
        assert not done.wait(0.3)
        assert writer.queued_bytes <= 10_000
        gate.open.set()
        assert done.wait(TIMEOUT_S)
        thread.join()
        writer.flush(TIMEOUT_S)
        assert writer.queued_bytes == 0


def test_one_record_larger_than_the_queue_is_taken_alone(server: InProcess) -> None:
    with writing(server, queue_bytes=100) as writer:
        for step in range(3):
            writer.append("a", key(step), "uint8", (5000,), bytes(5000))
        writer.flush(TIMEOUT_S)


def test_interrupt_wakes_a_blocked_append_and_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_ft.log.writer._POLL_S", TIMEOUT_S)  # it is woken, it does not look by itself
    gate = Gate()
    with InProcess(gate) as server, writing(server, queue_bytes=2_000) as writer:
        gate.open.clear()
        raised: list[float] = []

        def work() -> None:
            try:
                for step in range(40):
                    writer.append("a", key(step), "uint8", (1000,), bytes(1000))
            except LogInterrupted:
                raised.append(time.monotonic())

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: writer.queued_bytes > 1000 and writer.delivery.handed_over)
        time.sleep(0.05)  # nothing moves any more that would wake it too
        begin = time.monotonic()
        writer.interrupt()
        thread.join(TIMEOUT_S)
        assert raised
        assert raised[0] - begin < TIMEOUT_S / 2
        with pytest.raises(LogInterrupted):
            put(writer, 99)
        with pytest.raises(LogInterrupted):
            writer.flush(TIMEOUT_S)
        gate.open.set()
        admin.fence(server.address, JOB, 2, TIMEOUT_S)
        writer.set_generation(2)
        put(writer, 99)
        writer.flush(TIMEOUT_S)


def test_flush_in_time_and_patience() -> None:
    gate = Gate()
    with InProcess(gate) as server, writing(server, patience_s=TIMEOUT_S) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        gate.open.clear()
        put(writer, 1)
        with pytest.raises(ServiceError, match=r"has not acknowledged everything within 0.1 s"):
            writer.flush(0.1)
        writer.delivery.patience_s = 0.6
        with pytest.raises(LogUnavailable, match="has acknowledged nothing for"):
            writer.flush(TIMEOUT_S)
        with pytest.raises(LogUnavailable):
            put(writer, 2)
        gate.open.set()  # it moves again: so does the writer
        eventually(lambda: not writer.delivery.links[server.address].pending)
        put(writer, 3)
        writer.flush(TIMEOUT_S)


def test_no_server_at_all() -> None:
    writer = LogWriter(["127.0.0.1:1"], JOB, 1, patience_s=0.4)
    put(writer, 0)
    with pytest.raises(LogUnavailable, match=r"log server 127.0.0.1:1 has acknowledged nothing"):
        writer.flush(TIMEOUT_S)
    with pytest.raises(LogUnavailable):
        writer.close(1.0)
    with pytest.raises(ServiceError, match="closed"):
        put(writer, 1)
    with pytest.raises(LogUnavailable, match="did not answer in time"):
        admin.fence("127.0.0.1:1", JOB, 1, 0.3)
    reader = LogReader(["127.0.0.1:1"], JOB)
    with pytest.raises(LogUnavailable):
        reader.digests("a", 0, timeout_s=0.3, cancelled=never)
    reader.close()


def test_a_writer_without_work_is_never_impatient(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + idle_s)
    monkeypatch.setattr("swift_ft.log.sender.time", clock)
    with writing(server, patience_s=TIMEOUT_S) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        idle_s = 3 * TIMEOUT_S
        put(writer, 1)
        writer.flush(TIMEOUT_S)


def test_a_server_with_a_lower_limit_refuses_with_advice() -> None:
    with InProcess(config=EngineConfig(body_bytes_max=100)) as server, writing(server) as writer:
        writer.append("a", key(0), "uint8", (100,), bytes(100))
        writer.flush(TIMEOUT_S)
        writer.append("a", key(1), "uint8", (101,), bytes(101))
        with pytest.raises(UsageError, match="--body-bytes-max"):
            writer.flush(TIMEOUT_S)


def test_a_full_disk_is_waited_out() -> None:
    storage = MemoryStorage(space=500)
    with InProcess(storage) as server, writing(server, patience_s=30.0) as writer:
        for step in range(5):
            put(writer, step)
        with pytest.raises(ServiceError):
            writer.flush(0.3)
        storage.space = 1 << 30
        writer.flush(TIMEOUT_S)
        assert writer.stats.resent > 0
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert (stream.records, stream.next_sequence) == (5, 5)


@pytest.mark.parametrize(
    ("stream", "step", "dtype", "shape", "body", "message"),
    [
        ("../a", 0, "uint8", (1,), b"x", "stream name"),
        ("a", -1, "uint8", (1,), b"x", "out of range"),
        ("a", 0, "float31", (1,), b"x", "element type"),
        ("a", 0, "uint8", (2,), b"x", "takes 2 bytes, not 1"),
        ("a", 0, "uint8", (-1, -1), b"x", "takes 1 bytes, not 1"),
        ("a", 0, "uint8", (1,) * 9, b"x", "9 dimensions"),
        ("a", 0, "uint8", (2,), memoryview(b"abcd")[::2], "contiguous"),
    ],
)
def test_bad_appends(
    server: InProcess,
    stream: str,
    step: int,
    dtype: str,
    shape: tuple[int, ...],
    body: bytes,
    message: str,
) -> None:
    with writing(server) as writer, pytest.raises(UsageError, match=message):
        writer.append(stream, RecordKey(step, 0, 0), dtype, shape, body)


def test_bad_writers_and_readers() -> None:
    for servers, job, options in [
        ([], JOB, {}),
        (["a:1"], "a/b", {}),
        (["a:1"], JOB, {"codec": "zip"}),
        (["a:1"], JOB, {"codec": {"s": "zip"}}),
        (["a:1"], JOB, {"queue_bytes": 0}),
        (["a:1"], JOB, {"patience_s": 0}),
    ]:
        with pytest.raises(UsageError):
            LogWriter(servers, job, 1, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        LogReader([], JOB)
    with pytest.raises(UsageError):
        LogReader(["a:1"], "")


# -- cursors ------------------------------------------------------------------------------------------


def test_following_a_stream_that_is_being_written(server: InProcess) -> None:
    with reading(server) as reader, following(reader, "s0.F", 2) as cursor, writing(server) as writer:
        got = []

        def consume() -> None:
            for step in range(2, 30):
                got.append(value_of(cursor.get(key(step), TIMEOUT_S, never).body))

        thread = threading.Thread(target=consume)
        thread.start()
        for step in range(30):
            put(writer, step)
            time.sleep(0.002)
        thread.join(TIMEOUT_S)
        assert got == [step * 100 for step in range(2, 30)]


def test_large_records_travel_in_pieces_between_small_ones(tmp_path: Path) -> None:
    """Sizes around that of a message; over files that end between them; read in order and verified."""
    sizes = [10, 4 << 20, (4 << 20) + 1, 70_000, 3, (9 << 20) + 5, 0, *[900_000] * 9, (13 << 20) - 7, 1]
    bodies = [random.Random(size).randbytes(size) for size in sizes]
    storage = DirectoryStorage(tmp_path, 6 << 20)
    storage.recover()
    with InProcess(storage) as server, writing(server) as writer, reading(server) as reader:
        for step, body in enumerate(bodies):
            writer.append("s0.F", key(step), "uint8", (len(body),), body)
            writer.flush(TIMEOUT_S)  # a commit goes into one file
        assert len(list(tmp_path.rglob("*.seg"))) > 3
        with following(reader, "s0.F", 0) as cursor:
            for step, body in enumerate(bodies):
                assert cursor.get(key(step), TIMEOUT_S, never).body == body


def test_missing_cancelled_closed(server: InProcess) -> None:
    with reading(server) as reader:
        cursor = reader.follow("s0.F", 0)
        with pytest.raises(RecordMissing, match=r"s0.F step 0 microbatch 0 slot 0 did not come within 0.1 s"):
            cursor.get(key(0), 0.1, never)
        cancel_at = time.monotonic() + 0.2
        with pytest.raises(LogInterrupted):
            cursor.get(key(0), TIMEOUT_S, lambda: time.monotonic() > cancel_at)
        assert time.monotonic() - cancel_at < TIMEOUT_S / 2
        cursor.close()
        with pytest.raises(LogUnavailable, match="closed"):
            cursor.get(key(0), TIMEOUT_S, never)


def test_prefetch_is_bounded_but_never_deadlocks(server: InProcess) -> None:
    body = bytes(100_000)
    with writing(server) as writer, reading(server, prefetch_bytes=300_000) as reader:
        for step in range(100):
            writer.append("a", key(step), "uint8", (100_000,), body)
        writer.flush(TIMEOUT_S)
        with following(reader, "a", 0) as cursor:
            eventually(lambda: cursor._held_bytes >= 300_000)
            time.sleep(0.2)
            assert cursor._held_bytes <= 300_000 + 2_200_000  # what one message more may bring
            cursor.get(key(99), TIMEOUT_S, never)  # the last one: everything before it must come
            cursor.get(key(0), TIMEOUT_S, never)
            cursor.drop_below(50)
            assert cursor._held_bytes == 49 * 100_000
            with pytest.raises(RecordMissing):
                cursor.get(key(10), 0.1, never)
            for step in range(50, 99):
                cursor.get(key(step), TIMEOUT_S, never)
            assert cursor._held_bytes == 0


def test_fault_14_a_flipped_bit_on_the_disk_is_named(server: InProcess) -> None:
    storage = server.storage
    assert isinstance(storage, MemoryStorage)
    with writing(server) as writer, reading(server) as reader:
        for step in range(4):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        frame = bytearray(storage.frames[JOB, "s0.F"][2])
        frame[-1] ^= 1
        storage.frames[JOB, "s0.F"][2] = bytes(frame)
        with following(reader, "s0.F", 0) as cursor:
            for step in (0, 1):
                assert value_of(cursor.get(key(step), TIMEOUT_S, never).body) == step * 100
            for step in (2, 3):
                with pytest.raises(RecordCorrupt, match=r"record 2 of s0.F step 2"):
                    cursor.get(key(step), TIMEOUT_S, never)
        # From now on it is known, and the digests are refused with it.
        with pytest.raises(RecordCorrupt):
            reader.digests("s0.F", 0, cancelled=never)
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert stream.corrupt
        assert "record 2" in stream.reason
        # What a checkpoint covers does not matter.
        assert list(reader.digests("s0.F", 3, cancelled=never)) == [key(3)]


def test_fault_38_trimmed_steps_and_the_lease_of_a_reader(server: InProcess) -> None:
    with writing(server) as writer, reading(server) as reader:
        for step in range(10):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        with following(reader, "s0.F", 4) as cursor:
            cursor.get(key(4), TIMEOUT_S, never)
            assert admin.trim(server.address, JOB, 8, TIMEOUT_S) == 4
            cursor.get(key(5), TIMEOUT_S, never)
        # The reader has gone: the trim goes on by itself.
        eventually(lambda: admin.inventory(server.address, JOB, TIMEOUT_S)[0].trimmed_below_step == 8)
        for from_step in (0, 7):
            with following(reader, "s0.F", from_step) as cursor:
                with pytest.raises(RecordTrimmed, match="the oldest step there is 8"):
                    cursor.get(key(9), TIMEOUT_S, never)
            with pytest.raises(RecordTrimmed, match="the oldest step there is 8"):
                reader.digests("s0.F", from_step, cancelled=never)
        with following(reader, "s0.F", 8) as cursor:
            cursor.get(key(9), TIMEOUT_S, never)
        assert list(reader.digests("s0.F", 8, cancelled=never)) == [key(8), key(9)]
        assert admin.trim(server.address, "unknown", 8, TIMEOUT_S) == 0


def test_threads_end(server: InProcess) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with writing(server, name="ending") as writer, reading(server) as reader:
        put(writer, 0)
        with following(reader, "s0.F", 0):
            pass
    eventually(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.name.startswith(("log-", "ending")) and thread.name not in before
            ]
        )
    )


def test_what_still_waits_is_compared_although_its_step_is_forgotten(server: InProcess) -> None:
    """The end of a step forgets its keys while its last records may still wait for the background thread."""
    with writing(server) as writer:
        writer.expect("s1.F", {key(5): digest_of("uint8", (4,), bytes(4))})
        large = 32 << 20
        writer.append("s1.F", key(4), "uint8", (large,), bytes(large))  # keeps the thread busy
        writer.append("s1.F", key(5), "uint8", (4,), b"\1\1\1\1")
        writer.forget_below(10)
        with pytest.raises(Divergence, match=r"s1\.F"):
            writer.flush(TIMEOUT_S)

"""What a rank's writer promises, and what its sidecar does."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import threading
from contextlib import closing

import pytest

from swift_ft.errors import (
    Divergence,
    LogInterrupted,
    LogUnavailable,
    SequenceConflict,
    ServiceError,
    StaleGeneration,
    UsageError,
)
from swift_ft.log import admin, ring, sidecar_client
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey, digest_of
from swift_ft.log.sidecar import Message, RingWriter
from swift_ft_services.logserver.quotas import DiskState
from swift_ft_services.logserver.state import EngineConfig
from tests.log_client import Writer, close_links
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, Gate, following, key, make_durable, put, reading, value_of
from tests.unit.log.clients import rank_writing as writing
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess


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


def test_a_key_appended_before_is_compared_not_sent(server: InProcess) -> None:
    with writing(server) as writer:
        put(writer, 0)
        put(writer, 0)  # an aborted step that is redone
        make_durable(writer, 1)
        make_durable(writer, 0)
        assert (writer.stats.records, writer.stats.verified) == (2, 2)
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert stream.records == 2


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


def test_a_fence_and_the_next_generation(server: InProcess) -> None:
    with writing(server, patience_s=3.0) as writer:
        make_durable(writer, 0)
        admin.fence(server.address, JOB, 2, TIMEOUT_S)
        put(writer, 1)  # queued; the server has said that the generation is stale
        with pytest.raises(StaleGeneration, match="generation 1 of job job was fenced"):
            writer.flush(TIMEOUT_S)
        writer.set_generation(2)
        writer.flush(TIMEOUT_S)
        make_durable(writer, 2)
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert stream.records == 3
        for call in (writer.set_generation, writer.restart):
            with pytest.raises(UsageError, match="generation 1 is older than 2"):
                call(1)


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


def test_an_interrupt_stands_until_the_next_generation(server: InProcess) -> None:
    with writing(server) as writer, reading(server) as reader:
        put(writer, 0)
        writer.interrupt()
        for _ in range(2):
            with pytest.raises(LogInterrupted):
                put(writer, 1)
            with pytest.raises(LogInterrupted):
                writer.flush(TIMEOUT_S)
        server.engine.administration.fence(JOB, 2)
        writer.set_generation(2, [server.address])
        make_durable(writer, 1)
        assert set(reader.digests("s0.F", 0, cancelled=never)) == {key(0), key(1)}


@pytest.mark.parametrize("others", [1, 2])
def test_somebody_else_writes_the_stream(server: InProcess, others: int) -> None:
    """It cannot be under fencing; if it is done, a record is never taken for another one's."""
    with writing(server) as writer, writing(server) as other:
        make_durable(writer, 0)
        for step in range(others):
            put(other, 1 + step)
        other.flush(TIMEOUT_S)
        put(writer, 9)
        with pytest.raises(SequenceConflict, match=r"sent again as|somebody else has written"):
            writer.flush(TIMEOUT_S)


def test_reset_and_restart(server: InProcess) -> None:
    """The log cannot be trusted: everybody restores a checkpoint and computes other bits than were logged."""
    with writing(server) as writer, reading(server) as reader:
        make_durable(writer, *range(5))
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


def test_flush_in_time_and_patience() -> None:
    gate = Gate()
    with InProcess(gate) as server, writing(server, patience_s=0.6) as writer:
        make_durable(writer, 0)
        gate.open.clear()
        put(writer, 1)
        with pytest.raises(ServiceError, match=r"has not acknowledged everything within 0.1 s"):
            writer.flush(0.1)
        with pytest.raises(LogUnavailable, match="has acknowledged nothing for"):
            writer.flush(TIMEOUT_S)
        eventually(lambda: writer._trouble is not None)  # the sidecar says so apart from its answer
        with pytest.raises(LogUnavailable):
            put(writer, 2)
        gate.open.set()  # it moves again: so does the writer
        eventually(lambda: not writer.queued_bytes and not writer._trouble)
        make_durable(writer, 3)


def test_no_server_at_all() -> None:
    writer = Writer(["127.0.0.1:1"], JOB, 1, patience_s=0.4)
    put(writer, 0)
    with pytest.raises(LogUnavailable, match=r"log server 127.0.0.1:1 has acknowledged nothing"):
        writer.flush(TIMEOUT_S)
    with pytest.raises(LogUnavailable):
        writer.close(1.0)
    with pytest.raises(ServiceError, match="closed"):
        put(writer, 1)
    with pytest.raises(LogUnavailable, match="did not answer in time"):
        admin.fence("127.0.0.1:1", JOB, 1, 0.3)
    with reading("127.0.0.1:1") as reader, pytest.raises(LogUnavailable):
        reader.digests("a", 0, timeout_s=0.3, cancelled=never)


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
        eventually(lambda: server.engine.state.space.disk is DiskState.FULL)
        storage.space = 1 << 30
        writer.flush(TIMEOUT_S)
        assert writer.stats.resent > 0
        (stream,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert (stream.records, stream.next_sequence) == (5, 5)


@pytest.mark.parametrize(
    ("stream", "step", "dtype", "shape", "body", "message"),
    [
        ("../a", 0, "uint8", (1,), b"x", "stream name"),
        ("a", 0, "float31", (1,), b"x", "element type"),
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


def test_a_full_ring_blocks_and_interrupt_frees_at_once() -> None:
    gate = Gate()
    with InProcess(gate) as running, writing(running, queue_bytes=1 << 20) as writer:
        gate.open.clear()
        body = bytes(300 << 10)
        for step in range(3):
            writer.append("s0.F", key(step), "uint8", (len(body),), body)
        ended: list[BaseException] = []
        blocked = threading.Event()

        def append() -> None:
            blocked.set()
            try:
                writer.append("s0.F", key(3), "uint8", (len(body),), body)
            except LogInterrupted as error:
                ended.append(error)

        thread = threading.Thread(target=append)
        thread.start()
        blocked.wait()
        eventually(lambda: writer._memory.load(ring.Word.PRODUCER_WAITS))
        assert not ended
        writer.interrupt()
        thread.join(TIMEOUT_S)
        assert ended
        assert not thread.is_alive()
        with pytest.raises(LogInterrupted):
            writer.flush(TIMEOUT_S)
        writer.set_generation(1)
        gate.open.set()
        writer.append("s0.F", key(3), "uint8", (len(body),), body)
        writer.flush(TIMEOUT_S)
        assert writer.stats.records == 4


def test_a_record_larger_than_the_ring_is_refused() -> None:
    with InProcess() as running, writing(running, queue_bytes=1 << 20) as writer:
        largest = (1 << 20) - ring.HEADER_BYTES
        writer.append("s0.F", key(0), "uint8", (5,), bytes(5))  # the next one does not begin at the beginning
        writer.append("s0.F", key(1), "uint8", (largest,), bytes(largest))
        with pytest.raises(UsageError, match=r"s0\.F step 2 .* larger log_queue_bytes"):
            writer.append("s0.F", key(2), "uint8", (largest + 1,), bytes(largest + 1))
        writer.flush(TIMEOUT_S)
        assert writer.stats.records == 2


def test_a_writer_that_is_closed_says_so_and_harms_nobody() -> None:
    with InProcess() as running, writing(running) as writer:
        make_durable(writer, 0)
        writer.close()
        writer.wait_copied()
        writer.forget_below(1)
        assert (writer.stats.records, writer.queued_bytes) == (1, 0)
        assert writer.copied > 0
        for call in (
            lambda: writer.flush(1.0),
            lambda: writer.restart(2),
            lambda: writer.set_generation(2),
            lambda: put(writer, 1),
        ):
            with pytest.raises(ServiceError, match="closed"):
                call()
        writer.close()


class Overtaken(Writer):
    """Somebody asks for something at the moment in which there is a line to a new sidecar."""

    asked: threading.Thread | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_socket" and self.restarts and self.asked is None:
            asking = threading.Thread(target=self.set_generation, args=(2, (), ()))
            asking.start()
            self.asked = asking
            asking.join(0.3)  # it gets as far as it can


def test_a_request_never_comes_before_the_beginning() -> None:
    with InProcess() as running, closing(Overtaken([running.address], JOB, 1)) as writer:
        make_durable(writer, 0)
        running.engine.administration.fence(JOB, 2)
        os.kill(writer.pid, signal.SIGKILL)
        eventually(lambda: writer.asked is not None)
        assert writer.asked is not None
        writer.asked.join(TIMEOUT_S)
        assert not writer.asked.is_alive()
        make_durable(writer, 1)
        assert writer.restarts == 1


def test_one_that_goes_on_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 10 * TIMEOUT_S)
    with InProcess() as running, writing(running) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        put(writer, 0)
        threading.Timer(0.5, os.kill, (writer.pid, signal.SIGCONT)).start()
        writer.flush(TIMEOUT_S)
        assert (writer.stats.records, writer.restarts) == (1, 0)


def test_what_is_lent_may_change_once_it_is_settled() -> None:
    with InProcess() as running, writing(running) as writer:
        body = bytearray(b"\1" * (8 << 20))
        writer.append("s0.F", key(0), "uint8", (len(body),), body)
        writer.wait_copied()
        body[:] = b"\2" * len(body)
        writer.flush(TIMEOUT_S)
        with reading(running) as reader, following(reader, "s0.F", 0) as cursor:
            assert set(cursor.get(key(0), TIMEOUT_S, never).body) == {1}


@pytest.mark.parametrize("codec", ["none", "bitshuffle"])
def test_codecs_and_what_they_made_of_it(codec: str) -> None:
    body = struct.pack("<f", 1.5) * 5000
    with InProcess() as running, writing(running, codec=codec) as writer:
        for step in range(3):
            writer.append("s0.F", key(step), "float32", (5000,), body)
        writer.flush(TIMEOUT_S)
        stats = writer.stats
        assert (stats.records, stats.bytes) == (3, 3 * len(body))
        (stream,) = admin.inventory(running.address, JOB, TIMEOUT_S)
        assert (stream.bytes < stats.bytes) == (codec == "bitshuffle")
        with reading(running) as reader, following(reader, "s0.F", 0) as cursor:
            assert cursor.get(key(2), TIMEOUT_S, never).body == body
    assert writer.stats == stats


def test_an_error_is_told_together_with_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that was told begins a new generation at once, and must not meet the error again."""
    memory, wake = ring.Memory.create(1 << 20), os.eventfd(0)
    with InProcess() as running:
        writers: list[RingWriter] = []

        def tell(message: Message) -> None:
            if message.get("trouble"):  # the trainer's answer is as quick as can be
                control = threading.Thread(target=writers[0].set_generation, args=(1,))
                control.start()
                control.join(0.2)
                controls.append(control)

        controls: list[threading.Thread] = []
        writer = RingWriter(
            memory, wake, tell, over=never, servers={running.address: 1}, job=JOB, generation=1
        )
        writers.append(writer)
        writer.refuse(Divergence("not the same"))
        controls[0].join()
        assert writer.trouble() is None
        close_links(writer)
    os.close(wake)


def test_a_successor_claims_nothing_of_a_log_that_was_given_up() -> None:
    memory, wake = ring.Memory.create(1 << 20), os.eventfd(0)
    memory.set_stream(0, "s0.F")
    memory.store(ring.Word.SERVERS[1], 7)
    memory.set_acked(0, 1, 5)
    producer = ring.producer(memory, wake)
    body = b"dropped"
    view = ctypes.create_string_buffer(body)
    end = producer.push(
        ring.header_of(0, key(5), "uint8", (len(body),), len(body)),
        ctypes.addressof(view),
        len(body),
        True,
    )
    with InProcess() as running:
        options = {"servers": {running.address: 7}, "job": JOB, "generation": 1}
        kept = RingWriter(memory, wake, lambda _: None, over=never, **options)
        (link,) = kept.links.values()
        assert link.acked("s0.F") == 5
        close_links(kept)
        writer = RingWriter(memory, wake, lambda _: None, dropped=end, over=never, **options)
        (link,) = writer.links.values()
        assert (link.acked("s0.F"), memory.acked(0, 1)) == (0, -1)
        assert memory.load(ring.Word.TAIL) == end
        close_links(writer)
    producer.close()
    os.close(wake)


def test_forgotten_keys_are_sent_and_the_server_answers(server: InProcess) -> None:
    """No trainer writes below what it has forgotten: the server has the key, and refuses a second record of it."""
    with writing(server) as writer:
        for step in (1, 2):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        writer.forget_below(2)
        make_durable(writer, 2)
        assert writer.stats.verified == 1
        put(writer, 1)
        with pytest.raises(SequenceConflict, match="is record 0 already"):
            writer.flush(TIMEOUT_S)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_sidecar_that_cannot_live_is_said_in_one_line(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`at_once`: it has ended before it is sent the ring."""
    monkeypatch.setattr(Writer, "module", "swift_ft.log.no_such_module")
    monkeypatch.setattr(sidecar_client, "_RESTARTS_WITHIN_S", 60.0)  # six starts take long on a busy machine
    start = sidecar_client._start

    def start_and_see_it_end(module: str) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        process, ours = start(module)
        process.wait()
        return process, ours

    if at_once:
        monkeypatch.setattr(sidecar_client, "_start", start_and_see_it_end)
    with InProcess() as running, writing(running) as writer:
        eventually(lambda: writer._dead, timeout_s=60.0)
        for _ in range(2):
            with pytest.raises(LogUnavailable, match=r"has died 6 times within"):
                put(writer, 0)
            with pytest.raises(LogUnavailable, match="has died"):
                writer.set_generation(1)


def test_it_hears_no_signals_of_the_group_and_ends_with_the_writer() -> None:
    with InProcess() as running, writing(running) as writer:
        make_durable(writer, 0)
        pid = writer.pid
        assert os.getsid(pid) == pid != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        make_durable(writer, 1)
        assert (writer.pid, writer.restarts) == (pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert writer.stats.records == 2
    with pytest.raises(ServiceError, match="closed"):
        put(writer, 2)

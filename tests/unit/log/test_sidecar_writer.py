"""What a LogWriter promises, a SidecarWriter keeps: the same tests, with the work done in another process."""

import ctypes
import os
import signal
import struct
import threading
from contextlib import closing
from typing import Any

import pytest

from swift_ft.errors import Divergence, LogInterrupted, LogUnavailable, ServiceError, UsageError
from swift_ft.log import ring, sidecar_client
from swift_ft.log import sidecar_client as sidecar_process
from swift_ft.log.reader import LogReader, never
from swift_ft.log.sidecar import Message, RingWriter
from swift_ft.log.sidecar_client import SidecarSupervisor, SidecarWriter
from tests.unit.log import test_writer_reader as inside
from tests.unit.log.service import JOB, InProcess, eventually
from tests.unit.log.test_writer_reader import (
    TIMEOUT_S,
    Gate,
    key,
    put,
    server,
    test_a_fence_and_the_next_generation,
    test_a_full_disk_is_waited_out,
    test_a_generation_that_is_not_granted_yet_is_waited_for,
    test_a_key_appended_before_is_compared_not_sent,
    test_a_server_with_a_lower_limit_refuses_with_advice,
    test_a_writer_without_work_is_never_impatient,
    test_append_flush_read,
    test_bad_appends,
    test_codec_by_stream,
    test_divergence_names_the_record,
    test_expected_keys_are_compared_and_holes_are_filled,
    test_fences_under_load_lose_and_double_nothing,
    test_forgotten_keys_are_sent_and_the_server_answers,
    test_no_server_at_all,
    test_reset_and_restart,
    test_somebody_else_writes_the_stream,
    test_what_still_waits_is_compared_although_its_step_is_forgotten,
    writing,
)

__all__ = [
    "server",
    "test_a_fence_and_the_next_generation",
    "test_a_full_disk_is_waited_out",
    "test_a_generation_that_is_not_granted_yet_is_waited_for",
    "test_a_key_appended_before_is_compared_not_sent",
    "test_a_server_with_a_lower_limit_refuses_with_advice",
    "test_a_writer_without_work_is_never_impatient",
    "test_append_flush_read",
    "test_bad_appends",
    "test_codec_by_stream",
    "test_divergence_names_the_record",
    "test_expected_keys_are_compared_and_holes_are_filled",
    "test_fences_under_load_lose_and_double_nothing",
    "test_forgotten_keys_are_sent_and_the_server_answers",
    "test_no_server_at_all",
    "test_reset_and_restart",
    "test_somebody_else_writes_the_stream",
    "test_what_still_waits_is_compared_although_its_step_is_forgotten",
]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "LogWriter", SidecarWriter)


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


def test_bad_appends_by_address() -> None:
    body = bytes(16)
    with InProcess() as running, writing(running) as writer:
        for dtype, shape, words in (("float7", (4,), "element type"), ("uint8", (1,) * 9, "9 dimensions")):
            with pytest.raises(UsageError, match=words):
                writer.append_at("s0.F", key(0), dtype, shape, ctypes.addressof(ctypes.c_char()), 1)
        writer.append("s0.F", key(0), "uint8", (16,), body)
        writer.flush(TIMEOUT_S)


def test_a_writer_that_is_closed_says_so_and_harms_nobody() -> None:
    with InProcess() as running, writing(running) as writer:
        writer.append("s0.F", key(0), "uint8", (5,), bytes(5))
        writer.flush(TIMEOUT_S)
        writer.close()
        writer.wait_copied()
        writer.forget_below(1)
        assert (writer.stats.records, writer.queued_bytes) == (1, 0)
        assert writer.copied > 0
        for call in (
            lambda: writer.flush(1.0),
            lambda: writer.restart(2),
            lambda: writer.set_generation(2),
            lambda: writer.append("s0.F", key(1), "uint8", (5,), bytes(5)),
        ):
            with pytest.raises(ServiceError, match="closed"):
                call()
        writer.close()


class Overtaken(SidecarSupervisor):
    """Somebody asks for something at the moment in which there is a line to a new sidecar."""

    asked: threading.Thread | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_line" and self.restarts and self.asked is None:
            asking = threading.Thread(target=self.set_generation, args=(2, (), ()))
            asking.start()
            self.asked = asking
            asking.join(0.3)  # it gets as far as it can


def test_a_request_never_comes_before_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_client, "SidecarSupervisor", Overtaken)
    with InProcess() as running, closing(SidecarWriter([running.address], JOB, 1)) as writer:
        sidecar: Any = writer._sidecar
        writer.append("s0.F", key(0), "uint8", (5,), bytes(5))
        writer.flush(TIMEOUT_S)
        running.engine.administration.fence(JOB, 2)
        os.kill(writer.pid, signal.SIGKILL)
        eventually(lambda: sidecar.asked is not None)
        assert sidecar.asked is not None
        sidecar.asked.join(TIMEOUT_S)
        assert not sidecar.asked.is_alive()
        writer.append("s0.F", key(1), "uint8", (5,), bytes(5))
        writer.flush(TIMEOUT_S)
        assert writer.restarts == 1


def test_one_that_was_stopped_is_replaced_by_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_process, "STOPPED_S", 0.3)
    with InProcess() as running, writing(running) as writer:
        writer.append("s0.F", key(0), "uint8", (5,), bytes(5))
        writer.flush(TIMEOUT_S)
        os.kill(writer.pid, signal.SIGSTOP)
        writer.append("s0.F", key(1), "uint8", (5,), bytes(5))
        running.engine.administration.fence(JOB, 2)
        writer.set_generation(2)
        writer.flush(TIMEOUT_S)
        assert (writer.stats.records, writer.restarts) == (2, 1)


def test_one_that_goes_on_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_process, "STOPPED_S", 10 * TIMEOUT_S)
    with InProcess() as running, writing(running) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        writer.append("s0.F", key(0), "uint8", (5,), bytes(5))
        threading.Timer(0.5, os.kill, (writer.pid, signal.SIGCONT)).start()
        writer.flush(TIMEOUT_S)
        assert (writer.stats.records, writer.restarts) == (1, 0)


def test_what_is_lent_may_change_once_it_is_settled() -> None:
    with InProcess() as running, writing(running) as writer:
        body = bytearray(b"\1" * (8 << 20))
        writer.append("s0.F", key(0), "uint8", (len(body),), body)
        writer.wait_copied()
        writer._lent.clear()
        body[:] = b"\2" * len(body)
        writer.flush(TIMEOUT_S)
        reader = LogReader([running.address], JOB)
        cursor = reader.follow("s0.F", 0)
        assert set(cursor.get(key(0), TIMEOUT_S, lambda: False).body) == {1}
        cursor.close()
        reader.close()


@pytest.mark.parametrize("codec", ["none", "bitshuffle"])
def test_codecs_and_what_they_made_of_it(codec: str) -> None:
    body = struct.pack("<f", 1.5) * 5000
    with InProcess() as running, writing(running, codec=codec) as writer:
        for step in range(3):
            writer.append("s0.F", key(step), "float32", (5000,), body)
        writer.flush(TIMEOUT_S)
        stats = writer.stats
        assert (stats.records, stats.bytes) == (3, 3 * len(body))
        if codec == "bitshuffle":
            assert 0 < stats.stored_bytes < len(body)
        else:
            assert stats.stored_bytes == stats.bytes
        reader = LogReader([running.address], JOB)
        cursor = reader.follow("s0.F", 0)
        assert cursor.get(key(2), TIMEOUT_S, lambda: False).body == body
        cursor.close()
        reader.close()
    assert writer.stats == stats


@pytest.mark.parametrize("codec", ["zip", "auto"])
def test_a_codec_that_is_not_there(codec: str) -> None:
    with InProcess() as running, pytest.raises(UsageError, match=r"give one of none, lz4, bitshuffle$"):
        SidecarWriter([running.address], JOB, 1, codec=codec)


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
        writer.delivery.refuse(Divergence("not the same"))
        controls[0].join()
        assert writer.trouble() is None
        writer.delivery.close()
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
        (link,) = kept.delivery.links.values()
        assert link.acked("s0.F") == 5
        kept.delivery.close()
        writer = RingWriter(memory, wake, lambda _: None, dropped=end, over=never, **options)
        (link,) = writer.delivery.links.values()
        assert (link.acked("s0.F"), memory.acked(0, 1)) == (0, -1)
        assert memory.load(ring.Word.TAIL) == end
        writer.delivery.close()
    producer.close()
    os.close(wake)


def test_a_sidecar_that_cannot_live_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidecarWriter, "module", "swift_ft.log.no_such_module")
    with InProcess() as running, writing(running) as writer:
        eventually(lambda: writer._sidecar._dead, 30.0)
        for _ in range(2):
            with pytest.raises(LogUnavailable, match=r"has died 6 times within .*SWIFT_NO_SIDECAR=1"):
                put(writer, 0)
            with pytest.raises(LogUnavailable, match="has died"):
                writer.set_generation(1)


def test_it_hears_no_signals_of_the_group_and_ends_with_the_writer() -> None:
    with InProcess() as running, writing(running) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        pid = writer.pid
        assert os.getsid(pid) == pid != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        put(writer, 1)
        writer.flush(TIMEOUT_S)
        assert (writer.pid, writer.restarts) == (pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert writer.stats.records == 2
    with pytest.raises(ServiceError, match="closed"):
        put(writer, 2)

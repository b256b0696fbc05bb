"""What a LogWriter promises, a SidecarWriter keeps: the same tests, with the work done in another process."""

import os
import signal
import threading

import pytest

from swift.errors import LogInterrupted, LogUnavailable, ServiceError, UsageError
from swift.log import ring
from swift.log.reader import LogReader
from swift.log.sidecar_client import SidecarWriter
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
    test_streams_are_spread_over_servers,
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
    "test_streams_are_spread_over_servers",
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
        thread.join(0.2)
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


def test_what_is_lent_may_change_once_it_is_settled() -> None:
    with InProcess() as running, writing(running) as writer:
        body = bytearray(b"\1" * (8 << 20))
        writer.append("s0.F", key(0), "uint8", (len(body),), body)
        writer.settle()
        writer._lent.clear()
        body[:] = b"\2" * len(body)
        writer.flush(TIMEOUT_S)
        reader = LogReader([running.address], JOB)
        cursor = reader.follow("s0.F", 0)
        assert set(cursor.get(key(0), TIMEOUT_S, lambda: False).body) == {1}
        cursor.close()
        reader.close()


def test_a_sidecar_that_cannot_live_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidecarWriter, "module", "swift.log.no_such_module")
    with InProcess() as running, writing(running) as writer:
        eventually(lambda: writer._dead, 30.0)
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

"""Whether a trainer's process may do something, as the sidecar sees it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.ring import Memory, Word
from swift_ft.log.sidecar import LeaseKeeper, is_running

TIMEOUT_S = 10.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_waits_runs_one_that_was_stopped_does_not() -> None:
    assert is_running(os.getpid())
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: not is_running(process.pid))
        process.send_signal(signal.SIGCONT)
        until(lambda: is_running(process.pid))
        process.kill()
        until(lambda: not is_running(process.pid))
    finally:
        process.kill()
        process.wait()
    assert not is_running(process.pid)


def test_the_sidecar_renews_a_lease_only_while_its_trainer_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[pb.HeartbeatRequest] = []
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(
        "swift_ft.log.sidecar.pb_grpc.CoordinatorStub",
        lambda _channel: SimpleNamespace(Heartbeat=lambda beat, timeout: sent.append(beat)),
    )
    memory, ended = Memory.create(4096), os.eventfd(0)
    lease = {
        "coordinator": "127.0.0.1:1",
        "rank": 3,
        "incarnation": "i",
        "pid": os.getpid(),
        "interval_s": 0.05,
    }
    memory.store(Word.RENEWED, time.monotonic_ns() + 1_000_000_000)
    LeaseKeeper("job", lease, ended, memory)
    time.sleep(0.3)  # for a keeper that does not look
    assert not sent
    memory.store(Word.RENEWED, 0)
    until(lambda: len(sent) > 1)
    assert (sent[0].rank, sent[0].kept) == (3, True)
    os.eventfd_write(ended, 1)
    until(lambda: "lease" not in {thread.name for thread in threading.enumerate()})

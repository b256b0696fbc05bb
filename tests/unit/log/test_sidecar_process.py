"""A sidecar's process: started before its writer is there, stopped, without threads; nobody waits for it for ever. And
what it does for a trainer that does not renew its lease."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogInterrupted, ServiceError
from swift_ft.log import sidecar_client
from swift_ft.log.ring import Memory, Word
from swift_ft.log.sidecar import LeaseKeeper, is_running
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, key, make_durable, put, rank_writing
from tests.unit.log.service import JOB, InProcess

MANY = {key(step): bytes(16) for step in range(1000, 2000)}
"""Known of the server: more than one message."""


@pytest.fixture(autouse=True)
def once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The next sidecar is what this file says, if it is there (`odd_sidecar`)."""
    file = tmp_path / "once"
    monkeypatch.setenv("ODD_ONCE", str(file))
    monkeypatch.setattr(Writer, "module", "tests.unit.log.odd_sidecar")
    return file


# -- ahead of its writer ----------------------------------------------------------------------------------


@pytest.fixture
def ahead(once: Path) -> Iterator[int]:
    """The process id of one that a spare has started before it knew its rank: the first writer takes it."""
    sidecar_client.start_ahead(Writer.module)
    yield sidecar_client._AHEAD[0][1].pid
    assert not sidecar_client._AHEAD


def test_the_first_writer_takes_it_with_the_environment_of_its_rank(
    ahead: int, server: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    with rank_writing(server, name="rank5") as writer:
        assert writer.pid == ahead
        make_durable(writer, 0)
        with rank_writing(server) as second:
            assert second.pid != ahead
    assert [event["who"] for event in events.read(tmp_path) if event["pid"] == ahead] == ["sidecar-rank5"]


def test_one_that_was_killed_is_replaced(ahead: int, server: InProcess) -> None:
    os.kill(ahead, signal.SIGKILL)
    eventually(lambda: os.waitid(os.P_PID, ahead, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    with rank_writing(server) as writer:
        make_durable(writer, 0)
        assert writer.pid != ahead
    with pytest.raises(ProcessLookupError):
        os.kill(ahead, 0)


# -- stopped ----------------------------------------------------------------------------------------------


def ends(call: Callable[[], object]) -> bool:
    """Within a time that only whoever waits for nothing keeps."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


def killed_and_stopped(writer: Writer, once: Path) -> None:
    """Its successor is stopped before it reads."""
    once.write_text("stopped")
    before = writer.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not once.exists())
    eventually(lambda: writer.pid != before and not is_running(writer.pid))


def test_a_successor_that_is_stopped_while_it_starts_holds_nobody_up(
    server: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 10 * TIMEOUT_S)  # it stays as it is
    writer = Writer([server.address], JOB, 1)
    make_durable(writer, 0)
    writer.expect("s0.F", MANY)
    killed_and_stopped(writer, once)
    for call in (writer.interrupt, lambda: writer.forget_below(1)):
        assert ends(call)
    with pytest.raises(LogInterrupted):
        writer.flush(TIMEOUT_S)
    stopped = writer.pid
    assert ends(lambda: writer.close(0.0))
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_it_is_replaced_by_whoever_waits_for_it_and_nothing_is_lost(
    server: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    writer = Writer([server.address], JOB, 1)
    make_durable(writer, 0)
    writer.expect("s0.F", MANY)
    killed_and_stopped(writer, once)
    put(writer, 1)
    assert ends(lambda: writer.flush(TIMEOUT_S))
    assert ends(writer.interrupt)
    server.engine.administration.fence(JOB, 2)
    assert ends(lambda: writer.set_generation(2))
    make_durable(writer, 2)
    assert (writer.stats.records, writer.restarts) == (3, 2)
    writer.close()


def test_the_first_one_as_well(server: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    once.write_text("stopped")
    writer = Writer([server.address], JOB, 1)
    assert ends(writer.await_ready)
    make_durable(writer, 0)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()


def test_one_that_is_stopped_while_it_works_is_told_much(
    server: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    writer = Writer([server.address], JOB, 1)
    writer.await_ready()
    os.kill(writer.pid, signal.SIGSTOP)
    assert ends(lambda: writer.expect("s0.F", MANY))
    make_durable(writer, 0)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()


def test_one_that_does_not_read_is_replaced(server: InProcess, once: Path) -> None:
    writer = Writer([server.address], JOB, 1)
    writer.await_ready()
    os.kill(writer.pid, signal.SIGSTOP)
    with writer.changed:
        for _ in range(100):
            writer._send({"id": 0, "do": "go", "more": "x" * 10_000})
    make_durable(writer, 0)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()


# -- without threads --------------------------------------------------------------------------------------


def test_a_sidecar_that_has_lost_a_thread_is_replaced(server: InProcess, once: Path) -> None:
    once.write_text("threadless")
    with rank_writing(server) as writer:
        first = writer.pid
        make_durable(writer, 0)
        assert writer.pid != first
        assert not once.exists()


def test_a_trainer_that_can_start_no_thread_is_told_and_leaves_no_process(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().children()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ServiceError, match="the log's sidecar cannot be started: can't start new thread"):
        Writer([server.address], JOB, 1)
    monkeypatch.undo()
    assert psutil.Process().children() == before


# -- its lease -----------------------------------------------------------------------------------------


def test_a_process_that_waits_runs_one_that_was_stopped_does_not() -> None:
    assert is_running(os.getpid())
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not is_running(process.pid))
        process.send_signal(signal.SIGCONT)
        eventually(lambda: is_running(process.pid))
        process.kill()
        eventually(lambda: not is_running(process.pid))
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
    eventually(lambda: len(sent) > 1)
    assert (sent[0].rank, sent[0].kept) == (3, True)
    os.eventfd_write(ended, 1)
    eventually(lambda: "lease" not in {thread.name for thread in threading.enumerate()})

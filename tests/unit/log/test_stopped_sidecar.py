"""A sidecar that was stopped: nobody waits for it for ever."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_ft.errors import LogInterrupted
from swift_ft.log import sidecar_client
from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar import is_running
from tests.log_client import Writer
from tests.unit.log.service import JOB, InProcess, eventually
from tests.unit.log.test_writer_reader import TIMEOUT_S, put

MANY = {RecordKey(step, 0, 0): bytes(16) for step in range(1000, 2000)}
"""Known of the server: more than one message."""


@pytest.fixture
def once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The next sidecar is stopped if this file is there."""
    file = tmp_path / "stop"
    monkeypatch.setenv("STOP_ONCE", str(file))
    monkeypatch.setattr(Writer, "module", "tests.unit.log.stopping_sidecar")
    return file


@pytest.fixture
def running() -> Iterator[InProcess]:
    with InProcess() as server:
        yield server


def ends(call: Callable[[], object]) -> bool:
    """Within a time that only whoever waits for nothing keeps."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


def killed_and_stopped(writer: Writer, once: Path) -> None:
    """Its successor is stopped before it reads."""
    once.touch()
    before = writer.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not once.exists())
    eventually(lambda: writer.pid != before and not is_running(writer.pid))


def test_a_successor_that_is_stopped_while_it_starts_holds_nobody_up(
    running: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 10 * TIMEOUT_S)  # it stays as it is
    writer = Writer([running.address], JOB, 1)
    put(writer, 0)
    writer.flush(TIMEOUT_S)
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
    running: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    writer = Writer([running.address], JOB, 1)
    put(writer, 0)
    writer.flush(TIMEOUT_S)
    writer.expect("s0.F", MANY)
    killed_and_stopped(writer, once)
    put(writer, 1)
    assert ends(lambda: writer.flush(TIMEOUT_S))
    assert ends(writer.interrupt)
    running.engine.administration.fence(JOB, 2)
    assert ends(lambda: writer.set_generation(2))
    put(writer, 2)
    writer.flush(TIMEOUT_S)
    assert (writer.stats.records, writer.restarts) == (3, 2)
    writer.close()


def test_the_first_one_as_well(running: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    once.touch()
    writer = Writer([running.address], JOB, 1)
    assert ends(writer.await_ready)
    put(writer, 0)
    writer.flush(TIMEOUT_S)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()


def test_one_that_is_stopped_while_it_works_is_told_much(
    running: InProcess, once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_client, "STOPPED_S", 0.3)
    writer = Writer([running.address], JOB, 1)
    writer.await_ready()
    os.kill(writer.pid, signal.SIGSTOP)
    assert ends(lambda: writer.expect("s0.F", MANY))
    put(writer, 0)
    writer.flush(TIMEOUT_S)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()


def test_one_that_does_not_read_is_replaced(running: InProcess, once: Path) -> None:
    writer = Writer([running.address], JOB, 1)
    writer.await_ready()
    os.kill(writer.pid, signal.SIGSTOP)
    with writer.changed:
        for _ in range(100):
            writer._send({"id": 0, "do": "go", "more": "x" * 10_000})
    put(writer, 0)
    writer.flush(TIMEOUT_S)
    assert (writer.stats.records, writer.restarts) == (1, 1)
    writer.close()

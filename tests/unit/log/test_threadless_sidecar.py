"""No thread can be started for a sidecar. In its process: it is replaced. In the trainer's: the trainer is told."""

import threading
from pathlib import Path

import psutil
import pytest

from swift_ft.errors import ServiceError
from tests.log_client import Writer
from tests.unit.log.service import JOB, InProcess
from tests.unit.log.test_writer_reader import TIMEOUT_S, put


def test_a_sidecar_that_has_lost_a_thread_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "fail"
    once.touch()
    monkeypatch.setenv("FAIL_ONCE", str(once))
    monkeypatch.setattr(Writer, "module", "tests.unit.log.threadless_sidecar")
    with InProcess() as server:
        writer = Writer([server.address], JOB, 1)
        first = writer.pid
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert writer.pid != first
        assert not once.exists()
        writer.close(0.0)


def test_a_trainer_that_can_start_no_thread_is_told_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().children()
    with InProcess() as server:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(ServiceError, match="the log's sidecar cannot be started: can't start new thread"):
            Writer([server.address], JOB, 1)
        monkeypatch.undo()
    assert psutil.Process().children() == before

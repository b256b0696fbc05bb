"""A sidecar that a spare has started before it knew its rank: the first writer takes it, if it still lives."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft import events
from swift_ft.log import sidecar_client
from tests.log_client import Writer
from tests.unit.log.service import JOB, InProcess, eventually
from tests.unit.log.test_writer_reader import TIMEOUT_S, put


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process id of one that waits."""
    monkeypatch.setattr(Writer, "module", "tests.unit.log.telling_sidecar")
    sidecar_client.start_ahead(Writer.module)
    yield sidecar_client._AHEAD[0][1].pid
    assert not sidecar_client._AHEAD


def ends(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_the_first_writer_takes_it_with_the_environment_of_its_rank(
    ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    with InProcess() as server:
        writer = Writer([server.address], JOB, 1, name="rank5")
        assert writer.pid == ahead
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        second = Writer([server.address], JOB, 1)
        assert second.pid != ahead
        second.close(0.0)
        writer.close(0.0)
    assert [event["who"] for event in events.read(tmp_path) if event["pid"] == ahead] == ["sidecar-rank5"]


def test_one_that_was_killed_is_replaced(ahead: int) -> None:
    os.kill(ahead, signal.SIGKILL)
    eventually(lambda: ends(ahead))
    with InProcess() as server:
        writer = Writer([server.address], JOB, 1)
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert writer.pid != ahead
        writer.close(0.0)
    with pytest.raises(ProcessLookupError):
        os.kill(ahead, 0)

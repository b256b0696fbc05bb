"""The launcher's part of failures: what is refused, and what is done to real processes and files."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from swift_ft import events
from swift_ft.errors import UsageError
from swift_ft.lab.failures import injector, schedule
from swift_ft.lab.failures.injector import Injector, Planned
from swift_ft.lab.failures.services import service_at
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.ranks import RankProgram
from swift_ft.launch.standalone import free_port
from tests.integration.logserver_world import LogServer


@contextlib.contextmanager
def asleep() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with asleep() as process:
        yield process


def program() -> RankProgram:
    return RankProgram(
        script="s.py",
        module=False,
        args=[],
        cwd=".",
        coordinator="127.0.0.1:1",
        name="j",
        checkpoint_dir=None,
    )


@contextlib.contextmanager
def planned(directory: Path, spec: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 4) -> Iterator[Planned]:
    for name in ("SWIFT_EVENTS", "SWIFT_FAULTS", "SWIFT_FAULTS_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    made = injector.planned(schedule.schedule_of(spec, ranks), None, str(directory), program())
    assert made is not None
    events.configure("launcher")
    yield made
    events.configure("test")


def until(pid: int, what: int) -> None:
    """The kernel reports it to the parent: nothing is polled for."""
    status = os.waitid(os.P_PID, pid, what)
    assert status is not None


def test_a_slow_process_takes_turns_with_standing_still_and_then_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]"
) -> None:
    with planned(tmp_path, "kind=slow,rank=1,at=0,factor=3,for=600", monkeypatch) as plan:
        with Injector(plan):
            events.emit("spare_assigned", rank=1, pid=sleeper.pid)
            for _ in range(5):
                until(sleeper.pid, os.WSTOPPED)
                until(sleeper.pid, os.WCONTINUED)
        state = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state in "SR", "the run is over, and it runs"


def test_a_process_that_takes_the_rank_is_not_signalled_for_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]"
) -> None:
    with asleep() as other:
        with planned(tmp_path, "kind=stop,rank=1,at=0", monkeypatch) as plan, Injector(plan):
            events.emit("spare_assigned", rank=1, pid=sleeper.pid)
            until(sleeper.pid, os.WSTOPPED)
            events.emit("child_exit", rank=1, pid=sleeper.pid, code=-9)
            other.send_signal(signal.SIGSTOP)
            until(other.pid, os.WSTOPPED)
            events.emit("spare_assigned", rank=1, pid=other.pid)
        assert os.waitid(os.P_PID, other.pid, os.WCONTINUED | os.WNOHANG) is None


def test_the_report_is_there_from_the_start_and_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with planned(tmp_path, "rank=1,step=3;kind=stop,rank=3,at=1", monkeypatch) as plan:
        before = (plan.run_dir / "failures.json").read_text()
        assert '"injected": 0' in before

        def run() -> Outcome:
            events.emit("spare_assigned", rank=1, pid=os.getpid())
            return Outcome(exit_code=0)

        assert injector.around(plan, run) == Outcome(exit_code=0)
    said = capsys.readouterr().err
    assert "rank=1,step=3,microbatch=0,phase=backward: did not happen: rank 1 never came to its place" in said
    assert "kind=stop,rank=3,at=1: did not happen: rank 3 is another launcher's" in said


def test_what_does_not_fit_into_the_environment_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ".".join(["long"] * 60)
    spec = ";".join(f"rank={n % 4},step={n},layer={layer}" for n in range(400))
    with pytest.raises(UsageError, match="give fewer failures"), planned(tmp_path, spec, monkeypatch):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_for_the_report_is_one_line_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(injector, "write_whole", mock.Mock(side_effect=full))
    said = r"^run: --log-dir \S+: No space left on device: name a directory with space for the report"
    with pytest.raises(UsageError, match=said), planned(tmp_path, "rank=1,step=3", monkeypatch):
        pass


def test_a_report_that_cannot_be_written_is_one_line_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with planned(tmp_path, "rank=1,step=3", monkeypatch) as plan:

        def run() -> Outcome:
            (plan.run_dir / "failures.json").unlink()
            (plan.run_dir / "failures.json").mkdir()
            return Outcome(exit_code=0)

        assert injector.around(plan, run).exit_code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith("Is a directory: free space there, or name another --log-dir")

        failed = injector.around(plan, lambda: Outcome(exit_code=1))
        assert failed.exit_code == 1, "what the run itself ends with is worse"


def test_a_service_is_found_by_its_port_killed_and_started_again_there(tmp_path: Path) -> None:
    server = LogServer(tmp_path / "log").start()
    try:
        service = service_at(server.address)
        assert service.data == tmp_path / "log"
        service.kill()
        again = service.start_again()
        service.close()
        try:
            found = None
            while found is None:
                assert again.poll() is None
                with contextlib.suppress(UsageError):
                    found = service_at(server.address)
            assert found.pid == again.pid
            assert found.data == service.data
            found.close()
        finally:
            again.kill()
            again.wait()
    finally:
        server.kill()


def test_who_is_no_service_of_swift_is_not_found() -> None:
    port = free_port()
    code = (
        f"import socket; s = socket.create_server(('127.0.0.1', {port})); print('on', flush=True); s.accept()"
    )
    stranger = subprocess.Popen([sys.executable, "-c", code, "--directory", "."], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"on\n"
        with pytest.raises(UsageError, match="no service of swift listens at"):
            service_at(f"127.0.0.1:{port}")
    finally:
        stranger.kill()
        stranger.communicate()

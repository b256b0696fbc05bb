"""Services of a job's own: one that was killed, and cannot be started again."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

import pytest

from swift_ft.errors import UsageError
from swift_ft.launch import standalone
from swift_ft.launch.children import Nursery
from swift_ft.launch.standalone import Services, Standalone

Hears = Callable[[], None]


class Attended(dict[int, Hears]):
    """A nursery without children."""

    def attend(self, fd: int, hear: Hears) -> None:
        self[fd] = hear

    def ignore(self, fd: int) -> None:
        del self[fd]


def test_a_service_that_cannot_be_started_again_is_lost_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone._Service, "await_address", lambda self: self.address)
    monkeypatch.setattr(standalone, "dying_with_launcher", lambda _program: ["sleep", "60"])
    nursery = Attended()
    lock = os.open(tmp_path, os.O_RDONLY)
    services = Services(Standalone(tmp_path, lock), cast("Nursery", nursery), print)
    services.start()
    killed = services._services[0].process
    killed.send_signal(signal.SIGKILL)
    killed.wait()

    def popen(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        nursery[services._services[0].pidfd]()

    why = "it has said nothing; it cannot be started again: Resource temporarily unavailable"
    assert services.lost == f"the job's logserver has ended (killed by SIGKILL): {why}"
    services.close()
    assert [service.process.returncode for service in services._services] == [
        -signal.SIGKILL,
        -signal.SIGTERM,
    ]


def test_a_file_with_the_name_of_the_directory_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swift-train").touch()
    with pytest.raises(UsageError) as caught:
        Standalone.of("train").locked()
    assert str(caught.value) == (
        "run: --standalone: ./swift-train: File exists: start it in a directory that can be written, or give this job "
        "another name, with --job NAME"
    )

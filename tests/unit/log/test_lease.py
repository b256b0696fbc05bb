"""Whether a trainer's process may do something, as the sidecar sees it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

from swift_ft.log.sidecar import is_running

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

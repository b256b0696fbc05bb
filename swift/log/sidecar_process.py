"""Starts the process of a sidecar, and ends one that somebody has stopped."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from swift.log.lease import is_running

STOPPED_S = 3.0
"""Whoever was stopped (SIGSTOP, a debugger) and is not continued by then is ended: a recovery waits for its answer."""


def spawn(module: str, ring: int, wake: int) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """The process of that program, and our end of the line to it. ``ring``, ``wake``: file descriptors."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        failed = stack.enter_context(contextlib.ExitStack())
        failed.callback(ours.close)
        trainer = os.pidfd_open(os.getpid())
        stack.callback(os.close, trainer)
        fds = {"socket": theirs.fileno(), "ring": ring, "wake": wake, "trainer": trainer}
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", module),
                *(word for name, fd in fds.items() for word in (f"--{name}", str(fd))),
            ],
            # It may live longer than this process: nobody must wait for the end of our output on its account.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
            start_new_session=True,  # a signal to our group is not for it
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
        )
        failed.pop_all()
        return process, ours


class Stopped:
    """(whoever waits for a sidecar) ``look`` again and again: one that stays stopped is killed, as any may be."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        """Which process was found stopped, and when."""

    def look(self, process: "subprocess.Popen[bytes]") -> None:
        now = time.monotonic()
        if is_running(process.pid):
            self._since = None
        elif self._since is None or self._since[0] != process.pid:
            self._since = (process.pid, now)
        elif now - self._since[1] > STOPPED_S:
            process.kill()

"""Starts the process of a sidecar, holds the line to it, and ends one that somebody has stopped."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from swift.log.lease import is_running

STOPPED_S = 3.0
"""Whoever was stopped (SIGSTOP, a debugger) and is not continued by then is ended: a recovery waits for its answer."""


class Line:
    """Our end of the line to a sidecar. Nobody who says something waits: one that was stopped reads nothing, and what
    it is told may be more than a socket takes."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._lock = threading.Lock()
        self._left: deque[bytes] = deque()
        self._sends = False
        """A thread sends what is left."""

    def put(self, data: bytes) -> None:
        """(any thread) Sent in this order; to one that is dead, nothing is."""
        with self._lock:
            if self._sends:
                self._left.append(data)
                return
            taken = self._taken_at_once(data)
            if taken < len(data):
                self._left.append(data[taken:])
                self._sends = True
                threading.Thread(target=self._send, name="log-sidecar-line", daemon=True).start()

    def heard(self) -> BinaryIO:
        """What the sidecar says, to be read by one thread."""
        return self._socket.makefile("rb")

    def close(self) -> None:
        """Nothing is sent any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees the thread that sends
        self._socket.close()

    def _taken_at_once(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._sends = False
                    return
                data = self._left.popleft()
            try:
                self._socket.sendall(data)
            except OSError:  # it is dead: what is left fails as well
                continue


def spawn(module: str, ring: int, wake: int) -> "tuple[subprocess.Popen[bytes], Line]":
    """The process of that program, and the line to it. ``ring``, ``wake``: file descriptors."""
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
        return process, Line(ours)


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

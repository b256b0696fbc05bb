"""The launcher's child processes: spawned as warm spares, handed a rank, signalled, reaped.

All of it happens in the launcher's main thread: PR_SET_PDEATHSIG fires when the *thread* that started a child
ends. Each child leads a session of its own, so that Ctrl-C in a terminal reaches the launcher alone and a
rank's own children (data loaders) are killed with it.
"""

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable

from swift.errors import UsageError
from swift.launch.worker import ENV_WORD_FD, Assignment

CONTROL_PIPE_BYTES = 1 << 20
"""An assignment fits, so writing it never waits for a child that is not reading yet."""
KILL_WAIT_S = 10.0
"""How long a SIGKILLed child may take to go (uninterruptible sleep) before it is named and left."""


class Child:
    """One process: a spare while `rank` is None, then that rank until it ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", control_fd: int, warm_fd: int) -> None:
        self._process = process
        self._control_fd = control_fd
        self.warm_fd = warm_fd
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.incarnation = uuid.uuid4().hex
        self.warm = False
        self.rank: int | None = None
        self.exit_code: int | None = None
        """None while it lives; negative: killed by that signal."""

    def assign(self, rank: int, assignment: Assignment) -> None:
        """Hands the rank over. The child may have died already: its pidfd tells."""
        line = assignment.to_line()
        if len(line) > CONTROL_PIPE_BYTES:
            raise UsageError(
                f"the script's arguments take {len(line)} bytes: at most {CONTROL_PIPE_BYTES} fit"
            )
        self.rank = rank
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, line)
        os.close(self._control_fd)
        self._control_fd = -1

    def send(self, signum: int) -> None:
        if self.exit_code is None:
            self._process.send_signal(signum)

    def kill_group(self) -> None:
        """SIGKILL for the child and whatever it started in its session. Right until `reap`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """After the pidfd became readable: ends its group, collects the exit code, closes everything."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so the pid, and with it the group's number, cannot be anybody else's.
        self.kill_group()
        self.exit_code = self._process.wait()
        for fd in (self.pidfd, self.warm_fd, self._control_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.warm_fd = self._control_fd = -1
        return self.exit_code


def spawn(env: dict[str, str], path0: str, preload: str, word_fd: int) -> Child:
    """Starts a worker; it imports `preload` (comma-separated) and then waits for its `assign`."""
    control_read, control_write = os.pipe()
    warm_read, warm_write = os.pipe()
    fcntl.fcntl(control_write, fcntl.F_SETPIPE_SZ, CONTROL_PIPE_BYTES)
    command = [sys.executable, "-u", "-m", "swift.launch.worker"]
    command += [str(control_read), str(warm_write), str(os.getpid()), path0, preload]
    try:
        process = subprocess.Popen(
            command,
            env=env | {ENV_WORD_FD: str(word_fd)},
            pass_fds=(control_read, warm_write, word_fd),
            start_new_session=True,
        )
    finally:
        os.close(control_read)
        os.close(warm_write)
    return Child(process, control_write, warm_read)


class Nursery:
    """All children of the launcher and the selector that tells which of them became warm or ended.

    Invariant: every child that was spawned and not reaped is in `children` and registered by its pidfd.
    """

    def __init__(self, env: dict[str, str], path0: str, preload: str) -> None:
        self._env = env
        self._path0 = path0
        self._preload = preload
        self._selector = selectors.DefaultSelector()
        # One byte for all children: who reads it may print a mistake that all of them make.
        self._word_read, self._word_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(self._word_write, b"w")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self.children: list[Child] = []

    def wake(self) -> None:
        """(any thread, signal handlers) Ends `wait` early."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    @property
    def spares(self) -> list[Child]:
        """The best one first: warm, then the one that was started earliest."""
        return sorted(
            (child for child in self.children if child.rank is None), key=lambda child: not child.warm
        )

    def spawn(self) -> Child:
        child = spawn(self._env, self._path0, self._preload, self._word_read)
        self.children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.warm_fd, selectors.EVENT_READ, child)
        return child

    def wait(self, timeout_s: float) -> tuple[list[Child], list[Child]]:
        """Blocks until something happens or the time is up: (children now warm, children that ended)."""
        warmed, ended = [], []
        for key, _ in self._selector.select(timeout_s):
            child: Child | None = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif key.fd == child.pidfd:
                ended.append(child)
            elif os.read(child.warm_fd, 1):
                child.warm = True
                warmed.append(child)
                self._drop_warm_fd(child)
            else:
                self._drop_warm_fd(child)
        for child in ended:
            self._selector.unregister(child.pidfd)
            if child.warm_fd >= 0:
                self._selector.unregister(child.warm_fd)
            child.reap()
            self.children.remove(child)
        return warmed, ended

    def _drop_warm_fd(self, child: Child) -> None:
        self._selector.unregister(child.warm_fd)
        os.close(child.warm_fd)
        child.warm_fd = -1

    def stop(
        self, children: Iterable[Child], grace_s: float, hurry: Callable[[], bool] = lambda: False
    ) -> None:
        """SIGTERM, after the grace (or once `hurry` says so, looked at when woken) SIGKILL; reaps them."""
        stopping = list(children)
        for child in stopping:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._any_alive(stopping) and not hurry() and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
        self.kill(stopping)

    def kill(self, children: Iterable[Child]) -> None:
        """SIGKILL; reaps them. One that does not go away is named and left."""
        killed = [child for child in children if child.exit_code is None]
        for child in killed:
            child.kill_group()
        deadline = time.monotonic() + KILL_WAIT_S
        while self._any_alive(killed) and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
        for child in killed:
            if child.exit_code is None:
                print(f"swift: process {child.pid} was killed and does not go away", file=sys.stderr)

    @staticmethod
    def _any_alive(children: list[Child]) -> bool:
        return any(child.exit_code is None for child in children)

    def close(self) -> None:
        """Kills what is left."""
        self.kill(list(self.children))
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

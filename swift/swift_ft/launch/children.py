"""The launcher's child processes: started as warm spares, given a rank, signalled, reaped.

All of it happens in the launcher's main thread: PR_SET_PDEATHSIG fires when the *thread* that started a child ends.
Each child leads a session of its own, so that Ctrl-C in a terminal reaches the launcher alone and a rank's own children
(data loaders) are killed with it.

A child is forked by the fork server if one is ready, else it is a new interpreter, which takes seconds to import the
modules of a rank.
"""

import contextlib
import fcntl
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

from swift_ft import events
from swift_ft.errors import ServiceError
from swift_ft.launch.death import Life, exit_code_of
from swift_ft.launch.forkserver import ForkFailed, ForkServer
from swift_ft.launch.worker import ENV_WORD_FD, PREPARE, Program

# Signals such as Ctrl-C in the launcher: handled by the loop, or raised where torch blocks the main thread.

STUCK_S = 2.0
"""Some waits of torch's store run no Python code, hence no handler. After these seconds the process exits, and the
kernel ends the children with it."""


class Signalled(Exception):
    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"got {received.name}")
        self.signal = received


class SignalGate:
    """Deferred signals. While the loop runs, a signal only wakes it, so that no child is lost between its start and its
    registration. Inside `raising()` (rendezvous, barrier) it is raised at once."""

    def __init__(self, signals: list[signal.Signals], wake: Callable[[], None]) -> None:
        self._received: signal.Signals | None = None
        self._raises = False
        self._wake = wake
        self._handled = threading.Event()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="signal-watch", daemon=True).start()
        for signum in signals:
            # With nohup, SIGHUP stays ignored.
            if not (signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN):
                signal.signal(signum, self._on_signal)

    @property
    def pending(self) -> bool:
        return self._received is not None

    def consume(self, signum: signal.Signals) -> bool:
        came = self._received == signum
        if came:
            self._received = None
        return came

    def check(self) -> None:
        if self._received is not None:
            received, self._received = self._received, None
            raise Signalled(received)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(signum)
        self._handled.set()
        self._wake()
        if self._raises:
            self.check()

    def _watch(self, read_fd: int) -> None:
        while True:
            signum = os.read(read_fd, 1)[0]
            if not self._handled.wait(STUCK_S):
                os._exit(128 + signum)


_SAID_BYTES = 1 << 16
KILL_WAIT_S = 10.0
"""Seconds that a SIGKILLed child may take to end (uninterruptible sleep) before it is reported and abandoned."""
SERVER_FAILURES_MAX = 3
"""Consecutive failures of fork servers after which children are new interpreters."""
SERVER_AGAIN_S = 5.0
"""Seconds until a fork server that could not be started is tried again."""
_DIES_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which a command that is executed keeps
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_launcher(command: Sequence[str]) -> list[str]:
    """Returns a command that executes this one, which then dies with the launcher."""
    return [sys.executable, "-I", "-S", "-c", _DIES_WITH_LAUNCHER, str(os.getpid()), *command]


class StartFailed(ServiceError):
    """Raised if no process can be started now."""


Started = tuple[int, "subprocess.Popen[bytes] | None"]
"""The pid of a new process, and its Popen object, if any, which needs the exit code too."""


class Child:
    """One process: a spare while `rank` is None, then that rank until it ends."""

    def __init__(
        self,
        pid: int,
        process: "subprocess.Popen[bytes] | None",
        control_fd: int,
        warm_fd: int,
        life: Life,
    ) -> None:
        """Opens a pidfd of the process. `process`: None if it was forked."""
        self._process = process
        self._control_fd = control_fd
        self.warm_fd = warm_fd
        self.life = life
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.forked = process is None
        self.incarnation = uuid.uuid4().hex
        self.warm = self.watched = False
        self.kept_for: int | None = None
        """(a spare) The rank for which it is warmed up, and whose place alone it takes; None: it takes any."""
        self.warming = False
        """It runs the script for warm-up."""
        self.warmed_up = False
        """It has been warmed up, and its state is as before."""
        self.prepared = False
        """It has the process that a rank with a session needs beside it."""
        self.rehearses = False
        """It rehearses a recovery, so it is no spare."""
        self.unwanted = False
        """It was killed on purpose, and has not ended yet."""
        self.said = b""
        """Bytes from `warm_fd` that have not been consumed yet."""
        self.rank: int | None = None
        self.exit_code: int | None = None
        """None while it lives; negative: killed by that signal."""
        self.gone = False
        """The kernel has freed all that it had: memory, devices, ports, locks."""

    @property
    def kind(self) -> str:
        if self.warmed_up:
            return "a spare that was warmed up"
        return "a warm spare" if self.warm else "a fork" if self.forked else "a cold start"

    def assign(self, rank: int, assignment: Program) -> None:
        self._send_assignment(assignment)
        self.rank = rank
        os.close(self._control_fd)
        self._control_fd = -1

    def prepare(self) -> None:
        """Makes a warm spare start what a rank with a session needs beside it (`swift_ft.launch.worker`)."""
        self.prepared = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, PREPARE)

    def warm_up(self, assignment: Program) -> None:
        """Makes a spare run the script as a rank would. It writes a line when it is done."""
        self._send_assignment(assignment)
        self.warming = True

    def rehearse(self, assignment: Program) -> None:
        """Makes it replay steps of a rank, without being one. It writes a line when it is done, and ends."""
        self.rehearses = True
        self._send_assignment(assignment)

    def discard(self) -> None:
        """Kills it; its pidfd shows when it has ended."""
        self.unwanted = True
        self.kill_group()

    def _send_assignment(self, assignment: Program) -> None:
        """Sends the assignment without waiting for a child that does not read yet. The pipe is not enlarged, because
        the total capacity of a user's pipes is limited."""
        line = assignment.to_line()
        if len(line) <= fcntl.fcntl(self._control_fd, fcntl.F_GETPIPE_SZ):
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control_fd, line)
            return
        pipe = os.dup(self._control_fd)
        writer = threading.Thread(target=_write_all, args=(pipe, line), name="assignment", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # no thread can be started: blocks instead
            _write_all(pipe, line)

    def read_message(self) -> bool:
        """Reads from the readable `warm_fd`. Returns whether it got a message; False does not mean that no more will
        come."""
        heard = os.read(self.warm_fd, _SAID_BYTES)
        self.said += heard if self.warm else heard[1:]  # the first byte is that of a warm child
        self.warm = self.warm or bool(heard)
        return bool(heard)

    @property
    def has_session(self) -> bool:
        """(a rank) Its script has begun a session, or a communicator."""
        return self.rank is not None and bool(self.said)

    def send(self, signum: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def kill_group(self) -> None:
        """Sends SIGKILL to the child and all processes of its session. Valid until `reap`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, exit_code: int) -> None:
        """Kills its group, and closes the pipes to it; called once it has ended, or is about to."""
        self.kill_group()
        self.exit_code = exit_code
        for fd in (self.warm_fd, self._control_fd):
            if fd >= 0:
                os.close(fd)
        self.warm_fd = self._control_fd = -1

    def reap(self) -> None:
        """Collects the process, after `end` unless it has ended already; called once the pidfd is readable."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so the pid, hence the group's id, cannot have been reused.
        self.kill_group()
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert ended is not None
        if self.exit_code is None:
            self.end(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        if self._process is not None:
            self._process.returncode = self.exit_code
        os.close(self.pidfd)
        self.pidfd, self.gone = -1, True


def _write_all(fd: int, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb") as pipe:
        pipe.write(line)


def _name_undead(pid: int) -> None:
    print(f"swift: process {pid} was killed and does not go away", file=sys.stderr)


class Nursery:
    """All children of the launcher, and the selector that reports which of them became warm or ended.

    Invariants: every child that was started and not reaped is in `children` and registered by its pidfd. `_server` is
    registered.
    """

    def __init__(
        self,
        env: dict[str, str],
        path0: str,
        preload: str,
        *,
        fork: bool = True,
        on_unfit: Callable[[str], None],
    ) -> None:
        """Prepares to start children. `fork`: use a fork server. `on_unfit`: called once, with the reason, if the
        modules prevent that."""
        # The same order of sets and other hashes in all processes, replacements included.
        self._env = {"PYTHONHASHSEED": "0", **env}
        self._path0 = path0
        self._preload = preload
        self._forks = fork
        self._on_unfit = on_unfit
        self._server: ForkServer | None = None
        self._server_failures = 0
        self._server_at = -math.inf
        """The earliest time at which to start a fork server."""
        self._selector = selectors.DefaultSelector()
        # One byte for all children: the one that reads it may print an error that all of them have.
        self._word_read, self._word_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(self._word_write, b"w")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self.children: list[Child] = []
        self._dying: deque[Child] = deque()
        """Children that have let go of their lives, as threads have noted."""

    def wake(self) -> None:
        """Ends `wait` early. Callable from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    @property
    def spares(self) -> list[Child]:
        """The spares, the best first: warm ones, then in order of their start."""
        there = (child for child in self.children if child.rank is None and child.exit_code is None)
        free = (child for child in there if not child.unwanted and not child.rehearses)
        return sorted(free, key=lambda child: not child.warm)

    def attend(self, fd: int, hear: Callable[[], None]) -> None:
        """Makes `wait` call `hear` whenever the descriptor is readable, until `ignore`."""
        self._selector.register(fd, selectors.EVENT_READ, hear)

    def ignore(self, fd: int) -> None:
        self._selector.unregister(fd)

    # The fork server.

    def prepare(self) -> None:
        """Waits until children can be forked, or it is clear that they cannot. Interruptible."""
        while self.tend() is False:
            assert self._server is not None
            self._read_messages()

    def tend(self) -> bool:
        """Starts the fork server if it is wanted and possible. Returns False while it imports; spares can wait for
        that."""
        if self._forks and self._server is None and time.monotonic() >= self._server_at:
            try:
                self._server = ForkServer(self._env, self._path0, self._preload)
            except OSError as error:
                self._server_at = time.monotonic() + SERVER_AGAIN_S
                events.emit("fork_server_not_started", reason=error.strerror)
                return True
            self._selector.register(self._server, selectors.EVENT_READ, self._read_messages)
            events.emit("fork_server_started", server_pid=self._server.pid)
        return self._server is None or self._server.ready

    def _read_messages(self) -> None:
        assert self._server is not None
        try:
            reason = self._server.wait_ready()
        except ForkFailed as error:
            self._lose_server(str(error))
            return
        if reason is None:
            events.emit("fork_server_ready", server_pid=self._server.pid)
            return
        self._forks = False
        self._drop_server()
        events.emit("fork_server_unfit", reason=reason)
        self._on_unfit(reason)

    def _lose_server(self, reason: str) -> None:
        assert self._server is not None
        events.emit("fork_server_lost", server_pid=self._server.pid, reason=reason)
        self._drop_server()
        self._server_failures += 1
        self._forks = self._server_failures < SERVER_FAILURES_MAX

    def _drop_server(self) -> None:
        if self._server is not None:
            self._selector.unregister(self._server)
            if not self._server.close(KILL_WAIT_S):
                _name_undead(self._server.pid)
            self._server = None

    def _fork(self, fds: list[int]) -> Started | None:
        if self._server is None or not self._server.ready:
            return None
        try:
            pid = self._server.fork(fds)
        except ForkFailed as error:
            self._lose_server(str(error))
            return None
        self._server_failures = 0
        return pid, None

    # Children.

    def spawn(self) -> Child:
        """Starts a child: forked if that is possible at once, else in a new interpreter, which is as fast as a new
        server. Raises StartFailed."""
        try:
            child = self._start(self._fork) or self._start(self._interpret)
        except OSError as error:
            raise StartFailed(
                f"no process can be started ({error.strerror}): look at the limits of processes and open files "
                "(ulimit -u, ulimit -n, pids.max of the cgroup)"
            ) from None
        assert child is not None
        self.children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.warm_fd, selectors.EVENT_READ, child)
        return child

    def _start(self, how: Callable[[list[int]], Started | None]) -> Child | None:
        # Separate pipes for each attempt: a failed fork may have left a reader.
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            control_read, control_write = os.pipe()
            theirs.callback(os.close, control_read)
            ours.callback(os.close, control_write)
            warm_read, warm_write = os.pipe()
            os.set_blocking(warm_read, False)
            theirs.callback(os.close, warm_write)
            ours.callback(os.close, warm_read)
            life = Life()
            theirs.callback(os.close, life.fd)
            started = how([control_read, warm_write, self._word_read, life.fd])
            if started is None:
                return None
            child = Child(*started, control_write, warm_read, life)
            ours.pop_all()
            return child

    def _interpret(self, fds: list[int]) -> Started:
        control_fd, warm_fd, word_fd, life_fd = fds
        numbers = map(str, (control_fd, warm_fd, life_fd, os.getpid()))
        command = [sys.executable, "-u", "-P", "-m", "swift_ft.launch.worker", *numbers]
        command += [self._path0, self._preload]
        env = self._env | {ENV_WORD_FD: str(word_fd)}
        process = subprocess.Popen(command, env=env, pass_fds=fds, start_new_session=True)
        return process.pid, process

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def wait(self, timeout_s: float) -> tuple[list[Child], list[Child]]:
        """Blocks until an event or the timeout. Returns (children with a message, see `Child.read_message`; children
        that ended)."""
        spoke, ended, gone = [], [], []
        for key, _ in self._selector.select(timeout_s):
            child = key.data
            if not isinstance(child, Child):
                child()
            elif key.fd == child.pidfd:
                gone.append(child)
            elif child.read_message():
                spoke.append(child)
            else:
                self._drop_warm_fd(child)
        for child in gone:  # last: this closes its pipe, which may have been readable as well
            self._selector.unregister(child.pidfd)
            self.children.remove(child)
            if child.exit_code is None:
                self._hear_last(child)
                ended.append(child)
            child.reap()
        ended += self._died()
        for child in spoke:
            if child.warm and not child.watched and child.exit_code is None:
                child.watched = True
                child.life.watch(functools.partial(self._note_death, child))
        return spoke, ended

    def _died(self) -> list[Child]:
        died = []
        while self._dying:
            child = self._dying.popleft()
            exit_code = exit_code_of(child.pid) if child.exit_code is None else None
            if exit_code is not None and exit_code < 0:  # others take what they leave with them
                self._hear_last(child)
                child.end(exit_code)
                died.append(child)
        return died

    def _note_death(self, child: Child) -> None:
        """(a thread)"""
        self._dying.append(child)
        self.wake()

    def _hear_last(self, child: Child) -> None:
        if child.warm_fd >= 0:
            self._selector.unregister(child.warm_fd)
            with contextlib.suppress(BlockingIOError):  # nothing was said since
                child.read_message()

    def _drop_warm_fd(self, child: Child) -> None:
        self._selector.unregister(child.warm_fd)
        os.close(child.warm_fd)
        child.warm_fd = -1

    def stop(self, children: Iterable[Child], grace_s: float, hurry: Callable[[], bool]) -> None:
        """Sends SIGTERM; after the grace period (or once `hurry`, checked at each wake-up, returns True) SIGKILL; reaps
        them."""
        stopping = list(children)
        for child in stopping:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._any_alive(stopping) and not hurry() and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
        self.kill([*stopping, *(child for child in self.children if child.exit_code is not None)])

    def kill(self, children: Iterable[Child]) -> None:
        """Kills and reaps them. One that does not end is reported and abandoned."""
        killed = [child for child in children if not child.gone]
        for child in killed:
            child.kill_group()
        deadline = time.monotonic() + KILL_WAIT_S
        while self._any_alive(killed) and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
        for child in killed:
            if not child.gone:
                _name_undead(child.pid)

    @staticmethod
    def _any_alive(children: list[Child]) -> bool:
        return not all(child.gone for child in children)

    def close(self) -> None:
        self.kill(list(self.children))
        self._drop_server()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1  # a thread that waits for a death may come later

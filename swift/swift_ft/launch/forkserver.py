"""One process that imports the modules of ranks once, and forks ranks and spares from it.

    python -u -m swift_ft.launch.forkserver SOCKET_FD LAUNCHER_PID PATH0 MODULE,MODULE...

(launcher) starts it with the environment that ranks get, see `ForkServer`.
(server)   dies with the launcher; imports the modules as a worker would; sends ``{"fit": null}``, or why it is
           unsafe to fork: a module has started a thread, or holds a file open, which all ranks would share.
(launcher) becomes the subreaper of orphans, and sends ``{}`` with the child's descriptors.
(server)   forks a process that forks the child and exits: now the child belongs to the launcher, whose waitid
           and whose death it needs. This holds only once the process between is reaped; then the child gets a byte.
(child)    leads a session of its own, asks the kernel to die with the launcher, sends its pid, and goes on
           as any worker (`swift_ft.launch.worker`).
(server)   ``{"pid": 4711}``, or ``{"error": "why"}``: the launcher then starts a new interpreter.
(launcher) stops adopting. What a trainer has left that died in between stays the launcher's, too.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from swift_ft.launch import worker
from swift_ft.launch.worker import set_title

FORK_S_MAX = 10.0
"""Seconds after which a fork server that does not answer is considered stuck. A fork takes some 20 ms."""
_MESSAGE_BYTES_MAX = 1 << 16
_REASON_MAX = 500
_PR_SET_CHILD_SUBREAPER = 36

# The launcher's side. All of it runs in its main thread.


class ForkFailed(Exception):
    """Raised if no child was forked; the server may be dead. Caught by the nursery."""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes orphaned descendants children of this process instead of init's, for the duration of the context. Raises
    ForkFailed if the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ForkFailed(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class ForkServer:
    """The launcher's end. Readable when the server has reported whether it is fit, and when it has died."""

    def __init__(self, env: dict[str, str], path0: str, preload: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-P", "-m", "swift_ft.launch.forkserver"]
        command += [str(theirs.fileno()), str(os.getpid()), path0, preload]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, env=env, pass_fds=(theirs.fileno(),), start_new_session=True
                )
        except OSError:
            self._line.close()
            raise
        self.pid = self._process.pid
        self.ready = False

    def fileno(self) -> int:
        return self._line.fileno()

    def wait_ready(self) -> str | None:
        """Waits for the server's report. Returns why it must not fork, or None. Raises ForkFailed if it has died."""
        reason: str | None = self._receive()["fit"]
        self.ready = reason is None
        return reason

    def fork(self, fds: Sequence[int]) -> int:
        """Returns the pid of a new child of this process, which has copies of the descriptors. Raises ForkFailed if the
        fork server cannot fork, does not answer or is gone."""
        with adopting():
            try:
                socket.send_fds(self._line, [b"{}"], fds)
            except OSError as error:
                raise ForkFailed(f"the fork server is gone: {error}") from error
            if not select.select([self._line], [], [], FORK_S_MAX)[0]:
                raise ForkFailed(f"the fork server does not answer within {FORK_S_MAX:g} s")
            answer = self._receive()
        if "error" in answer:
            raise ForkFailed(answer["error"])
        pid: int = answer["pid"]
        return pid

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._line.recv(_MESSAGE_BYTES_MAX)
        except OSError as error:
            raise ForkFailed(f"the fork server is gone: {error}") from error
        if not message:
            raise ForkFailed("the fork server has died")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def close(self, timeout_s: float) -> bool:
        self._process.kill()  # first, so that it does not report a closed line
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._line.close()
        return self._process.returncode is not None


# The server's side.


def _threads() -> int:
    """Returns the number of threads at a fork: libraries with fork handlers (OpenBLAS) end theirs right before one."""
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))


def _files() -> dict[str, str]:
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed again
            files[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return files


def prepare(modules: str) -> str | None:
    """Imports the modules. Returns why this process must not fork then, in words for the user; None: it may."""
    files = _files()
    opened: dict[tuple[str, str], str] = {}
    first_thread = "" if _threads() == 1 else "something in Python's start"
    gc.disable()  # it would scan all of torch again and again: a fifth of the time
    for name in modules.split(","):
        try:
            worker.preload(name)
        except Exception as error:  # noqa: BLE001  (whatever a module may raise)
            return f"{name}: {type(error).__name__}: {error}"
        first_thread = first_thread or ("" if _threads() == 1 else name)
        for fd, target in _files().items():
            opened.setdefault((fd, target), name)
    gc.enable()
    gc.collect()
    if _threads() > 1:
        return f"{first_thread} starts a thread"
    for fd, target in _files().items():
        if files.get(fd) != target:
            return f"{opened.get((fd, target), modules)} keeps {target} open"
    return None


def _reseed() -> None:
    """Reseeds generators as the standard library does for `random`, so that no two ranks share a stream by accident."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _fork_twice() -> bool:
    """Forks twice. Returns True in the grandchild, else False once the process between has ended, so that the
    grandchild has its new parent."""
    between = os.fork()
    if between == 0:
        try:
            grandchild = os.fork()
        except OSError:
            os._exit(1)
        if grandchild != 0:
            os._exit(0)
        return True
    os.waitpid(between, 0)
    return False


def _give_birth(launcher_pid: int) -> int:
    """Returns the child's pid; 0 in the child. Raises OSError if there is none."""
    go_read, go_write = os.pipe()
    said_read, said_write = os.pipe()
    if not _fork_twice():
        os.close(go_read)
        os.close(said_write)
        with open(go_write, "wb", buffering=0) as go, open(said_read, "rb") as answer:
            with contextlib.suppress(BrokenPipeError):
                go.write(b"g")
            number = answer.read()
        if not number:
            raise OSError("the child ended before it was the launcher's")
        return int(number)
    os.close(go_write)
    os.close(said_read)
    os.setsid()
    if os.read(go_read, 1) == b"":
        os._exit(0)  # the server is dead
    worker.die_with(launcher_pid)
    _reseed()
    try:
        os.write(said_write, str(os.getpid()).encode())
    except BrokenPipeError:
        os._exit(0)
    os.close(go_read)
    os.close(said_write)
    return 0


def serve(line: socket.socket, launcher_pid: int) -> list[int] | None:
    """Forks at every request. Returns in a child, with its descriptors; in the server, with None, once the line is
    closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(line, _MESSAGE_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return None
        try:
            pid = _give_birth(launcher_pid)
        except OSError as error:
            answer: dict[str, Any] = {"error": str(error)}
        else:
            if pid == 0:
                return list(fds)
            answer = {"pid": pid}
        for fd in fds:
            os.close(fd)
        line.send(json.dumps(answer).encode())


def main(argv: list[str]) -> None:
    line_fd, launcher_pid = map(int, argv[:2])
    path0, modules = argv[2:]
    worker.die_with(launcher_pid)
    set_title("swift-forksrv", f"swift-ft: fork server of launcher {launcher_pid}")
    line = socket.socket(fileno=line_fd)
    line.set_inheritable(False)
    worker.begin_path(path0)
    reason = prepare(modules)
    gc.freeze()  # so that a collection in a child does not write to every page
    line.send(json.dumps({"fit": reason and reason[:_REASON_MAX]}).encode())
    fds = serve(line, launcher_pid)
    line.close()
    if fds is None:
        return
    control_fd, warm_fd, word_fd, life_fd = fds
    os.environ[worker.ENV_WORD_FD] = str(word_fd)
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]
    worker.work(control_fd, warm_fd, life_fd)


if __name__ == "__main__":
    main(sys.argv[1:])

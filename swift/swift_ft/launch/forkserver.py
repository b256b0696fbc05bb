"""One process that imports the modules of ranks once, and forks ranks and spares from it.

    python -u -m swift_ft.launch.forkserver SOCKET_FD LAUNCHER_PID PATH0 MODULE,MODULE... [MODULE:NAME,...]

(launcher) starts it with the environment that ranks get, see `ForkServer`.
(server)   dies with the launcher; imports the modules as a worker would; of the second list, the script's own
           imports, those that pass a trial (`fitting`); sends ``{"fit": null, "chosen": [...]}``, or
           why it is unsafe to fork: a module has started a thread, or holds a file open, which all ranks would share.
(launcher) becomes the subreaper of orphans, and sends ``{}`` with the child's descriptors.
(server)   forks a process that forks the child and exits: now the child belongs to the launcher, whose waitid
           and whose death it needs. This holds only once the process between is reaped; then the child gets a byte.
(child)    leads a session of its own, asks the kernel to die with the launcher, sends its pid, and goes on
           as any worker (`swift_ft.launch.worker`).
(server)   ``{"pid": 4711}``, or ``{"error": "why"}``: the launcher then starts a new interpreter.
(launcher) stops adopting. A trainer that died in between has left it its own children: the nursery reaps them.
"""

import ast
import contextlib
import ctypes
import gc
import importlib.machinery
import json
import os
import random
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swift_ft.launch import worker
from swift_ft.launch.worker import set_title

# The first imports of a script, found by parsing it.
#
# Ranks are forked from a process that has already imported these (`choose`), so a replacement does not wait for them.
# Only installed modules are taken: the script's own modules may read arguments and environment, which differ by rank.
# And only the first ones: any statement between a script's imports may be meant for the next of them (`os.environ[...]
# = ...`, `sys.path.insert`, `matplotlib.use`).

MOST = 64
"""Limit of imports taken from one script."""


def imports_of(script: str, path0: str) -> list[str]:
    """Returns the script's first imports, in order: ``module``, or ``module:name`` for ``from module import name``."""
    try:
        with tokenize.open(script) as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []  # the script itself reports this error
    modules: list[str] = []
    places = _Places(path0)
    for statement in body:
        for imported in _imports(statement):
            names = _names(imported)
            if not names or not all(places.has(name.partition(":")[0]) for name in names):
                return modules[:MOST]
            modules += names
        if not _does_nothing_else(statement):
            break
    return modules[:MOST]


def script_of(script: str, module: bool, path0: str) -> str:
    """Returns the file that is run; a module's only if no package is imported before it. Empty: unknown."""
    if not module:
        return script
    path = os.path.join(path0, f"{script}.py")
    return path if "." not in script and os.path.isfile(path) else ""


class _Places:
    """The directories from which modules come: the script's own, and those of installed packages."""

    def __init__(self, path0: str) -> None:
        self._own = [path0, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        dynamic = [os.path.join(path, "lib-dynload") for path in named[:2]]
        self._installed = [*dict.fromkeys([*named, *dynamic, *site.getsitepackages()])]
        if site.ENABLE_USER_SITE:
            self._installed.append(site.getusersitepackages())

    def has(self, module: str) -> bool:
        """Returns whether the module is installed, and not shadowed by one of the script's own."""
        top = module.partition(".")[0]
        if top in sys.builtin_module_names or top == "swift_ft":
            return True
        return not _there(top, self._own) and _there(top, self._installed)


def _there(top: str, places: Sequence[str]) -> bool:
    return importlib.machinery.PathFinder.find_spec(top, places) is not None


def _imports(statement: ast.stmt) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports of this statement, including those of a ``try`` that contains only imports."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield statement
    elif isinstance(statement, ast.Try) and _does_nothing_else(statement):
        for inner in statement.body:
            yield from _imports(inner)


def _names(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the imported names. Empty: a relative import, so it is the script's own."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if statement.level or statement.module is None:
        return []
    return [f"{statement.module}:{alias.name}" for alias in statement.names]


def _does_nothing_else(statement: ast.stmt) -> bool:
    """Returns whether the statement only imports, is a string, or assigns a constant to a name."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name()], value=ast.Constant()):
            return True
        case ast.Try(body=body, orelse=[], finalbody=[]):
            return all(isinstance(inner, ast.Import | ast.ImportFrom | ast.Try) for inner in body) and all(
                map(_does_nothing_else, body)
            )
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False


# Trial imports: which modules may be imported before a fork, tried in a process that is discarded.
#
# ::
#
#     (fork server) has imported the modules of every rank; forks a child
#     (child)       imports one after the other, checks its own state after each, and writes "" or the objection.
#                   Imports cannot be undone, so it ends with the first one that does not fit
#     (fork server) forks the next child for the modules after that one; then imports the fitting ones itself
#
# A module does not fit if it starts a thread or a process, keeps a file open, has set up CUDA, handles a signal or
# draws from a default generator; nor if it has read a rank's own values (its number, its arguments).

TRIAL_S_MAX = 60.0
"""Seconds for all trials. The modules left then are imported by the script."""
_OF_A_RANK = frozenset(
    f"{group}{what}" for group in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT"}
_OF_A_LAUNCHER = ("TORCHELASTIC_", "SWIFT_")
Traces = Callable[[], dict[str, Any]]
"""Returns observations of any process that the fork server forks, by name."""


def fitting(names: list[str], traces: Traces) -> tuple[list[str], dict[str, str]]:
    """Returns the modules that may be imported here, and the objections to the others."""
    fit: list[str] = []
    unfit: dict[str, str] = {}
    deadline = time.monotonic() + TRIAL_S_MAX
    while names:
        passed, why = _try(names, traces, deadline)
        fit += names[:passed]
        if passed < len(names):
            unfit[names[passed]] = why
        names = names[passed + 1 :]
    return fit, unfit


def _try(names: list[str], traces: Traces, deadline: float) -> tuple[int, str]:
    """Returns how many of the first modules fit, and the objection to the next one."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            worker.die_with(os.getppid())
            os.close(told)
            _import_all(names, traces, tell)
        finally:
            os._exit(0)
    os.close(tell)
    try:
        lines = _lines(told, deadline)
        passed = 0
        for why in lines:
            if why:
                return passed, why
            passed += 1
        return passed, "it ends its process, or takes too long"
    finally:
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _lines(told: int, deadline: float) -> Iterator[str]:
    """Yields lines until the child ends, or the deadline passes."""
    text = b""
    while (left_s := deadline - time.monotonic()) > 0 and select.select([told], [], [], left_s)[0]:
        if not (more := os.read(told, 1 << 16)):
            return
        text += more
        *whole, text = text.split(b"\n")
        yield from (str(json.loads(line)) for line in whole)


def _import_all(names: list[str], traces: Traces, tell: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)  # the script's own import prints it again
    os.close(quiet)
    looked: list[str] = []
    _watch(looked)
    before = traces() | _state()
    for name in names:
        try:
            worker.preload(name)
            after = traces() | _state()
            why = (
                looked[0] if looked else next((what for what in after if after[what] != before.get(what)), "")
            )
        except BaseException as error:  # noqa: BLE001  (whatever a module may raise)
            why = f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps(why[:200]).encode() + b"\n")
        if why:
            return


def _state() -> dict[str, Any]:
    """Returns observations, each keyed by the objection if it changes."""
    state: dict[str, Any] = {
        "it handles a signal": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "it draws from Python's random": random.getstate(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["it draws from torch's generator"] = torch.get_rng_state().tolist()
        from swift_ft.device import accelerator_in_use  # loads torch

        state["it sets up a device"] = accelerator_in_use() is not None
    return state


def _watch(looked: list[str]) -> None:
    """Records accesses to values that only a rank has: here a module would see another process's."""

    class Environment(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> str:
            if name in _OF_A_RANK or name.startswith(_OF_A_LAUNCHER):
                looked.append(f"it looks at ${name}")
            return str(super().__getitem__(name))

    class Arguments(list[str]):
        def __getitem__(self, place: Any) -> Any:
            looked.append("it looks at the arguments")
            return super().__getitem__(place)

        def __iter__(self) -> Iterator[str]:
            looked.append("it looks at the arguments")
            return super().__iter__()

        def __len__(self) -> int:
            looked.append("it looks at the arguments")
            return super().__len__()

    os.environ.__class__ = Environment
    sys.argv = Arguments(sys.argv)


FORK_S_MAX = 10.0
"""Seconds after which a fork server that does not answer is considered stuck. A fork takes some 20 ms."""
_MESSAGE_BYTES_MAX = 1 << 16
_REASON_MAX = 500
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# The launcher's side. All of it runs in its main thread.


class ForkFailed(Exception):
    """Raised if no child was forked; the server may be dead. Caught by the nursery."""


def own_children() -> set[int]:
    """Returns the pids of the main thread's children, zombies and adopted orphans included. Empty if the kernel does
    not list them."""
    pid = os.getpid()
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{pid}/children").read_text().split()))
    return set()


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes orphaned descendants children of this process instead of init's, for the duration of the context. Raises
    ForkFailed if the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ForkFailed(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class ForkServer:
    """The launcher's end. Readable when the server has reported whether it is fit, and when it has died."""

    def __init__(self, env: dict[str, str], path0: str, preload: str, imports: str = "") -> None:
        """Starts the server. Raises OSError if no process can be started."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-P", "-m", "swift_ft.launch.forkserver"]
        command += [str(theirs.fileno()), str(os.getpid()), path0, preload, imports]
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
        self.chosen: list[str] = []
        """The modules of `imports` that it has imported."""
        self.left_out: dict[str, str] = {}
        """The other modules of `imports`, each with the objection."""

    def fileno(self) -> int:
        return self._line.fileno()

    def wait_ready(self) -> str | None:
        """Waits for the server's report. Returns why it must not fork, or None. Raises ForkFailed if it has died."""
        message = self._receive()
        reason: str | None = message["fit"]
        self.chosen, self.left_out = message["chosen"], message["left_out"]
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
        """Kills and reaps it. Returns False if it does not end in time."""
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


def choose(imports: str) -> tuple[list[str], dict[str, str]]:
    """Imports the modules that fit. Returns their names, and the objections to the others."""

    def traces() -> dict[str, Any]:
        return {
            "it starts a thread": _threads(),
            "it keeps a file open": _files(),
            "it starts a process": own_children(),
        }

    wanted = [name for name in imports.split(",") if name and not _is_there(name)]
    chosen, left_out = fitting(wanted, traces) if wanted else ([], {})
    for name in chosen:
        with contextlib.suppress(Exception):
            worker.preload(name)
    return chosen, left_out


def _is_there(name: str) -> bool:
    module, _, attribute = name.partition(":")
    return module in sys.modules and (not attribute or attribute in vars(sys.modules[module]))


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
        message, fds, _, _ = socket.recv_fds(line, _MESSAGE_BYTES_MAX, 3, socket.MSG_CMSG_CLOEXEC)
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
    try:
        path0, modules, imports = argv[2:]
        line_fd, launcher_pid = (int(arg) for arg in argv[:2])
    except ValueError:
        print("swift: swift_ft.launch.forkserver is started by `swift-ft run`, not by hand", file=sys.stderr)
        sys.exit(2)
    worker.die_with(launcher_pid)
    set_title("swift-forksrv", f"swift-ft: fork server of launcher {launcher_pid}")
    line = socket.socket(fileno=line_fd)
    line.set_inheritable(False)
    worker.begin_path(path0)
    reason = prepare(modules)
    chosen, left_out = choose(imports) if reason is None else ([], {})
    if chosen and (_threads() > 1 or own_children()):
        reason = f"one of {', '.join(chosen)} starts a thread or a process, sometimes"
    gc.freeze()  # so that a collection in a child does not write to every page
    report = {"fit": reason and reason[:_REASON_MAX], "chosen": chosen, "left_out": left_out}
    line.send(json.dumps(report).encode())
    fds = serve(line, launcher_pid)
    line.close()
    if fds is None:
        return
    control_fd, warm_fd, word_fd = fds
    os.environ[worker.ENV_WORD_FD] = str(word_fd)
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]
    worker.work(control_fd, warm_fd)


if __name__ == "__main__":
    main(sys.argv[1:])

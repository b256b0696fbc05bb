"""The main program of every child before the training script: a warm spare that becomes a rank.

A child that the fork server has forked (`swift_ft.launch.forkserver`) begins at `work`; any other is started as

    python -u -m swift_ft.launch.worker CONTROL_FD WARM_FD LIFE_FD LAUNCHER_PID PATH0 MODULE,MODULE...

(launcher) spawns it, with the environment that ranks get: torch reads OMP_NUM_THREADS when it is imported.
(worker)   asks the kernel to die with the launcher, makes PATH0 the first entry of sys.path as it will be for
           the script, imports the modules, writes one byte to WARM_FD, and waits for one line of JSON on
           CONTROL_FD.
(launcher) writes the line, see `Program`; end of file instead means that this spare is not needed.
(worker)   sets environment and arguments as `python SCRIPT` would, and runs the script as __main__.

(rank)     writes one byte more to WARM_FD when the script begins a session.

An assignment may be a warm-up (`swift_ft.warm_up`). Then the worker writes one line of JSON to WARM_FD when it is done,
and waits for the next assignment.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, NoReturn

from swift_ft import events, reinitialization, warm_up
from swift_ft.errors import JobFailed, SwiftError, UsageError
from swift_ft.launch.death import hold
from swift_ft.text import outlive_readers, tell

# Process titles for `ps` and `top`: a forked rank would otherwise show the fork server's command line.

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 48 - 3, 49 - 3
"""Fields of /proc/self/stat (proc(5) counts from 1), in the part after the name in brackets."""


def set_title(short: str, title: str) -> None:
    """Sets the process title; called by the main thread. `short`: at most 15 characters, for `top`; empty: unchanged.
    `title`: replaces the command line, as much of it as fits. Has no effect where the system does not support it."""
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        if short:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode()[:15], 0, 0, 0)
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if 0 < begin < end:  # the original command line, which is not read any more
            words = title.encode()[: end - begin - 1]
            ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


# Exit of a rank's process with a thread blocked in a backend, and of a process that a rank has forked.
#
# Such a thread waits in C++ for a message of a dead peer. If it returns while the interpreter shuts down, it cannot get
# the interpreter's lock any more, and C++ ends the whole process by SIGABRT. So the interpreter is not shut down then:
# the parts of a shutdown on which a script can rely are done here, and the process exits. The same holds for a forked
# child that returns from the script: the threads for which process groups and clients wait at their end exist in the
# parent alone.

_RUNNER = "swift_ft.comm.worker_thread"


def leave_if_threads_are_lost(rank: int) -> None:
    """Leaves the process if a thread is lost, or in a forked child. Called after the script has ended, while its
    exception, if any, is being handled. `rank`: pid of the rank's process."""
    runner = sys.modules.get(_RUNNER)  # processes without torch import this module too
    if os.getpid() != rank or (runner is not None and runner.lost()):
        leave_process(sys.exc_info()[1])


def leave_process(error: BaseException | None) -> NoReturn:
    """Exits with the interpreter's exit code. Exit handlers run, and files are flushed."""
    code = _code_of(error)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for each in [*gc.get_objects(), sys.stdout, sys.stderr]:
        with suppress(Exception):
            if isinstance(each, io.IOBase) and not each.closed and each.writable():
                each.flush()
    os._exit(code)


def _code_of(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


ENV_WORD_FD = "SWIFT_WORD_FD"
_PR_SET_PDEATHSIG = 1
_NOT_FOR_A_WARM_UP = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "SWIFT_EVENTS",
    "SWIFT_FAULTS",
    "SWIFT_METRICS_LISTEN",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables by which the script would reach peers, or be taken for the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    env: dict[str, str]
    """Variables added to the process's environment."""
    script: str
    """Path of the script, or the module's name."""
    module: bool
    """The script is run as by `python -m`."""
    args: list[str]
    cwd: str
    stdout: str | None = None
    """File for the output; None: the launcher's own."""
    stderr: str | None = None
    warm_up: bool = False
    """The process does not become the rank. It runs the script as that rank would, to be warm."""
    rehearse: int | None = None
    """The process does not become the rank. It replays steps of that rank, from the checkpoint of this version, and
    ends."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Program":
        return cls(**json.loads(line))


def die_with(launcher_pid: int) -> None:
    """Makes the kernel kill this process when the launcher ends, in whatever way. Raises OSError if the kernel does not
    allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # If the launcher died before the call above, no signal comes.
    if os.getppid() != launcher_pid:
        os._exit(0)


def preload(modules: str) -> None:
    """Imports ahead of time. Ignores failures: the script raises the error if it needs the module."""
    for module in filter(None, modules.split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def draw_alike() -> None:
    """Seeds the default generators, so that a replacement draws the same values as its predecessor before the first
    step, even if the script sets no seed.

    Every process begins with other states of the default generators, torch's among them. Processes forked by one fork
    server begin with the same, but a replacement may come from another one.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


PREPARE = b"prepare\n"
"""Line by which a spare starts the process that a rank with a session needs beside it."""


def read_program(control: BinaryIO) -> Program | None:
    """Waits for the assignment. Returns None if the launcher closed the pipe."""
    while (line := control.readline()) == PREPARE:
        _prepare()
    return Program.from_line(line) if line.endswith(b"\n") else None


def _prepare() -> None:
    from swift_ft.log import sidecar_client  # imports gRPC, which a script without a session does not need

    sidecar_client.start_ahead(sidecar_client.SidecarWriter.module)


def _redirect(path: str | None, fd: int) -> None:
    if path is None:
        return
    # Appended: a replacement continues the file of its predecessor.
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(target, fd)
    os.close(target)


def _become(assignment: Program) -> None:
    os.environ.update(assignment.env)
    os.chdir(assignment.cwd)
    _redirect(assignment.stdout, 1)
    _redirect(assignment.stderr, 2)
    sys.argv = [assignment.script, *assignment.args]
    rank, job = assignment.env.get("RANK", "?"), assignment.env.get("SWIFT_JOB", "?")
    set_title(f"swift-rank{rank}", f"swift-ft: rank {rank} of {job}: {' '.join(sys.argv)}")
    # A process that it forks (a DataLoader's worker) inherits a rank's command line without being one.
    os.register_at_fork(after_in_child=lambda: set_title("", f"swift-ft: forked by rank {rank} of {job}"))


def _without_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that `python SCRIPT` would show."""
    ours = (
        __file__,
        os.path.join(os.path.dirname(__file__), "forkserver.py"),
        reinitialization.__file__,
        "<frozen runpy>",
        "<frozen importlib._bootstrap>",
        "<frozen importlib._bootstrap_external>",
    )
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, _without_bootstrap(trace))


def _run_file(path: str) -> None:
    # As runpy.run_path, which however removes its __main__ before threads and exit handlers end.
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    attributes = {"__file__": path, "__cached__": None, "__loader__": loader, "__builtins__": builtins}
    vars(main).update(attributes)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))


def _run_as_main(assignment: Program) -> None:
    # Repeated for every run of the script.
    os.chdir(assignment.cwd)
    sys.argv = [assignment.script, *assignment.args]
    try:
        if assignment.module:
            runpy.run_module(assignment.script, run_name="__main__", alter_sys=True)
        elif os.path.isfile(assignment.script) and not zipfile.is_zipfile(assignment.script):
            _run_file(os.path.abspath(assignment.script))
        else:
            runpy.run_path(assignment.script, run_name="__main__")
    except reinitialization.Reinitialize:
        sys.modules["__main__"] = ModuleType("__main__")  # the old module's variables hold the model
        raise


def run_script(assignment: Program) -> None:
    """Runs the script as __main__; again, if its session requires it (strategy "reinit"). Its exceptions propagate,
    except a SwiftError, which becomes one line and its exit code."""
    sys.excepthook = _excepthook
    try:
        reinitialization.call_again_after_losses(lambda: _run_as_main(assignment))
    except SwiftError as error:
        warm_up.begin_session()  # the exit code is swift's, and is no script's own
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        if _has_word(error):
            tell(" ".join(str(error).split()))
        sys.exit(error.exit_code)


def _has_word(error: SwiftError) -> bool:
    """Returns whether this rank prints the error: invalid input is the same on all ranks and is printed once, and the
    failure of the job is reported by the launcher."""
    if isinstance(error, JobFailed):
        return False
    if error.exit_code != UsageError.exit_code or ENV_WORD_FD not in os.environ:
        return True
    try:
        return os.read(int(os.environ[ENV_WORD_FD]), 1) != b""
    except BlockingIOError:
        return False


def main(argv: list[str]) -> None:
    control_fd, warm_fd, life_fd, launcher_pid = map(int, argv[:4])
    path0, modules = argv[4:]
    die_with(launcher_pid)
    begin_path(path0)
    preload(modules)
    work(control_fd, warm_fd, life_fd)


def begin_path(path0: str) -> None:
    """Puts the first entry of `python SCRIPT` at the front of sys.path. Until here no module came from there (-P)."""
    if os.environ.get("PYTHONSAFEPATH"):
        return
    if not sys.flags.safe_path:  # started by hand, in a test
        del sys.path[0]
    sys.path.insert(0, path0)


def work(control_fd: int, warm_fd: int, life_fd: int) -> None:
    """Signals that the process is warm, waits for its assignment and becomes that rank."""
    set_title("swift-spare", f"swift-ft: spare of launcher {os.getppid()}")
    outlive_readers()
    hold(life_fd)
    _say(warm_fd, b"w")
    with os.fdopen(control_fd, "rb") as control:
        assignment = read_program(control)
        while assignment is not None and assignment.warm_up:
            _warm_up(assignment, warm_fd)
            assignment = read_program(control)
        if assignment is not None and assignment.rehearse is not None:
            _rehearse(assignment, assignment.rehearse, warm_fd)
    if assignment is None:
        os.close(warm_fd)
        return
    os.set_inheritable(warm_fd, False)
    _become(assignment)
    draw_alike()
    events.configure(f"rank{assignment.env.get('RANK', '?')}")
    events.emit("script_start", incarnation=assignment.env.get("SWIFT_INCARNATION"))
    warm_up.begin_script(warm_fd)
    rank = os.getpid()
    try:
        run_script(assignment)
    finally:
        leave_if_threads_are_lost(rank)


def _say(warm_fd: int, words: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # this spare is not needed; the control pipe shows that too
        os.write(warm_fd, words)


def _rehearse(assignment: Program, version: int, said_fd: int) -> NoReturn:
    """Rehearses the rank, with the lowest priority for CPU time and memory: the ranks train at the same time."""

    def end(run: warm_up.OneRun) -> NoReturn:
        _say_result(said_fd, run, steps=run.steps, difference=run.difference)
        os._exit(0)  # the script's leftovers do not matter

    set_title("swift-rehearse", f"swift-ft: rehearsal of rank {assignment.env.get('RANK', '?')}")
    os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    with _silent():
        warm_up.rehearse(lambda: _run_beside_the_rank(assignment), version, end)


def _run_beside_the_rank(assignment: Program) -> None:
    with _environment_kept():
        os.environ.update(assignment.env)
        for name in _NOT_FOR_A_WARM_UP:
            os.environ.pop(name, None)
        draw_alike()
        _run_as_main(assignment)


def _say_result(said_fd: int, run: warm_up.OneRun, **found: Any) -> None:
    line = json.dumps({"why_not": run.why_not, "passing": run.passing, **found})
    _say(said_fd, line.encode() + b"\n")


def _warm_up(assignment: Program, said_fd: int) -> None:
    """Warms up. This process's environment is restored afterwards, and the script's output is discarded."""
    set_title("swift-spare", f"swift-ft: spare of launcher {os.getppid()}, being warmed up")
    with _silent():
        run = warm_up.warm_up(lambda: _run_beside_the_rank(assignment))
    set_title("swift-spare", f"swift-ft: spare of launcher {os.getppid()}")
    _say_result(said_fd, run, version=-1 if run.version is None else run.version)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    environment, arguments, path, cwd = dict(os.environ), sys.argv, list(sys.path), os.getcwd()
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = arguments, path
        os.chdir(cwd)
        for signum, handler in handlers.items():
            if handler is not None and signal.getsignal(signum) != handler:
                signal.signal(signum, handler)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    kept = [os.dup(fd) for fd in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for fd in (1, 2):
            os.dup2(nothing, fd)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)
            os.close(before)
        os.close(nothing)


if __name__ == "__main__":
    main(sys.argv[1:])

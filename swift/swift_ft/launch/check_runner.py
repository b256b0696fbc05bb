"""Runs one health check, in a process that holds nothing else: whatever the check does, it ends here.

    python -P -m swift_ft.launch.check_runner LAUNCHER_PID LIMIT_S PATH0 WORD...

(launcher) starts it, with the environment of a place (`swift_ft.launch.health_check`).
(runner)   becomes the one who adopts orphans, and forks the check, which leads a session of its own.
(check)    becomes the command; or imports the module of ``python:module:function`` and calls that without arguments
           (of a class, an instance of it): what raises, or returns False, is not fit.
(runner)   reads what the check prints, of which the last line is kept, until it has ended, its time is up, or
           SIGTERM comes: the launcher's word, or the kernel's that there is no launcher any more. Then it kills
           whatever the check has started and not ended, and prints ``{"fit": false, "reason": "…", "seconds": 0.1}``.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from swift_ft.launch.decisions import describe_exit

PYTHON = "python:"
KILL_WAIT_S = 5.0
"""How long what was killed may take to go."""
_TAIL_BYTES = 4096
_LINE_MAX = 200
_NO_COMMAND = 126
_RAISED, _SAID_NO, _SAID_WHAT = 116, 117, 118
_WORDS = {
    _RAISED: "it raised",
    _SAID_NO: "it returned False",
    _SAID_WHAT: "it returned neither True nor False",
}
"""Exit codes of the fork, for what only it knows."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Run:
    """The check, from its fork to its end."""

    def __init__(self, words: list[str], path0: str) -> None:
        self._told, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become(words, path0, theirs)
        os.close(theirs)
        self._pidfd = os.pidfd_open(self._pid)
        self._tail = b""
        self._open = True

    def watch(self, limit_s: float, stop_fd: int) -> str | None:
        """Until it has ended: None, or must be ended: why."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            heard = [self._pidfd, stop_fd, *([self._told] if self._open else ())]
            ready = select.select(heard, [], [], left_s)[0]
            if self._told in ready:
                self._read()
            if self._pidfd in ready:
                return None
            if stop_fd in ready:
                return "it was told to stop"
        return f"it took longer than {limit_s:g} s"

    def _read(self) -> None:
        more = os.read(self._told, 1 << 16)
        self._open = more != b""
        self._tail = (self._tail + more)[-_TAIL_BYTES:]

    def end(self) -> int:
        """Kills what is left of it. How the check itself has ended; negative: by that signal."""
        deadline = time.monotonic() + KILL_WAIT_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        exit_code = -signal.SIGKILL
        while time.monotonic() < deadline:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # nobody is left
                break
            if pid == self._pid:
                exit_code = os.waitstatus_to_exitcode(status)
            if pid == 0:
                for child in _children():  # in a session of their own
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
                time.sleep(0.005)
        return exit_code

    def last_line(self) -> str:
        """After the end: of all that it printed."""
        while self._open and select.select([self._told], [], [], 0)[0]:
            self._read()
        lines = self._tail.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LINE_MAX]


def _children() -> list[int]:
    """Of this process: what the check has left is given to it."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _become(words: list[str], path0: str, output: int) -> None:
    """(the fork) Never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(output, stream)
        if words[0].startswith(PYTHON):
            code = _call(words[0].removeprefix(PYTHON), path0)
        else:
            code = _NO_COMMAND
            os.execvp(words[0], words)
    except SystemExit as ended:  # as Python itself takes it
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, flush=True)
    except BaseException as error:  # noqa: BLE001  (whatever a check may raise)
        code = _RAISED if code != _NO_COMMAND else code
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)  # threads that it has left do not keep it


def _call(target: str, path0: str) -> int:
    import importlib  # a command does not need it

    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, path0)
    module, _, name = target.partition(":")
    check: object = importlib.import_module(module)
    for part in name.split("."):
        check = getattr(check, part)
    if isinstance(check, type):
        check = check()
    said = check()  # type: ignore[operator]
    if said is None or said is True:
        return 0
    if said is False:
        return _SAID_NO
    print(f"{said!r}")
    return _SAID_WHAT


def _stop_fd() -> int:
    """Readable once SIGTERM has come."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_fd)
    return read_fd


def main(argv: list[str]) -> None:
    launcher_pid, limit_s, path0, *words = argv
    stop_fd = _stop_fd()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != int(launcher_pid):
        return
    began = time.monotonic()
    run = _Run(words, path0)
    cut_short = run.watch(float(limit_s), stop_fd)
    seconds = time.monotonic() - began
    exit_code = run.end()
    how = cut_short or ("" if exit_code == 0 else _words(exit_code, words))
    reason = ": ".join(filter(None, [how, run.last_line()])) if how else ""
    said = {"fit": not how, "reason": reason, "seconds": round(seconds, 6)}
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(said).encode())


def _words(exit_code: int, words: list[str]) -> str:
    ours = _WORDS if words[0].startswith(PYTHON) else {_NO_COMMAND: "it cannot be started"}
    return ours.get(exit_code, describe_exit(exit_code))


if __name__ == "__main__":
    main(sys.argv[1:])

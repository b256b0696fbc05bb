"""The health check that an operator names (`swift-ft run --health-check`): what it is, and one run of it.

(plan)     ``HealthCheck.parse``: what cannot be run is refused before anything is started
(agent)    ``Check``: one run, for one place of this machine, in a process of its own
           (`swift.launch.check_runner`); readable once it has ended, then ``end`` has the result
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder

from swift.errors import UsageError
from swift.launch.check_runner import KILL_WAIT_S, PYTHON
from swift.words import one_line

LIMIT_S_DEFAULT = 30.0
STOP_S = KILL_WAIT_S + 1.0
"""How long a check that is told to stop may take to end what it has started."""
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthCheck:
    """Exit code 0: the place is fit. Everything else: it is not."""

    words: tuple[str, ...]
    """A command and its arguments, or one ``python:module:function``."""
    limit_s: float
    path0: str
    """Where a module is looked for first, as the script's own are."""

    @classmethod
    def parse(cls, text: str, limit_s: float, path0: str) -> "HealthCheck":
        """UsageError: there is no such command or module."""
        named = f"run: --health-check {text}"
        if not 0 < limit_s < 86400:
            raise UsageError(f"run: --health-check-s {limit_s:g}: seconds, more than 0")
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{named}: {error}") from None
        if not words:
            raise UsageError("run: --health-check: name a command, or python:MODULE:FUNCTION")
        if words[0].startswith(PYTHON):
            target = words[0].removeprefix(PYTHON)
            if len(words) > 1 or not _TARGET.fullmatch(target):
                raise UsageError(f"{named}: write python:MODULE:FUNCTION, without arguments")
            top = re.split(r"[.:]", target)[0]
            if top not in sys.builtin_module_names and not PathFinder.find_spec(top, [path0, *sys.path]):
                raise UsageError(f"{named}: there is no such module")
        elif shutil.which(words[0]) is None:
            there = os.sep in words[0] and os.path.isfile(words[0])
            why = "it is not executable" if there else "there is no such command"
            raise UsageError(f"{named}: {why}")
        return cls(words=words, limit_s=limit_s, path0=path0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How one check went."""

    fit: bool
    reason: str = ""
    """Why not: how it ended, and its last line of output."""
    seconds: float = 0.0


class Check:
    """One run. Started and ended in the launcher's main thread, with which it dies."""

    def __init__(self, check: HealthCheck, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "swift.launch.check_runner"]
        command += [str(os.getpid()), str(check.limit_s), check.path0, *check.words]
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._pidfd

    def end(self) -> Result:
        """Once it has ended: reaps it."""
        said, _ = self._process.communicate()
        os.close(self._pidfd)
        try:
            told = json.loads(said)
            return Result(
                fit=told["fit"] is True, reason=one_line(told["reason"]), seconds=float(told["seconds"])
            )
        except (ValueError, KeyError, TypeError):
            return Result(fit=False, reason=f"nobody ran it to its end ({self._process.returncode})")


def stop_all(checks: Iterable[Check]) -> None:
    """Ends them, with all that they have started; reaps them."""
    stopped = list(checks)
    for check in stopped:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(check.fileno(), signal.SIGTERM)
    for check in stopped:
        try:
            check._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            check._process.kill()
        check.end()

"""The event trace: timed events of every process of a job, on one clock.

If the environment names a directory in ``SWIFT_EVENTS``, each process appends JSON lines to a file of its own there.
The clock is CLOCK_MONOTONIC, which all processes of one Linux machine share, so a reader merges the files by time. The
drill builds its timeline from them. Without the variable no file is written.

Logs and metrics get the same events by `listen`.

Events that cannot be written (no space, the directory is gone) are counted. The next event that can be written follows
an ``events_lost`` with that ``count``. So a failing trace never stops the caller.
"""

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swift_ft.files import open_regular

ENV_EVENTS_DIR = "SWIFT_EVENTS"

Listener = Callable[[str, Mapping[str, Any]], None]

_TRACE = re.compile(r"[A-Za-z0-9._?-]+-[1-9][0-9]*\.jsonl")

_lock = threading.Lock()
_who = "process"
_fd: int | None = None
_fd_pid = 0
_lost = 0
_listeners: tuple[Listener, ...] = ()


def now() -> float:
    """Returns the seconds on the machine-wide monotonic clock."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def configure(who: str) -> None:
    """Names this process in the trace ("rank2", "coordinator"). A warm spare calls it once it has a rank."""
    global _who, _fd
    with _lock:
        if _fd is not None:
            os.close(_fd)
            _fd = None
        _who = who


def listen(listener: Listener) -> Callable[[], None]:
    """Registers ``listener(event, fields)``, which is called at every event, in the emitting thread.

    It must be quick and must not raise. Returns a function that unregisters it.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(known for known in _listeners if known is not listener)

    return end


def emit(event: str, **fields: Any) -> None:
    """Appends one event by a single write, so a SIGKILL tears at most the last line. Never raises OSError."""
    for listener in _listeners:
        listener(event, fields)
    directory = os.environ.get(ENV_EVENTS_DIR)
    if not directory:
        return
    at = now()
    line = _line(at, event, fields)
    with _lock:
        _append(Path(directory), at, line)


def _line(at: float, event: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"t": at, "who": _who, "pid": os.getpid(), "event": event, **fields}).encode() + b"\n"


def _append(directory: Path, at: float, line: bytes) -> None:
    """Writes a line, or counts it as lost. Called with the lock held."""
    global _fd, _fd_pid, _lost
    if _fd_pid != os.getpid():  # a child: its parent reports the parent's losses
        _fd, _fd_pid, _lost = None, os.getpid(), 0
    try:
        if _fd is None:
            path = directory / f"{_who}-{os.getpid()}.jsonl"
            _fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        whole = _line(at, "events_lost", {"count": _lost}) + line if _lost else line
        written = os.write(_fd, whole)
        if written < len(whole):  # no space for the rest
            os.ftruncate(_fd, os.fstat(_fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _lost = 0
    except OSError:
        _lost += 1


def read(directory: str | Path) -> list[dict[str, Any]]:
    """Returns all events of all processes, by time. A torn last line (its writer was killed) is left out."""
    return Tail(Path(directory)).read()


def _traces(directory: Path) -> Iterator[Path]:
    """Yields the trace files; other files in the directory are skipped."""
    for path in directory.glob("*.jsonl"):
        if _TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            yield path


class Tail:
    """Follows the trace of all processes while it is written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Returns the new events, by time. An incomplete line is returned once it is complete."""
        found = []
        for path in _traces(self._directory):
            with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: float(event["t"]))

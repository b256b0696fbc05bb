"""A process's log on stderr: lines for people or JSON for programs. Uncaught errors are logged and end the process.

An uncaught error in any thread ends the process: without that thread it may never answer again, and would not be
restarted.
"""

import argparse
import errno
import json
import logging
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

from swift_ft import events
from swift_ft.text import one_line

EXIT_CODE = 3


def end_process_on_uncaught(say: Callable[[BaseException], None], exit_code: int = EXIT_CODE) -> None:
    """Makes an uncaught error of any thread end the process, after calling ``say``. So does an unraisable error if
    memory is short, or if a thread fails to start: its starter would wait for it forever."""

    def end(kind: type[BaseException], error: BaseException | None) -> None:
        try:
            say(error if error is not None else kind())
        finally:
            os._exit(exit_code)  # not sys.exit: other threads may wait for the dead one

    def uncaught(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        end(kind, error)

    def in_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_type is not SystemExit:
            end(caught.exc_type, caught.exc_value)

    def unraisable(caught: "sys.UnraisableHookArgs") -> None:
        error = caught.exc_value
        if "in thread started by" in (caught.err_msg or "") and error is not None:
            error = error.__context__ or error  # the first failure, not that of the cleanup
            end(type(error), error)
        if issubclass(caught.exc_type, MemoryError):
            end(caught.exc_type, error)
        sys.__unraisablehook__(caught)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = unraisable


def described(error: BaseException) -> str:
    """Returns one line: the error, the thread, and the lines of code, the innermost first."""
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    where = f" ({' < '.join(places)})" if places else ""
    name = type(error).__name__
    return f"{name}: {error} in thread {threading.current_thread().name}{where}"


# Log format on stderr: lines for people, or one JSON object per line for programs.
#
# Both have two sources: Python's `logging`, and the events of `swift_ft.events`. Lines below ``--log-level`` are not
# written. As JSON each line has ``time`` (UTC, ISO 8601), ``monotonic`` (seconds, the clock of the event trace),
# ``level``, ``role``, ``pid``, ``event``, ``message`` if there is one, and the event's own ``fields``.
#
# Secrets are removed in both formats: values of fields with a secret's name, text after "Bearer", "token=" and the
# like, and values of environment variables with a secret's name.

TEXT, JSON = "text", "json"
REMOVED = "[removed]"

_SECRET_NAME = re.compile(
    r"token|authorization|secret|passw(or)?d|credential|private[_-]?key|api[_-]?key", re.IGNORECASE
)
_PLACE_NAME = re.compile(r".*_(file|path|dir)|(swift|google_application)_credentials", re.IGNORECASE)
"""Names of variables whose values are no secrets: they say where some are."""
_SECRET_WORDS = re.compile(
    r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{4,}|"
    r"\b([\w-]*(?:token|authorization|secret|password|credential|api[_-]?key)[\w-]*['\"]?\s*[=:]\s*['\"]?"
    r"(?:(?:basic|bearer)\s+)?)[^\s'\",;)]+",
    re.IGNORECASE,
)
_AT_ONCE = select.PIPE_BUF // 4
"""Characters written at once: a pipe that polls as writable has room for them."""
_PATIENCE_S = 0.1
"""Seconds to wait for a slow reader; once a line was lost, 0."""
_SECRET_BYTES_MIN = 6
"""Minimum length of an environment variable's value to be redacted; shorter ones would match harmless words."""

_ERRORS = {"storage_failed", "fatal"}
_WARNINGS = {
    *("disk_full", "storage_busy", "quarantined", "stream_corrupt", "torn_tail", "not_removed"),
    *("trim_failed", "manifest_not_saved", "lease_expired", "suspect", "place_unfit", "fenced", "refused"),
    *("log_server_blocked", "log_server_lost", "job_set_apart", "audit_failed", "not_exact", "member_exited"),
    *("checkpoint_untold", "checkpoint_failed", "checkpoint_unsaved", "communicators_unused"),
}


def level_of(event: str, fields: Mapping[str, Any] = MappingProxyType({})) -> int:
    if event in _ERRORS:
        return logging.ERROR
    if event == "member_exited" and (fields.get("exit_code") == 0 or fields.get("held") is False):
        return logging.INFO  # (a process that held no rank any more, or never did)
    return logging.WARNING if event in _WARNINGS else logging.INFO


class Redactor:
    """Removes secrets from text to be written. Pure, except for the environment given to the constructor."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value.strip()
            for name, value in environment.items()
            if _SECRET_NAME.search(name)
            and not _PLACE_NAME.fullmatch(name)
            and len(value.strip()) >= _SECRET_BYTES_MIN
        }
        longest_first = sorted(values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        return _SECRET_WORDS.sub(_without, text)

    def value(self, value: Any) -> Any:
        """Redacts text in nested mappings and sequences."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): REMOVED if _is_secret(name, inner) else self.value(inner)
                for name, inner in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(inner) for inner in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.text(str(value))


def _is_secret(name: object, value: object) -> bool:
    """Returns whether a field holds a secret. A boolean, such as whether there are tokens, is none."""
    return not isinstance(value, bool) and _SECRET_NAME.search(str(name)) is not None


def _without(secret: "re.Match[str]") -> str:
    return f"{secret[1] or secret[2]}{REMOVED}"


class _Handler(logging.Handler):
    def __init__(self, log: "Log") -> None:
        super().__init__()
        self._log = log
        self._text = logging.Formatter("%(levelname)s %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        if self._log.format == TEXT:
            self._log.write(self._log.redactor.text(self._text.format(record)))
            return
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self._text.formatException(record.exc_info)
        self._log.say("log", record.levelno, record.getMessage(), fields)


def _is_ours(record: logging.LogRecord) -> bool:
    """Returns False for gRPC's log of invalid header fields, with tracebacks: any client could flood the log with
    them."""
    return not (record.name.startswith("grpc") and str(record.msg).startswith("Invalid encoding"))


class Log:
    def __init__(self, role: str, log_format: str, level: int, stream: TextIO | None = None) -> None:
        self.role = role
        self.format = log_format
        self.level = level
        self.redactor = Redactor(os.environ)
        self._stream = stream
        self._lock = threading.Lock()
        self._lost = 0
        self._torn = False
        """True if only the beginning of a line was written."""

    def write(self, line: str) -> None:
        """Writes a line; lines of different threads do not mix. If it fails, as on a full disk, or would block, as on a
        pipe without a reader or a stopped terminal, the line is lost. The next line that can be written follows the
        count of lost lines."""
        stream = self._stream if self._stream is not None else sys.stderr
        with self._lock:
            try:
                if self._lost:
                    line = f"{self._line('lines_lost', logging.WARNING, '', {'count': self._lost})}\n{line}"
                self._put(stream, line + "\n")
                self._lost = 0
            except OSError:
                self._lost += 1

    def _put(self, stream: TextIO, text: str) -> None:
        """Writes the text. Raises OSError if not all could be written: a slow reader must not block the service."""
        text = "\n" + text if self._torn else text
        for at in range(0, len(text), _AT_ONCE):
            self._torn = at > 0
            if not _has_room(stream, 0.0 if self._lost else _PATIENCE_S):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            stream.write(text[at : at + _AT_ONCE])
            stream.flush()
        self._torn = False

    def say(self, event: str, level: int, message: str = "", fields: Mapping[str, Any] | None = None) -> None:
        if level >= self.level:
            self.write(self._line(event, level, message, fields or {}))

    def _line(self, event: str, level: int, message: str, fields: Mapping[str, Any]) -> str:
        """Returns one line, without its end and without secrets."""
        name = logging.getLevelName(level)
        shown = self.redactor.value(fields)
        if self.format == TEXT:
            words = " ".join(f"{field}={value}" for field, value in shown.items())
            return one_line(f"{name} {event} {words}".rstrip())
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="microseconds"),
            "monotonic": round(events.now(), 6),
            "level": name.lower(),
            "role": self.role,
            "pid": os.getpid(),
            "event": event,
        }
        if message:
            line["message"] = self.redactor.text(message)
        if fields:
            line["fields"] = shown
        return json.dumps(line)

    def fatal(self, message: str) -> None:
        if self.format == TEXT:
            self.write(self.redactor.text(f"{self.role}: {message}"))
        else:
            self.say("fatal", logging.ERROR, message)

    def start(self) -> Callable[[], None]:
        """Installs handlers for `logging` and events. Returns a function that removes them."""
        handler = _Handler(self)
        handler.addFilter(_is_ours)
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(self.level)
        end = events.listen(self._log_event)

        def stop() -> None:
            end()
            root.removeHandler(handler)
            root.setLevel(before)

        return stop

    def _log_event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.say(event, level_of(event, fields), fields=fields)

    def uncaught(self, error: BaseException) -> None:
        """Logs an uncaught error as one line; as JSON with its traceback."""
        if self.format == TEXT:
            self.fatal(f"{described(error)}; start it again")
        else:
            caught = logging.Formatter().formatException((type(error), error, error.__traceback__))
            self.say("fatal", logging.ERROR, f"{type(error).__name__}: {error}", {"exception": caught})


def _has_room(stream: TextIO, timeout_s: float) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # no system file
        return True
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        default=TEXT,
        choices=[TEXT, JSON],
        help="form of stderr: lines for people, or one JSON object per line",
    )
    parser.add_argument(
        "--log-level",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="lowest level that is written; default: WARNING as text, INFO as json",
    )


def from_arguments(role: str, options: argparse.Namespace) -> Log:
    level = options.log_level or ("INFO" if options.log_format == JSON else "WARNING")
    return Log(role, options.log_format, logging.getLevelNamesMapping()[level])

"""What a process says: lines for people or JSON for programs; and errors that nothing catches, which end it.

An error that nothing catches ends the process. One that lives on without one of its threads may never answer again,
and nobody starts it anew.
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
import time
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
    """From now on, and in every thread. ``say`` is called first. So does an error that Python cannot raise anywhere, if
    it is for want of memory or where a thread begins: whoever starts that thread would wait for it for ever."""

    def end(kind: type[BaseException], error: BaseException | None) -> None:
        try:
            say(error if error is not None else kind())
        finally:
            os._exit(exit_code)  # not sys.exit: other threads may wait for the one that is gone

    def uncaught(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        end(kind, error)

    def in_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_type is not SystemExit:
            end(caught.exc_type, caught.exc_value)

    def unraisable(caught: "sys.UnraisableHookArgs") -> None:
        error = caught.exc_value
        if "in thread started by" in (caught.err_msg or "") and error is not None:
            error = error.__context__ or error  # what failed first, and not what was cleaned up after it
            end(type(error), error)
        if issubclass(caught.exc_type, MemoryError):
            end(caught.exc_type, error)
        sys.__unraisablehook__(caught)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = unraisable


def described(error: BaseException) -> str:
    """In one line: the error, the thread, and the lines of code, the innermost first."""
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    where = f" ({' < '.join(places)})" if places else ""
    name = type(error).__name__
    return f"{name}: {error} in thread {threading.current_thread().name}{where}"


# What a service says on stderr: lines for people, or one JSON object a line for programs.
#
# Both come from two sources: Python's `logging`, and the events of `swift_ft.events`; what is below ``--log-level`` is
# not written. As JSON each line has ``time`` (UTC, ISO 8601),
# ``monotonic`` (seconds, the clock of the event trace), ``level``, ``role``, ``pid``, ``event``, ``message`` where
# there is one, and the event's own ``fields``.
#
# No secret is written, in either format: values of fields that are named like one, what stands behind the words
# "Bearer", "token=" and the like, and the values of environment variables that are named like one.

TEXT, JSON = "text", "json"
REMOVED = "[removed]"

_SECRET_NAME = re.compile(
    r"token|authorization|secret|passw(or)?d|credential|private[_-]?key|api[_-]?key", re.IGNORECASE
)
_SECRET_WORDS = re.compile(
    r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{4,}|"
    r"\b([\w-]*(?:token|authorization|secret|password|credential|api[_-]?key)[\w-]*['\"]?\s*[=:]\s*['\"]?"
    r"(?:(?:basic|bearer)\s+)?)[^\s'\",;)]+",
    re.IGNORECASE,
)
_AT_ONCE = select.PIPE_BUF // 4
"""Characters: a pipe that has room has room for them."""
_PATIENCE_S = 0.1
"""For whoever reads slowly; once something is lost, none."""
_SECRET_BYTES_MIN = 6
"""A shorter value of an environment variable would be found in innocent words."""

_ERRORS = {"storage_failed", "fatal"}
_WARNINGS = {
    *(
        "disk_full",
        "storage_busy",
        "quarantined",
        "stream_corrupt",
        "torn_tail",
        "not_removed",
        "trim_failed",
    ),
    *(
        "manifest_not_saved",
        "lease_expired",
        "suspect",
        "place_unfit",
        "fenced",
        "refused",
        "log_server_blocked",
    ),
    *("job_set_apart", "audit_failed", "log_server_lost", "not_exact"),
    *("member_exited", "checkpoint_untold", "checkpoint_failed", "checkpoint_unsaved"),
}


def level_of(event: str, fields: Mapping[str, Any] = MappingProxyType({})) -> int:
    if event in _ERRORS:
        return logging.ERROR
    if event == "member_exited" and (fields.get("exit_code") == 0 or fields.get("held") is False):
        return logging.INFO  # (a process that held no rank any more, or never did)
    return logging.WARNING if event in _WARNINGS else logging.INFO


class Redactor:
    """Takes secrets out of what is about to be written. Pure, but for the environment it is made from."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value.strip()
            for name, value in environment.items()
            if _SECRET_NAME.search(name) and len(value.strip()) >= _SECRET_BYTES_MIN
        }
        longest_first = sorted(values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        return _SECRET_WORDS.sub(_without, text)

    def value(self, value: Any) -> Any:
        """The same, through mappings and sequences."""
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
    """Whether there are tokens or not is none."""
    return not isinstance(value, bool) and _SECRET_NAME.search(str(name)) is not None


def _without(secret: "re.Match[str]") -> str:
    return f"{secret[1] or secret[2]}{REMOVED}"


def json_line(
    redactor: Redactor,
    *,
    wall_s: float,
    monotonic_s: float,
    level: int,
    role: str,
    event: str,
    message: str = "",
    fields: Mapping[str, Any],
) -> str:
    """One event as a line of JSON, without its end of line. Secrets are taken out of message and fields."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="microseconds"),
        "monotonic": round(monotonic_s, 6),
        "level": logging.getLevelName(level).lower(),
        "role": role,
        "pid": os.getpid(),
        "event": event,
    }
    if message:
        line["message"] = redactor.text(message)
    if fields:
        line["fields"] = redactor.value(fields)
    return json.dumps(line, ensure_ascii=True)


def text_line(redactor: Redactor, *, level: int, event: str, fields: Mapping[str, Any]) -> str:
    shown = redactor.value(fields)
    words = " ".join(f"{name}={value}" for name, value in shown.items())
    return one_line(f"{logging.getLevelName(level)} {event} {words}".rstrip())


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
    """gRPC says each field of a header that is no text, with a traceback: strangers could write any number of them."""
    return not (record.name.startswith("grpc") and str(record.msg).startswith("Invalid encoding"))


class Log:
    """This process's stderr."""

    def __init__(self, role: str, log_format: str, level: int, stream: TextIO | None = None) -> None:
        self.role = role
        self.format = log_format
        self.level = level
        self.redactor = Redactor(os.environ)
        self._stream = stream
        self._lock = threading.Lock()
        self._lost = 0
        self._torn = False
        """Of a line the beginning only was written."""

    def write(self, line: str) -> None:
        """Lines of different threads do not mix. If it fails, as on a full disk, or would wait, as on a pipe that
        nobody reads or a terminal that was stopped, the line is lost: the next one that can be written stands behind
        how many may be missing."""
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
        """OSError: not all of it. Who does not take what a service says does not keep it from its work."""
        text = "\n" + text if self._torn else text
        for at in range(0, len(text), _AT_ONCE):
            self._torn = at > 0
            if not _has_room(stream, 0.0 if self._lost else _PATIENCE_S):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            stream.write(text[at : at + _AT_ONCE])
            stream.flush()
        self._torn = False

    def say(self, event: str, level: int, message: str = "", fields: Mapping[str, Any] | None = None) -> None:
        """One event or message, if its level is shown."""
        if level >= self.level:
            self.write(self._line(event, level, message, fields or {}))

    def _line(self, event: str, level: int, message: str, fields: Mapping[str, Any]) -> str:
        if self.format == TEXT:
            return text_line(self.redactor, level=level, event=event, fields=fields)
        return json_line(
            self.redactor,
            wall_s=time.time(),
            monotonic_s=events.now(),
            level=level,
            role=self.role,
            event=event,
            message=message,
            fields=fields,
        )

    def fatal(self, message: str) -> None:
        """(the last words) Why this process cannot do it: one line."""
        if self.format == TEXT:
            self.write(self.redactor.text(f"{self.role}: {message}"))
        else:
            self.say("fatal", logging.ERROR, message)

    def start(self) -> Callable[[], None]:
        """Takes over `logging` and events. The result gives them back."""
        handler = _Handler(self)
        handler.addFilter(_is_ours)
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(self.level)
        end = events.listen(self._heard)

        def stop() -> None:
            end()
            root.removeHandler(handler)
            root.setLevel(before)

        return stop

    def _heard(self, event: str, fields: Mapping[str, Any]) -> None:
        self.say(event, level_of(event, fields), fields=fields)

    def uncaught(self, error: BaseException) -> None:
        """(the last words) Of an error that nothing has caught: one line. As JSON it has the traceback as well."""
        if self.format == TEXT:
            self.fatal(f"{described(error)}; start it again")
        else:
            caught = logging.Formatter().formatException((type(error), error, error.__traceback__))
            self.say("fatal", logging.ERROR, f"{type(error).__name__}: {error}", {"exception": caught})


def _has_room(stream: TextIO, timeout_s: float) -> bool:
    """Whether that much can be written without waiting for anybody."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # none of the system's
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

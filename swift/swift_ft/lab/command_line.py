"""Shared by the laboratory's commands: values with units, ranges, directories, the end by a signal."""

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import FrameType

from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.files import make_directory
from swift_ft.text import tell

_SIZES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0}


def size(text: str) -> int:
    """Parses a number of bytes with an optional unit, such as 800GB. Raises ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z]*)", text)
    if match is None or match[2] not in _SIZES:
        units = ", ".join(filter(None, _SIZES))
        raise argparse.ArgumentTypeError(f"{text}: write bytes, such as 800GB; units: {units}")
    return int(Decimal(match[1]) * _SIZES[match[2]])


def duration(text: str) -> float:
    """Parses a time such as 90, 30min, 20h or 264d to seconds. Raises ArgumentTypeError."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        value = float(number) * _SECONDS[text[len(number) :]]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a time, such as 30, 30min, 20h or 264d")
    return value


def check_ranges(*given: tuple[str, int, int, int]) -> None:
    """Checks (flag, value, least, most) of each. Raises UsageError."""
    for flag, value, least, most in given:
        if not least <= value <= most:
            raise UsageError(f"{flag} {value}: give {least} to {most}")


def check_directory(flag: str, directory: Path | None, *, empty: bool) -> None:
    """Creates the directory. Raises UsageError if it cannot be used."""
    if directory is None:
        return
    try:
        make_directory(directory)
        if empty and any(directory.iterdir()):
            raise UsageError(f"{flag} {directory}: not empty; give a new one")
    except OSError as error:
        raise UsageError(f"{flag} {directory}: {error.strerror}") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {directory}: no permission to read and write there")


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Raised by the first signal that asks the command to end. Later ones are ignored while it ends its processes."""


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


def until_stopped(name: str, run: Callable[[], int]) -> int:
    """Returns the exit code of a command, which `run` returns. A signal raises Stopped in it. Errors that it raises are
    printed and turned into exit codes."""
    for number in _SIGNALS:
        # With nohup, SIGHUP stays ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        return run()
    except SwiftError as error:
        first, *rest = str(error).splitlines()
        tell(first)
        print("\n".join(rest), end="\n" if rest else "", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise  # for `end_quietly`
    except OSError as error:
        tell(f"{error.filename or f'the {name}'}: {error.strerror or error}")
        return ServiceError.exit_code
    except Stopped as stopped:
        (number,) = stopped.args
        tell(f"{signal.Signals(number).name}: the {name} was ended, nothing of it is left running")
        return 128 + int(number)


@contextlib.contextmanager
def work_directory(given: Path | None, *, keep: bool, name: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields (directory of the runs, a call that keeps it). Without `given` the directory is temporary and removed at
    the end unless kept. `name`: the command that it belongs to."""
    if given is not None:
        yield given.resolve(), lambda: None
        return
    place = Path(tempfile.mkdtemp(prefix=f"swift-{name}-"))
    kept = [keep]
    try:
        yield place, lambda: kept.append(True)
    finally:
        if any(kept):
            print(f"everything of this {name} is in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)

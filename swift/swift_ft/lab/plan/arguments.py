"""Values and outputs of the command lines of `swift-ft plan`."""

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.files import write_whole

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


def output(text: str) -> Path:
    """Returns the path of a file to write. Raises ArgumentTypeError if its directory does not exist."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent}")
    return path


def add_output(parser: Parser) -> None:
    parser.add_argument("--json", type=output, metavar="PATH", help="write everything as JSON, for programs")


def write(path: Path | None, content: Callable[[], str]) -> None:
    """Writes a regular file atomically; writes directly to anything else (/dev/stdout). Raises UsageError on an
    OSError."""
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            path.write_text(content())
        else:
            write_whole(path, content(), mode=None)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another place") from None

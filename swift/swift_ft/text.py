"""Text from outside: grammars of names, validated JSON and numbers, and safe output of untrusted text.

Text from a server, a rank or a file may contain control characters, to clear or colour the terminal or to fake a line
of swift's. So output goes through this module: `show` on stdout, `tell` on stderr; text for a log goes through
`one_line`.
"""

import io
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from swift_ft.errors import UsageError

_INVISIBLE = (
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_NOT_IN_A_LINE = re.compile(rf"[\x00-\x1f\x7f-\x9f{_INVISIBLE}]")
_NOT_IN_A_TEXT = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")


def one_line(text: object) -> str:
    """Replaces line ends, control characters and changes of writing direction by spaces."""
    return _NOT_IN_A_LINE.sub(" ", str(text))


def text_of(text: str) -> str:
    """Replaces control characters as `one_line` does, but keeps newlines and tabs."""
    return _NOT_IN_A_TEXT.sub(" ", text)


def last_line(output: str, length_max: int = 200) -> str:
    """Returns the last line that is not blank, cut to that many characters; empty if there is none."""
    lines = (line.strip() for line in reversed(output.splitlines()))
    return one_line(next(filter(None, lines), "")[:length_max])


def listed(names: Iterable[object], shown_max: int = 8) -> str:
    """Joins all names, or the first ones and the number of the rest."""
    words = list(map(str, names))
    more = len(words) - shown_max
    return ", ".join(words[:shown_max]) + (f" and {more} more" if more > 0 else "")


def table(rows: Sequence[Sequence[str]], left: int | Collection[int] = 1) -> list[str]:
    """Returns a line for each row, with aligned columns: those of `left` (the first so many, or these) to the left, all
    others to the right."""
    left = range(left) if isinstance(left, int) else left
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size_words(size: float) -> str:
    """Formats bytes: 1234567 -> "1.235 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def time_words(seconds: float) -> str:
    """Formats a duration: 5400.0 -> "90 min"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def show(lines: Iterable[object]) -> None:
    """Prints on stdout, each item as one line."""
    print("\n".join(map(one_line, lines)))


def tell(line: object, who: str = "swift") -> None:
    print(one_line(f"{who}: {line}" if who else line), file=sys.stderr, flush=True)


def tell_if_possible(line: object) -> None:
    """Does as `tell` in a rank, which goes on if stderr is closed or full."""
    with suppress(OSError, ValueError):
        tell(line)


class _Unread(io.FileIO):
    """A stream that takes what nobody reads any more as written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """(a launcher and its ranks) Lets `print` go on once the reader of stdout or stderr has gone, such as a pager: the
    error would end the run. Processes that are forked from this one have these streams, too."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if type(old) is not io.TextIOWrapper or type(getattr(old.buffer, "raw", None)) is _Unread:
            continue
        old.flush()
        raw = _Unread(old.fileno(), "w", closefd=False)
        raw.name = old.name
        unbuffered = isinstance(old.buffer, io.RawIOBase)  # python -u
        new = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        new.mode = old.mode  # type: ignore[misc]  # as Python's own streams have it
        setattr(sys, name, new)


# Grammars of names. A name cannot escape from where it is inserted: a directory, a label, a line of a log.

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,63}")
"""Grammar of job and stream names: no slash, no NUL, no leading dot. Each is the name of a directory."""

WORLD_SIZE_MAX = 1 << 16
"""Maximum number of ranks of one job."""

_VERSION = re.compile(r"v([0-9]{8}|[1-9][0-9]{8,17})")
_RANK = re.compile(r"rank(0|[1-9][0-9]{0,8})")
_SHARD = re.compile(r"\.?g(0|[1-9][0-9]{0,17})-[0-9a-f]{8}-[1-9][0-9]{0,17}")

LASTING_KEYS = "swift/"
"""Prefix of shared keys that concern the whole job, not one generation of it."""

ADAPTIVE_SETTINGS = (
    "exact_gradients",
    "split_backward",
    "adaptive_memory",
    "staggered",
)
"""Settings of strategy "adaptive"."""

LAUNCHER_SETTINGS = {
    setting: f"SWIFT_{setting.upper()}"
    for setting in (
        "strategy",
        "lost_shard",
        "snapshot_every",
        "rehearse",
        "require_exact",
        *ADAPTIVE_SETTINGS,
    )
}
"""Session settings with a flag of `swift-ft run` (`flag_of`) -> environment variable that passes them to the ranks."""
ENV_ALLOW_INEXACT = "SWIFT_ALLOW_INEXACT"
ENV_SPARES = "SWIFT_SPARES"
"""Number of spares that a rank's launcher keeps."""


def flag_of(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def version_folder(version: int) -> str:
    return f"v{version:08d}"


def version_of(folder: str) -> int | None:
    return int(match[1]) if (match := _VERSION.fullmatch(folder)) else None


def rank_of(folder: str) -> int | None:
    return int(match[1]) if (match := _RANK.fullmatch(folder)) else None


def generation_of(shard: str) -> int | None:
    """Returns the generation in which a rank saved this shard, by its name; None for other names."""
    return int(match[1]) if (match := _SHARD.fullmatch(shard)) else None


def check_name(kind: str, name: str) -> str:
    """Returns the name if the grammar allows it. Raises UsageError."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{kind} name {name[:80]!r} is not allowed: 1 to 64 letters, digits, '.', '_', '~' or '-', "
            "the first a letter or a digit"
        )
    return name


def job_called(text: str) -> str:
    """Returns the name of the job that a person calls so: ``/`` is written ``~``, which nobody
    uses otherwise, because the name is that of a directory. Raises UsageError."""
    name = text.replace("/", "~")
    check_name("job", name if NAME_PATTERN.fullmatch(name) else text)
    return name


# Validation of untrusted JSON and numbers. Pure.

DEPTH_MAX = 100
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")


def whole_number(text: str) -> int | None:
    """Parses ASCII digits without leading zeros. Returns a number below 10**18, or None if the text is none."""
    return int(text) if _WHOLE.fullmatch(text) else None


def port_number(text: str) -> int | None:
    port = whole_number(text)
    return port if port is not None and port < 1 << 16 else None


_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"}
"""URI schemes of gRPC: it takes "unix:7301" for a socket's path."""


def split_address(text: str) -> tuple[str, int] | None:
    """Parses HOST:PORT. Returns None for other text, such as a URL."""
    host, _, digits = text.rpartition(":")
    port = port_number(digits)
    return None if port is None or not _HOST.fullmatch(host) or host.lower() in _SCHEMES else (host, port)


SCHEMES = ("s3", "gs", "az")


def scheme_of(text: str) -> str | None:
    """Returns the scheme of an object store's URL; None for anything else, such as a path."""
    scheme, separator, _ = text.partition("://")
    return scheme if separator and scheme in SCHEMES else None


def parse_json(content: str | bytes, where: str = "") -> Any:
    """Parses JSON. It must not be nested deeper than `DEPTH_MAX` or have duplicate keys, and all numbers and characters
    must be encodable again. Raises UsageError in one line, which begins with `where`."""
    try:
        return _parse(content)
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _parse(content: str | bytes) -> Any:
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_constant, parse_float=_float)
        if "\\u" in text:  # only an escape can encode a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise UsageError("has half of a character (\\ud800 to \\udfff); write it in UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except DuplicateKey as error:
        raise UsageError(str(error)) from None
    except ValueError:  # more digits than Python accepts
        raise UsageError("a number has too many digits") from None
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [item for part in level for item in _items(part)]
        if not level:
            return value
    raise UsageError("nested too deeply")


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


class DuplicateKey(ValueError):
    """JSON in which an object has a key twice: other parsers may take the other one."""


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object (an `object_pairs_hook`). Raises DuplicateKey."""
    value_of: dict[str, Any] = {}
    for name, value in pairs:
        if name in value_of:
            raise DuplicateKey(f"{json.dumps(name)[1:-1][:60]}: comes twice")
        value_of[name] = value
    return value_of


def _constant(name: str) -> None:
    raise UsageError(f"{name} is no number; give a finite one")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UsageError(f"{text[:40]} is too large a number")
    return value

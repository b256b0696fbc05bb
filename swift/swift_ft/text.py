"""Text from outside: names by their grammars, JSON and numbers that are checked, and words as they are shown.

Words of others (a server's, a rank's, a file's), as they are shown to people.

Whoever says them may mean the terminal by it: to clear it, to colour it, to write a line that looks like ours. So what
is printed goes through here: `show` on stdout, `tell` on stderr; what goes into a log, `one_line`.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from swift_ft.errors import UsageError

_INVISIBLE = (
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_NOT_IN_A_LINE = re.compile(rf"[\x00-\x1f\x7f-\x9f{_INVISIBLE}]")
_NOT_IN_A_TEXT = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")


def one_line(text: object) -> str:
    """Ends no line, moves no cursor, turns no direction of writing: what would is a space."""
    return _NOT_IN_A_LINE.sub(" ", str(text))


def text_of(text: str) -> str:
    """The same of what may have several lines: they and tabs stay."""
    return _NOT_IN_A_TEXT.sub(" ", text)


def listed(names: Iterable[str], shown_max: int = 8) -> str:
    """All of them, or the first ones and how many there are besides."""
    names = list(names)
    more = len(names) - shown_max
    return ", ".join(names[:shown_max]) + (f" and {more} more" if more > 0 else "")


def show(lines: Iterable[object]) -> None:
    """On stdout, each as one line."""
    print("\n".join(map(one_line, lines)))


def tell(line: object, who: str = "swift") -> None:
    """On stderr, as one line."""
    print(one_line(f"{who}: {line}" if who else line), file=sys.stderr, flush=True)


# Grammars of names. What a name may become a part of (a directory, a label, a line of a log) it cannot leave.

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Grammar of job and stream names in the log: no slash, no NUL, no leading dot."""

JOB_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Grammar of job names at the coordinator: those of the log in lower case."""

WORLD_SIZE_MAX = 1 << 16
"""Ranks of one job."""

_VERSION = re.compile(r"v([0-9]{8}|[1-9][0-9]{8,17})")
_RANK = re.compile(r"rank(0|[1-9][0-9]{0,8})")
_SHARD = re.compile(r"\.?g(0|[1-9][0-9]{0,17})-[0-9a-f]{8}-[1-9][0-9]{0,17}")

LASTING_KEYS = "swift/"
"""How keys that the ranks of a job share begin, if they are about the job and not about one generation of it."""

ADAPTIVE_SETTINGS = (
    "exact_gradients",
    "split_backward",
    "adaptive_memory",
    "staggered",
)
"""Those of strategy "adaptive"."""

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
"""Settings of a session that `swift-ft run` has flags for (`flag_of`) -> the variable by which ranks are told."""
ENV_ALLOW_INEXACT = "SWIFT_ALLOW_INEXACT"
ENV_SPARES = "SWIFT_SPARES"
"""How many a rank's launcher keeps."""

JOB_GRAMMAR = "1 to 64 of a-z 0-9 . _ -, the first a letter or a digit"


def flag_of(setting: str) -> str:
    """Of `LAUNCHER_SETTINGS`."""
    return f"--{setting.replace('_', '-')}"


def version_folder(version: int) -> str:
    """Of a checkpoint directory: what it has of one version."""
    return f"v{version:08d}"


def version_of(folder: str) -> int | None:
    """Whose folder it is, by its name; None: none of ours has this name."""
    return int(match[1]) if (match := _VERSION.fullmatch(folder)) else None


def rank_of(folder: str) -> int | None:
    """The same of a rank's folder in that of a version."""
    return int(match[1]) if (match := _RANK.fullmatch(folder)) else None


def generation_of(shard: str) -> int | None:
    """The same of what a rank has saved there: the generation in which it was."""
    return int(match[1]) if (match := _SHARD.fullmatch(shard)) else None


def check_name(kind: str, name: str) -> str:
    """The name, if the grammar allows it. Raises UsageError."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{kind} name {name[:80]!r} is not allowed: 1 to 64 letters, digits, '.', '_' or '-', "
            "the first a letter or a digit"
        )
    return name


def check_job(name: str) -> str:
    """The name of a job, if the coordinator's grammar allows it. Raises UsageError."""
    if not JOB_PATTERN.fullmatch(name):
        raise UsageError(f"job name {name[:80]!r} is not allowed: {JOB_GRAMMAR}")
    return name


# JSON and numbers of unknown origin: what a user names, what a stranger may have written. Pure.

DEPTH_MAX = 100
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")


def whole_number(text: str) -> int | None:
    """The number below 10**18 that is written so: ASCII digits, no leading zeros. None: it is none."""
    return int(text) if _WHOLE.fullmatch(text) else None


def port_number(text: str) -> int | None:
    """The same of a port."""
    port = whole_number(text)
    return port if port is not None and port < 1 << 16 else None


def parse_json(content: str | bytes, where: str = "") -> Any:
    """What the document says. It is not nested deeper than `DEPTH_MAX`, says nothing twice, and has only numbers and
    characters that can be written again. UsageError, which begins with `where`, says in one line what is wrong."""
    try:
        return _parse(content)
    except UsageError as error:
        raise UsageError(f"{where}: {error}" if where else str(error)) from None


def _parse(content: str | bytes) -> Any:
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_constant, parse_float=_float)
        if "\\u" in text:  # half of a character can be written only so
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise UsageError("has half of a character (\\ud800 to \\udfff); write it in UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except ValueError:  # more digits than Python reads
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


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value_of: dict[str, Any] = {}
    for name, value in pairs:
        if name in value_of:
            raise UsageError(f"{json.dumps(name)[1:-1][:60]}: comes twice")
        value_of[name] = value
    return value_of


def _constant(name: str) -> None:
    raise UsageError(f"{name} is no number; give a finite one")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UsageError(f"{text[:40]} is too large a number")
    return value

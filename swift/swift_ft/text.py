"""Text from outside: names by their grammars, and words of others as they are shown to people.

Words of others (a server's, a rank's, a file's), as they are shown to people.

Whoever says them may mean the terminal by it: to clear it, to colour it, to write a line that looks like ours. So what
is printed goes through here: `show` on stdout, `tell` on stderr; what goes into a log, `one_line`.
"""

import re
import sys
from collections.abc import Iterable

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

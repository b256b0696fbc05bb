"""Grammars of names. What a name may become a part of (a directory, a label, a line of a log) it cannot leave."""

import re

from swift.errors import UsageError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Grammar of job and stream names in the log: no slash, no NUL, no leading dot."""

JOB_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Grammar of job names at the coordinator: those of the log in lower case."""

LASTING_KEYS = "swift/"
"""How keys that the ranks of a job share begin, if they are about the job and not about one generation of it."""

ADAPTIVE_SETTINGS = (
    "exact_gradients",
    "split_backward",
    "adaptive_memory",
    "staggered",
    "move_losses",
    "fetch_batches",
)
"""Those of strategy "adaptive"."""

LAUNCHER_SETTINGS = {
    setting: f"SWIFT_{setting.upper()}"
    for setting in (
        "strategy",
        "lost_shard",
        "snapshot_every",
        *ADAPTIVE_SETTINGS,
    )
}
"""Settings of a session that `swift-ft run` has flags for (`flag_of`) -> the variable by which ranks are told."""
ENV_ALLOW_INEXACT = "SWIFT_ALLOW_INEXACT"

JOB_GRAMMAR = "1 to 64 of a-z 0-9 . _ -, the first a letter or a digit"


def flag_of(setting: str) -> str:
    """Of `LAUNCHER_SETTINGS`."""
    return f"--{setting.replace('_', '-')}"


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

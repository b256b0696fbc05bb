"""The strategies of a study: how the launcher is told of each, and whether its bits must be those without a failure."""

from dataclasses import dataclass

PLAIN = "none"
"""The run without any recovery: torchrun, and no failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    flags: tuple[str, ...]
    exact: bool
    spares: int = 1
    repaired: bool = False
    """The others go on without the lost rank, whose place can be used again after the study's ``repair_s``."""


_DROP = ("--lost-shard", "drop", "--allow-inexact")
STRATEGIES = {
    "auto": Strategy(flags=("--strategy", "auto"), exact=True),
    "checkpoint": Strategy(flags=("--strategy", "checkpoint"), exact=True),
    "snapshot": Strategy(flags=("--strategy", "snapshot", "--snapshot-every", "10"), exact=True),
    "reinit": Strategy(flags=("--strategy", "reinit"), exact=True),
    "replay": Strategy(flags=("--strategy", "replay"), exact=True),
    "shrink": Strategy(flags=("--strategy", "shrink"), exact=True, spares=0, repaired=True),
    "rollback": Strategy(flags=("--strategy", "rollback"), exact=True, spares=0, repaired=True),
    "shrink-drop": Strategy(flags=("--strategy", "shrink", *_DROP), exact=False, spares=0, repaired=True),
    "rollback-drop": Strategy(flags=("--strategy", "rollback", *_DROP), exact=False, spares=0, repaired=True),
    "lossy-forward": Strategy(
        flags=("--strategy", "lossy-forward", "--allow-inexact"), exact=False, spares=0, repaired=True
    ),
}
DEFAULT = ("auto", "checkpoint", "snapshot", "shrink", "shrink-drop", "lossy-forward")
QUICK = ("auto", "shrink-drop")

"""What the launcher does about an exit. Pure: no processes, no clock, no torch."""

import enum
import signal
from dataclasses import dataclass


class Action(enum.Enum):
    """What follows from a rank's exit."""

    DONE = "done"
    REPLACE = "replace"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The action, and with STOP the launcher's exit code and the reason that the coordinator is told."""

    action: Action
    exit_code: int = 0
    reason: str = ""


def describe_exit(exit_code: int) -> str:
    """ "killed by SIGKILL", or "exit code 3"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def judge_exit(rank: int, exit_code: int, *, replacements_left: int, has_run: bool) -> Verdict:
    """What to do about a rank that ended.

    1 (the script's own exception) and 2 (usage) would happen again in a replacement. 3 is an error that
    swift named (a service is away, a disk is full): worth another process, but not before the job has ever
    run, since then it is the setup that is wrong.
    """
    if exit_code == 0:
        return Verdict(action=Action.DONE)
    how = describe_exit(exit_code)
    if exit_code in (1, 2) or (exit_code == 3 and not has_run):
        return Verdict(action=Action.STOP, exit_code=exit_code, reason=f"rank {rank} ended: {how}")
    if replacements_left <= 0:
        reason = f"rank {rank} ended ({how}) and all replacements of --max-restarts are used up"
        return Verdict(action=Action.STOP, exit_code=1, reason=reason)
    return Verdict(action=Action.REPLACE, reason=f"rank {rank} ended: {how}")

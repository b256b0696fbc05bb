"""Decisions of the launcher about exits. Pure: no processes, no clock, no torch."""

import enum
import signal
from dataclasses import dataclass

ATTEMPTS_MAX = 5
"""Processes of one rank that may die in a row without the job having run in between."""
RETURNS_MAX = 3
"""Processes of one rank that may die after the job has finished. The last of them is not replaced."""
DELAY_FIRST_S = 0.5
DELAY_LAST_S = 30.0
CHECKS_MAX = 6
"""Health checks of one place, or starts of a process there, that may fail in a row before it is given up."""
CHECK_DELAY_FIRST_S = 1.0


class Action(enum.Enum):
    DONE = "done"
    REPLACE = "replace"
    LOST = "lost"
    """The job is finished, so a replacement is useless; the launcher's exit code shows the loss."""
    VACANT = "vacant"
    """The others go on without the rank."""
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    replacements_left: int
    attempts: int
    """Processes of this rank that died since the job last ran, this one included."""
    has_run: bool
    """The job has left FORMING once."""
    finished: bool
    """The job's state is FINISHED."""
    can_return: bool = False
    """The last version is also in a checkpoint: another process may repeat the work after the end."""
    may_shrink: bool = False
    """The others go on without it (a strategy that shrinks), or decide what follows (a `swift_ft.Communicator`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The action; with a reason, except for DONE; with LOST and STOP also the launcher's exit code."""

    action: Action
    reason: str = ""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    exit_code: int
    line: str = ""


def outcome_of(exit_codes: set[int], line: str, exit_code: int = 0) -> Outcome:
    """Returns the launcher's outcome. `exit_codes`: those of the ranks. `exit_code`: the job's own, if it has one."""
    if exit_code:
        return Outcome(exit_code=exit_code, line=line)
    if 2 in exit_codes:  # the usage error is already printed
        return Outcome(exit_code=2)
    return Outcome(exit_code=3 if exit_codes == {3} else 1, line=line)


def describe_exit(exit_code: int, why: str = "") -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        ended = f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        ended = f"killed by signal {-exit_code}"
    return f"{ended} ({why})" if why else ended


def judge_exit(rank: int, exit_code: int, situation: Situation, why: str = "") -> Verdict:
    """Returns the response to the exit of a rank. `why`: what is known of a signal's cause.

    Exit codes 1 (the script's own exception) and 2 (usage) would recur in a replacement. 3 is a named error of swift (a
    service is unreachable, a disk is full): worth another process, but not before the job has ever run, since then the
    setup is wrong.
    """
    if exit_code == 0:
        return Verdict(action=Action.DONE)
    ended = f"rank {rank}: {describe_exit(exit_code, why)}"
    if situation.finished and exit_code != 2:
        # The others may have files to save as well, so they are not stopped.
        again = situation.can_return and exit_code != 1 and situation.attempts < RETURNS_MAX
        if again and situation.replacements_left > 0:
            return Verdict(action=Action.REPLACE, reason=f"{ended}, after the job had finished")
        return Verdict(action=Action.LOST, exit_code=1, reason=f"{ended}, after the job had finished")
    if exit_code in (1, 2) or (exit_code == 3 and not situation.has_run):
        return Verdict(action=Action.STOP, exit_code=exit_code, reason=ended)
    if situation.attempts >= ATTEMPTS_MAX:
        reason = f"{ended}, the {ATTEMPTS_MAX}th time in a row before the job ran again"
        return Verdict(action=Action.STOP, exit_code=3 if exit_code == 3 else 1, reason=reason)
    if situation.replacements_left <= 0 and situation.may_shrink:
        return Verdict(action=Action.VACANT, reason=f"{ended}, and not replaced: --max-restarts is used up")
    if situation.replacements_left <= 0:
        return Verdict(action=Action.STOP, exit_code=1, reason=f"{ended}, and --max-restarts is used up")
    return Verdict(action=Action.REPLACE, reason=ended)


def delay_s(deaths: int) -> float:
    """Returns how long a rank waits for its next process. `deaths`: of its processes since all ranks reached a new
    version, this one included; the first two are replaced at once."""
    return 0.0 if deaths <= 2 else min(DELAY_LAST_S, DELAY_FIRST_S * 2.0 ** min(deaths - 3, 16))


def judge_place(said: str, failed: int, situation: Situation) -> Verdict:
    """Returns the response to a place that cannot be used: it has failed its health check, or no process can be started
    there. `failed`: how often that was so since its last process ended, this time included. REPLACE: it is tried again
    after `check_delay_s`."""
    if failed < CHECKS_MAX:
        return Verdict(action=Action.REPLACE, reason=f"{said}: tried again in {check_delay_s(failed):g} s")
    said = f"{said}, {CHECKS_MAX} times in a row"
    if situation.finished:
        return Verdict(action=Action.LOST, exit_code=1, reason=f"{said}, after the job had finished")
    if situation.may_shrink:
        return Verdict(action=Action.VACANT, reason=f"{said}: it stays vacant")
    return Verdict(action=Action.STOP, exit_code=3, reason=said)


def check_delay_s(failed: int) -> float:
    return min(DELAY_LAST_S, CHECK_DELAY_FIRST_S * 2.0 ** min(failed - 1, 16))

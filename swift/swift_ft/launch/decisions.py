"""What the launcher does about an exit. Pure: no processes, no clock, no torch."""

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
    """What follows from a rank's exit."""

    DONE = "done"
    REPLACE = "replace"
    LOST = "lost"
    """The job is finished, so there is nothing to replace it for; the launcher's exit code shows it."""
    VACANT = "vacant"
    """The others go on without it."""
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What the launcher knows when a rank ends."""

    replacements_left: int
    attempts: int
    """Processes of this rank that died since the job last ran, this one included."""
    has_run: bool
    """The job has left FORMING once."""
    finished: bool
    """The coordinator says FINISHED."""
    can_return: bool = False
    """And the last version is in a checkpoint: another process may do again what comes after the end."""
    may_shrink: bool = False
    """The others go on without it (a strategy that shrinks), or decide what follows (a `swift_ft.Communicator`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The action; unless the rank is done, the reason; with LOST and STOP the launcher's exit code."""

    action: Action
    reason: str = ""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the launcher ends."""

    exit_code: int
    line: str = ""


def outcome_of(exit_codes: set[int], line: str, exit_code: int = 0) -> Outcome:
    """`exit_codes`: those of the ranks. `exit_code`: the job's, if it has one of its own."""
    if exit_code:
        return Outcome(exit_code=exit_code, line=line)
    if 2 in exit_codes:  # a usage error has said all there is to say
        return Outcome(exit_code=2)
    return Outcome(exit_code=3 if exit_codes == {3} else 1, line=line)


def describe_exit(exit_code: int) -> str:
    """ "killed by SIGKILL", or "exit code 3"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def judge_exit(rank: int, exit_code: int, situation: Situation) -> Verdict:
    """What to do about a rank that ended.

    1 (the script's own exception) and 2 (usage) would happen again in a replacement. 3 is an error that
    swift named (a service is away, a disk is full): worth another process, but not before the job has ever
    run, since then it is the setup that is wrong.
    """
    if exit_code == 0:
        return Verdict(action=Action.DONE)
    ended = f"rank {rank}: {describe_exit(exit_code)}"
    if situation.finished and exit_code != 2:
        # The others may have files to save as well: they are left alone.
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
    """How long a rank waits for its next process. `deaths`: of its processes since all ranks came to a new version,
    this one included; the first two are replaced at once."""
    return 0.0 if deaths <= 2 else min(DELAY_LAST_S, DELAY_FIRST_S * 2.0 ** min(deaths - 3, 16))


def judge_check(rank: int, why: str, failed: int, situation: Situation) -> Verdict:
    """What to do about a place that has failed its health check, so that no process may get it. `failed`: checks since
    its last process has ended, this one included. REPLACE: it is checked again after `check_delay_s`."""
    return _judge_place(
        f"rank {rank}: its place has failed the health check ({why})", "checked", failed, situation
    )


def judge_start(rank: int, why: str, failed: int, situation: Situation) -> Verdict:
    """The same of a place for which no process could be started."""
    return _judge_place(f"rank {rank}: {why}", "tried", failed, situation)


def _judge_place(said: str, done: str, failed: int, situation: Situation) -> Verdict:
    if failed < CHECKS_MAX:
        return Verdict(action=Action.REPLACE, reason=f"{said}: {done} again in {check_delay_s(failed):g} s")
    said = f"{said}, {CHECKS_MAX} times in a row"
    if situation.finished:
        return Verdict(action=Action.LOST, exit_code=1, reason=f"{said}, after the job had finished")
    if situation.may_shrink:
        return Verdict(action=Action.VACANT, reason=f"{said}: it stays vacant")
    return Verdict(action=Action.STOP, exit_code=3, reason=said)


def check_delay_s(failed: int) -> float:
    """How long a place waits for its next health check, or the next start of a process."""
    return min(DELAY_LAST_S, CHECK_DELAY_FIRST_S * 2.0 ** min(failed - 1, 16))

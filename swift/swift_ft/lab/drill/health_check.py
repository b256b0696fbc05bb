"""Drill of the health check before rejoin: the place of a lost rank is unfit at first (`--unfit rank=R,times=N`).

The launcher runs the health check of this module (`swift-ft run --health-check`), which fails the given number of times
for that place. The report uses the launcher's trace.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import ENV_FAULTS_DIR, RankFault
from swift_ft.files import private
from swift_ft.lab.drill import shrinking
from swift_ft.lab.drill.verdict_checks import Check
from swift_ft.launch.decisions import CHECKS_MAX

if TYPE_CHECKING:
    from swift_ft.lab.drill.config import DrillConfig
    from swift_ft.lab.drill.facts import Facts


ENV_UNFIT = "SWIFT_DRILL_UNFIT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """The place of `rank` fails its first `times` health checks after a loss."""

    rank: int
    times: int

    @classmethod
    def parse(cls, spec: str) -> "Unfit":
        """Parses the value of `--unfit`. Raises UsageError."""
        match = re.fullmatch(r"rank=([0-9]{1,6})(?:,times=([0-9]{1,3}))?", spec.strip().lower())
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= CHECKS_MAX:
            raise UsageError(f"--unfit {spec!r}: write rank=R or rank=R,times=1 (to {CHECKS_MAX})")
        return cls(rank=int(match[1]), times=times)

    @property
    def given_up(self) -> bool:
        """Returns whether the launcher gives the place up."""
        return self.times >= CHECKS_MAX


def asked(config: "DrillConfig") -> Unfit | None:
    return Unfit.parse(config.unfit) if config.unfit else None


def check(config: "DrillConfig") -> None:
    """Raises UsageError for configurations in which the health check would show no effect."""
    unfit = asked(config)
    if unfit is None:
        return
    if not any(isinstance(fault, RankFault) and fault.rank == unfit.rank for fault in config.faults):
        raise UsageError(
            f"--unfit {config.unfit}: rank {unfit.rank} is not killed: add --kill rank={unfit.rank}"
        )
    if shrinking.moves(config):
        raise UsageError(
            f"--unfit {config.unfit}: the lost stage moves beside another rank: give --replicas 2 or more"
        )
    if unfit.given_up and not config.shrinks:
        raise UsageError(
            f"--unfit {config.unfit}: the place is given up then, and the job ends: give --strategy shrink, or times="
            f"{CHECKS_MAX - 1} at most"
        )
    if config.shrinks and unfit.given_up == bool(config.grow):
        raise UsageError(
            f"--unfit {config.unfit} with --strategy {config.strategy}: "
            + (
                "nobody comes back: leave --grow out"
                if config.grow
                else "no process is tried: add --grow step=N"
            )
        )


def launcher_flags(config: "DrillConfig") -> list[str]:
    return ["--health-check", shlex.join([sys.executable, "-m", __name__])] if config.unfit else []


def environment(config: "DrillConfig") -> dict[str, str]:
    return {ENV_UNFIT: config.unfit} if config.unfit else {}


def fit() -> bool:
    """(in the health check's process) Returns whether the place is fit. On one machine a rank is a local rank."""
    unfit = Unfit.parse(os.environ[ENV_UNFIT])
    if os.environ["SWIFT_HEALTH_CHECK"] == "start" or int(os.environ["LOCAL_RANK"]) != unfit.rank:
        return True
    failures = Path(os.environ[ENV_FAULTS_DIR], "unfit")
    before = failures.stat().st_size if failures.exists() else 0
    if before >= unfit.times:
        return True
    with open(failures, "a", opener=private) as file:
        file.write("x")
    print(f"failure {before + 1} of {unfit.times}, as the drill wants it")
    return False


# --- the report ---


def checks(facts: "Facts") -> list[Check]:
    """Checks that the place failed as often as requested, and got no process before it passed."""
    unfit = asked(facts.asked)
    if unfit is None:
        return []
    failed = [event for event in _checked(facts, unfit.rank) if not event["fit"]]
    return [
        Check(
            "the place was not fit as often as it was to be",
            # A place that is to be given up may have failed fewer checks when the job ends.
            len(failed) == unfit.times or (unfit.given_up and bool(failed)),
            f"{len(failed)} health checks failed",
        ),
        Check("no place was used before it was fit", *_used_unfit(facts, unfit)),
    ]


def _checked(facts: "Facts", rank: int) -> list[dict[str, Any]]:
    """Returns the health checks of that rank's place after its loss. On one machine its local rank is its rank."""
    begun = [event for event in facts.events if event["event"] == "place_check_begin"]
    start = sum(event["local_rank"] == rank and event["because"] == "start" for event in begun)
    ended = [
        event for event in facts.events if event["event"] == "place_checked" and event["local_rank"] == rank
    ]
    return ended[start:]


def _used_unfit(facts: "Facts", unfit: Unfit) -> tuple[bool | None, str]:
    given = _given(facts, unfit.rank)
    checked = _checked(facts, unfit.rank)
    if not given:
        return (unfit.given_up, "" if unfit.given_up else "it got no process")
    for process in given:
        before = [event for event in checked if event["t"] <= process["t"]]
        if not before or not before[-1]["fit"]:
            return False, f"process {process['pid']} got the place of rank {unfit.rank} unchecked, or unfit"
    return True, ""


def _given(facts: "Facts", rank: int) -> list[dict[str, Any]]:
    """Returns the "spare_assigned" events of that rank after its first process."""
    return [e for e in facts.events if e["event"] == "spare_assigned" and e["rank"] == rank][1:]


def section(facts: "Facts") -> dict[str, Any] | None:
    """Returns `gate` of the report; None: no health check was asked for."""
    unfit = asked(facts.asked)
    if unfit is None:
        return None
    shown: Sequence[str] = ("fit", "reason", "check_s")
    return {
        "rank": unfit.rank,
        "checks": [{name: event[name] for name in shown} for event in _checked(facts, unfit.rank)],
        "used": bool(_given(facts, unfit.rank)),
    }


if __name__ == "__main__":
    sys.exit(int(not fit()))

"""Drill in which a lost rank's replacement process has been warmed up (`--warm-up`).

A victim waits, where it is to die, until a spare has run the script as its rank. The saving is the time of the first
run of the script and of one forward and backward, minus the time of the second run, in the same process and
concurrently with the same training ranks. The report also has the times when the process was needed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import RECOVERY_PHASES, Fault, RankFault
from swift_ft.lab.drill import shrinking
from swift_ft.lab.drill.verdict_checks import Check

if TYPE_CHECKING:
    from swift_ft.lab.drill.config import DrillConfig
    from swift_ft.lab.drill.facts import Facts


HOLD_S = 25.0
"""Seconds that a victim waits for the warm-up of its spare."""


def check(config: "DrillConfig") -> None:
    """Raises UsageError for configurations that cannot show a warm-up."""
    if not config.warm_up:
        return
    if not shrinking.is_replaced(config) or config.shrinks:
        raise UsageError(f"--warm-up with --strategy {config.strategy}: no spare takes the lost rank's place")
    if any(isinstance(fault, RankFault) and fault.phase in RECOVERY_PHASES for fault in config.faults):
        raise UsageError(
            "--warm-up with a loss in a recovery: nobody has warmed a spare up by then; leave one out"
        )


def launcher_flags(config: "DrillConfig") -> list[str]:
    return ["--warm-up"] if config.warm_up else []


def count(event: dict[str, Any], there: Counter[int]) -> None:
    """(for each event of the run) Updates `there`: rank -> number of spares that are warmed up as it."""
    if event["event"] == "warmed_up" and not event["why_not"]:
        there[int(event["rank"])] += 1
    if event["event"] == "spare_assigned" and event["warmed_up"]:
        there[int(event["rank"])] -= 1


def are_there(victims: Sequence[Fault], there: Counter[int]) -> bool:
    return all(there[fault.rank] > 0 for fault in victims if isinstance(fault, RankFault))


# --- the report ---


def checks(facts: "Facts") -> list[Check]:
    """Checks that every replacement had been warmed up."""
    if not facts.asked.warm_up:
        return []
    name = "every replacement had been warmed up"
    replaced = _replaced(facts)
    if not replaced:
        return [Check(name, None, "no rank was replaced")]
    cold = [
        f"rank {one['rank']}: process {one['pid']}: {_why_cold(facts)}"
        for one in replaced
        if one["first"] is None
    ]
    return [Check(name, not cold, "; ".join(cold))]


def section(facts: "Facts") -> dict[str, Any] | None:
    """Returns `warm_up` of the report; None without `--warm-up`."""
    if not facts.asked.warm_up:
        return None
    replaced = _replaced(facts)
    saved = [one["saved_seconds"] for one in replaced if one["saved_seconds"] is not None]
    return {"replacements": replaced, "saved_seconds": sum(saved) if saved else None}


def _replaced(facts: "Facts") -> list[dict[str, Any]]:
    """Returns for each replacement process the times of its warm-up's first and second run (None: it had none), the
    difference, and the times when it was needed."""
    given: set[int] = set()
    shown = []
    for event in facts.events:
        if event["event"] != "spare_assigned":
            continue
        rank, pid = int(event["rank"]), event["pid"]
        if rank in given:
            warmed = _warmed(facts, pid)
            first = None if warmed is None else _seconds(warmed, "")
            again = None if warmed is None else _seconds(warmed, "again_")
            shown.append(
                {
                    "rank": rank,
                    "pid": pid,
                    "first": first,
                    "again": again,
                    "saved_seconds": None
                    if first is None or again is None
                    else sum(first.values()) - sum(again.values()),
                    "needed": _needed(facts, pid),
                }
            )
        given.add(rank)
    return shown


def _warmed(facts: "Facts", pid: int) -> dict[str, Any] | None:
    warmed = [e for e in facts.events if e["event"] == "warmed_up" and e["pid"] == pid and not e["why_not"]]
    return warmed[-1] if warmed else None


def _seconds(warmed: dict[str, Any], which: str) -> dict[str, float]:
    return {name: warmed[which + name] for name in ("script_seconds", "step_seconds")}


def _needed(facts: "Facts", pid: int) -> dict[str, Any] | None:
    """Returns the times when the process was needed. `step_seconds`: of the first step that it replayed, with its
    update; None: it replayed none."""
    own = [event for event in facts.events if event["pid"] == pid]
    begun = next((event for event in own if event["event"] == "run_begin"), None)
    if begun is None:
        return None
    steps = [event for event in own if event["event"] in ("step_begin", "step_end")][:2]
    replayed = len(steps) == 2 and all(event["replay"] for event in steps)
    return {
        "script_seconds": begun["script_seconds"],
        "step_seconds": steps[1]["t"] - steps[0]["t"] if replayed else None,
    }


def _why_cold(facts: "Facts") -> str:
    why = [event["why_not"] for event in facts.events if event["event"] == "warmed_up" and event["why_not"]]
    return why[-1] if why else "its spare was not warm in time"

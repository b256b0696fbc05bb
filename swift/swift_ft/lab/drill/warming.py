"""A drill in which the process that takes a lost rank's place has been warmed up (`--warm-up`).

A victim waits, where it is to die, until there is a spare that has run the script as its rank. What the warm-up saves
is what the script and one forward and backward took the first time, less what they took the second time: in the same
process, and beside the same training ranks. The report also has what they took when the process was needed.
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
"""So long a victim waits for the warm-up of its spare."""


def check(config: "DrillConfig") -> None:
    """Refuses what cannot be shown. Raises UsageError."""
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
    """(while the run is watched) `there`: spares that are warmed up, by rank."""
    if event["event"] == "warmed_up" and not event["why_not"]:
        there[int(event["rank"])] += 1
    if event["event"] == "spare_assigned" and event["warmed_up"]:
        there[int(event["rank"])] -= 1


def are_there(victims: Sequence[Fault], there: Counter[int]) -> bool:
    return all(there[fault.rank] > 0 for fault in victims if isinstance(fault, RankFault))


# --- the report ---


def checks(facts: "Facts") -> list[Check]:
    """Every replacement had been warmed up."""
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
    """`warm_up` of the report; None without."""
    if not facts.asked.warm_up:
        return None
    replaced = _replaced(facts)
    saved = [one["saved_seconds"] for one in replaced if one["saved_seconds"] is not None]
    return {"replacements": replaced, "saved_seconds": sum(saved) if saved else None}


def _replaced(facts: "Facts") -> list[dict[str, Any]]:
    """Of each process that took a lost rank's place: what its warm-up took the first time and the second (None: it had
    none), the difference, and what the same took when it was needed."""
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
    """`step_seconds`: of the first step that it has replayed, with its update; None: it has replayed none."""
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

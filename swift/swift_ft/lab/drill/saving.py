"""The report's part on checkpoints: their cost, as reported by the ranks, and the one to which all had to go back.

The latter is derived from the checkpoints that were complete or refused, independently of the planner.
"""

from statistics import median
from typing import Any

from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.verdict_checks import Check
from swift_ft.planner import SETTINGS


def checks(facts: Facts) -> list[Check]:
    """Returns the additional checks of a drill whose ranks always go back to a checkpoint."""
    return [_newest_check(facts)] if SETTINGS[facts.asked.strategy].only_restores else []


def _newest_check(facts: Facts) -> Check:
    name = "all went back to the newest complete checkpoint"
    complete: set[int] = set()
    planned, wrong = None, []
    for event in facts.events:
        match event["event"]:
            case "checkpoint_complete":
                complete.add(event["version"])
            case "plan":
                planned = event["target_version"]
                # A newer target was complete, but the coordinator was killed before it could record that.
                if not complete or planned < max(complete):
                    there = f"{max(complete)} was complete" if complete else "none was complete"
                    wrong.append(f"to version {planned}, and {there}")
            case "refused":
                complete.discard(planned)
            case "state" if event["state"] == "RUNNING" and planned is not None:
                complete = {version for version in complete if version <= planned}
    if planned is None:
        return Check(name, True, "none was needed")  # other checks decide whether one was needed
    return Check(name, not wrong, "; ".join(wrong))


def section(facts: Facts) -> dict[str, Any]:
    """Returns `checkpoint` of the report: bytes and seconds of one rank's part of a version; None where no rank
    reported any."""
    durable = [
        event for event in facts.events if event["event"] == "checkpoint_durable" and "stall_s" in event
    ]
    # Version 0 is left out: before the first step optimizers have no state.
    warm = [event for event in durable if event["version"] > 0]
    return {
        "mode": facts.asked.checkpoint_mode,
        "every": facts.asked.topology.checkpoint_every,
        "saved": len(durable),
        "bytes_max": max((event["bytes"] for event in warm), default=None),
        **{
            f"{name}_{of.__name__}": of(event[name] for event in warm) if warm else None
            for name in ("seconds", "stall_s")
            for of in (median, max)
        },
    }


def words(shown: dict[str, Any]) -> str:
    """Returns the line for the table of results; empty: no save was reported."""
    if shown["stall_s_median"] is None:
        return ""
    return (
        f"{shown['saved']} parts of at most {shown['bytes_max'] / 1e6:.1f} MB, {shown['mode']}: durable after "
        f"{1e3 * shown['seconds_median']:.0f} ms, of which training waited {1e3 * shown['stall_s_median']:.0f} ms "
        "(medians)"
    )

"""Checkpoints in a report: what those of a run cost, as its ranks told of each (`checkpoint`), and to which one all had
to go back.

The latter is worked out from what was complete and what was refused; nothing of the planner's is used.
"""

from statistics import median
from typing import Any

from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.verdict_checks import Check
from swift_ft.planner import FROM_CHECKPOINT


def checks(facts: Facts) -> list[Check]:
    """Those that a drill needs besides whose ranks always go back to the checkpoint."""
    return [_newest_check(facts)] if facts.asked.strategy in FROM_CHECKPOINT else []


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
                # Newer: one that was complete before the coordinator, killed then, could say so.
                if not complete or planned < max(complete):
                    there = f"{max(complete)} was complete" if complete else "none was complete"
                    wrong.append(f"to version {planned}, and {there}")
            case "refused":
                complete.discard(planned)
            case "state" if event["state"] == "RUNNING" and planned is not None:
                complete = {version for version in complete if version <= planned}
    if planned is None:
        return Check(name, True, "none was needed")  # whether one was is for other checks to say
    return Check(name, not wrong, "; ".join(wrong))


def section(facts: Facts) -> dict[str, Any]:
    """Bytes and seconds of one rank's part of a version; None where nobody has told."""
    durable = [
        event for event in facts.events if event["event"] == "checkpoint_durable" and "stall_s" in event
    ]
    # Before the first step optimizers have no state.
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
    """For the table of results; empty: nobody has told of a save."""
    if shown["stall_s_median"] is None:
        return ""
    return (
        f"{shown['saved']} parts of at most {shown['bytes_max'] / 1e6:.1f} MB, {shown['mode']}: durable after "
        f"{1e3 * shown['seconds_median']:.0f} ms, of which training waited {1e3 * shown['stall_s_median']:.0f} ms "
        "(medians)"
    )

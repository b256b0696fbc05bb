"""The report's part on the strategy "reinit": the ranks that restarted their training function, and in which
process."""

from collections.abc import Set
from typing import Any

from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import Check

REINIT = "reinit"


def checks(facts: Facts) -> list[Check]:
    """Checks that every survivor of a recovery restarted its training function in it."""
    if facts.asked.strategy != REINIT:
        return []
    name = "every survivor began its training function again"
    if any(recovery.ended_t is None for recovery in facts.recoveries):
        return [Check(name, None, "a recovery has no end")]
    missing = [
        f"recovery {number}: rank {rank} went on where it was"
        for number, recovery in enumerate(facts.recoveries, start=1)
        for rank in sorted(
            set(range(facts.asked.topology.ranks)) - recovery.victims - _begun(facts, recovery)
        )
    ]
    return [Check(name, not missing, "; ".join(missing))]


def _begun(facts: Facts, recovery: Recovery) -> Set[int]:
    assert recovery.ended_t is not None
    return {
        _rank(event)
        for event in facts.events
        if event["event"] == "reinit" and recovery.began_t <= event["t"] <= recovery.ended_t
    }


def _rank(event: Event) -> int:
    return int(event["rank"])


def section(facts: Facts) -> dict[str, Any] | None:
    """Returns `reinit` of the report; None with another strategy."""
    if facts.asked.strategy != REINIT:
        return None
    again = [event for event in facts.events if event["event"] == "reinit"]
    return {
        "begun_again": [{"rank": _rank(event), "pid": event["pid"]} for event in again],
        "leave_seconds_max": max((float(event["seconds"]) for event in again), default=None),
    }

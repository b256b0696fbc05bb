"""The report's part on log servers: placement of streams, moves, and whether a loss was handled. Pure."""

from collections.abc import Sequence
from typing import Any

from swift_ft.fault_grammar import LogLossFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import Check


def places(events: Sequence[Event]) -> dict[str, Any]:
    """Returns `placement`: rank -> its log servers at the start; `moved`; `lost`; `copies_changed`, all of `log` of the
    report."""
    placed: dict[str, list[str]] = {}
    moved: list[dict[str, Any]] = []
    for event in events:
        if event["event"] != "log_placed":
            continue
        rank, servers = str(event["rank"]), list(event["servers"])
        before = placed.setdefault(rank, servers)
        # A replacement process uses its predecessor's log servers.
        last = next((move["to"] for move in reversed(moved) if move["rank"] == event["rank"]), before)
        if servers != last:
            moved.append(
                {"rank": event["rank"], "generation": event["generation"], "from": last, "to": servers}
            )
    return {
        "placement": {rank: placed[rank] for rank in sorted(placed, key=int)},
        "moved": moved,
        "lost": [str(event["reason"]) for event in events if event["event"] == "log_server_lost"],
        "copies_changed": [
            {name: event.get(name) for name in ("stream", "instead_of", "address", "reason")}
            for event in events
            if event["event"] == "copy_changed"
        ],
    }


def checks(facts: Facts) -> list[Check]:
    """Checks that each log server killed for good was given up."""
    wanted = sum(isinstance(fault, LogLossFault) for fault in facts.asked.faults)
    if not wanted:
        return []
    lost = sum(len(recovery.servers_lost) for recovery in facts.recoveries)
    detail = f"{lost} of {wanted} were given up"
    return [Check("the lost log server was given up", lost == wanted, detail)]


def may_fall_back(facts: Facts) -> bool:
    """Returns whether a fallback to a checkpoint is permitted: with one copy, records of the lost log server are gone,
    so a replay that needs them is impossible. The plan must give that reason."""
    return facts.asked.copies == 1 and all("is lost" in reason for reason in facts.fell_back)

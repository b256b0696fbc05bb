"""Log servers in the report: where streams were, what moved, and whether a loss was dealt with. Pure."""

from collections.abc import Sequence
from typing import Any

from swift_ft.fault_grammar import LogLossFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import Check


def places(events: Sequence[Event]) -> dict[str, Any]:
    """`log.placement`: rank -> its log servers at the start; `log.moved`; `log.lost`; `log.copies_changed`."""
    placed: dict[str, list[str]] = {}
    moved: list[dict[str, Any]] = []
    for event in events:
        if event["event"] != "log_placed":
            continue
        rank, servers = str(event["rank"]), list(event["servers"])
        before = placed.setdefault(rank, servers)
        # A replacement finds its streams where its predecessor had them.
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
    """Each log server that was killed for good was given up, and nobody's records are there any more."""
    wanted = sum(isinstance(fault, LogLossFault) for fault in facts.asked.faults)
    if not wanted:
        return []
    lost = sum(len(recovery.servers_lost) for recovery in facts.recoveries)
    detail = f"{lost} of {wanted} were given up"
    return [Check("the lost log server was given up", lost == wanted, detail)]


def may_fall_back(facts: Facts) -> bool:
    """With one copy, what only the lost log server had is gone: a replay that needs it is not possible. The plan must
    say so."""
    return facts.asked.copies == 1 and all("is lost" in reason for reason in facts.fell_back)

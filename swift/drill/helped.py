"""What the trace says about replays that other ranks helped with. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift.drill.timeline import Recovery
from swift.drill.verdict_checks import Check


def replays(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Of every shared replay: who, how many microbatches of a step each, how many steps; and who did not, and why."""
    return [replay for recovery in recoveries for replay in _of(recovery)]


def _of(recovery: Recovery) -> list[dict[str, Any]]:
    ends = {event["rank"]: event for event in recovery.replays}
    shown = []
    for begun in recovery.helps:
        rank, helpers = begun["rank"], list(begun["helpers"])
        left = next((event.get("reason", "") for event in recovery.left if event["rank"] == rank), "")
        computed = {e["rank"]: e["microbatches"] for e in recovery.helped if e["owner"] == rank}
        shown.append(
            {
                "rank": rank,
                "helpers": helpers,
                "workers": 1 + len(helpers),
                "shares": list(begun["shares"]),
                "steps": ends.get(rank, {}).get("shared_steps"),
                "microbatches": {str(helper): computed.get(helper) for helper in helpers},
                "alone_because": left,
                "declined": dict(begun.get("declined") or {}),
            }
        )
    return shown


def check(helpers: int, recoveries: Sequence[Recovery]) -> list[Check]:
    """Help that was planned was given, in the recoveries that were not cut short."""
    if not helpers:
        return []
    planned = [recovery for recovery in recoveries if (recovery.made_by or {}).get("help")]
    name = "planned help was given"
    without = [
        f"rank {replay['rank']}: {replay['alone_because'] or replay['declined'] or 'no shared step'}"
        for recovery in planned
        for replay in _of(recovery)
        if not replay["steps"]
    ]
    silent = sum(len((recovery.made_by or {})["help"]) for recovery in planned) - len(replays(planned))
    if silent > 0:
        return [Check(name, None, "a shared replay is not in the trace")]
    return [Check(name, not without, "; ".join(without))]


def words(shared: Mapping[str, Any]) -> str:
    if not shared["helpers"]:
        return f"rank {shared['rank']} replayed alone"
    names = ", ".join(map(str, shared["helpers"]))
    shares = " + ".join(map(str, shared["shares"]))
    return f"rank {shared['rank']} and {names} ({shares} microbatches of a step): {shared['steps']} steps"

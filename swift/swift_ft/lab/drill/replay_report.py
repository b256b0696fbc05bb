"""The report's part on replays: who helped, and what an interruption cost. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.lab.drill.timeline import Recovery
from swift_ft.lab.drill.verdict_checks import Check


def helped_replays(recoveries: Sequence[Recovery]) -> list[dict[str, Any]]:
    """Returns for each shared replay the ranks, their microbatches per step, the steps, and who declined and why."""
    return [replay for recovery in recoveries for replay in _of(recovery)]


def _of(recovery: Recovery) -> list[dict[str, Any]]:
    ends = {event["rank"]: event for event in recovery.made("replay_end")}
    shown = []
    for begun in recovery.made("help_begin"):
        rank, helpers = begun["rank"], list(begun["helpers"])
        left = next(
            (event.get("reason", "") for event in recovery.made("help_end") if event["rank"] == rank), ""
        )
        computed = {e["rank"]: e["microbatches"] for e in recovery.made("helped") if e["owner"] == rank}
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


def check_helpers(recoveries: Sequence[Recovery]) -> list[Check]:
    """Checks that planned help was given, in the recoveries that were not interrupted. No check if none was planned."""
    planned = [recovery for recovery in recoveries if (recovery.made_by or {}).get("help")]
    if not planned:
        return []
    name = "planned help was given"
    without = [
        f"rank {replay['rank']}: {replay['alone_because'] or replay['declined'] or 'no shared step'}"
        for recovery in planned
        for replay in _of(recovery)
        if not replay["steps"]
    ]
    silent = sum(len((recovery.made_by or {})["help"]) for recovery in planned) - len(helped_replays(planned))
    if silent > 0:
        return [Check(name, None, "a shared replay is not in the trace")]
    return [Check(name, not without, "; ".join(without))]


def replays(recovery: Recovery) -> list[dict[str, Any]]:
    ends = recovery.made("replay_end")
    return [{name: end[name] for name in ("rank", "steps", "seconds")} for end in ends if "seconds" in end]


def interruptions(recovery: Recovery) -> list[dict[str, Any]]:
    """Returns, for each helper that died while helping, the steps its owner kept and repeated, and when the owner
    continued."""
    shown = []
    for fault in recovery.faults:
        helped = [
            e for e in recovery.named("help_begin") if fault["rank"] in e["helpers"] and e["t"] < fault["t"]
        ]
        if not helped or helped[-1]["generation"] == recovery.generation:
            continue
        owner = helped[-1]["rank"]
        own = [e for e in recovery.window if e.get("rank") == owner and e["t"] > helped[-1]["t"]]
        again = [e for e in own if e.get("generation") == recovery.generation]
        replaying_t = min((e["t"] for e in again if e["event"] == "replay_begin"), default=float("inf"))
        ended = [e for e in own if e["event"] == "step_end" and e["replay"]]
        resumed = [e["t"] for e in own if e["event"] == "step_begin" and e["replay"] and e["t"] > replaying_t]
        shown.append(
            {
                "helper": fault["rank"],
                "owner": owner,
                "steps_kept": sum(e["t"] < replaying_t for e in ended),
                "steps_again": len(ended) - len({e["step"] for e in ended}),
                "helpers_after": next(
                    (e["helpers"] for e in reversed(again) if e["event"] == "help_begin"), []
                ),
                "seconds": round(min(resumed) - fault["t"], 6) if resumed else None,
            }
        )
    return shown


def replay_checks(shown: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns the check of interruptions. `shown`: the recoveries of the report."""
    cut = [interruption for recovery in shown for interruption in recovery["interruptions"]]
    again = sum(interruption["steps_again"] for interruption in cut)
    return [Check("no replayed step was done twice", again == 0, f"{again} steps were")] if cut else []

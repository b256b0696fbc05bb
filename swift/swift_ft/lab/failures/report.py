"""Compares injected with detected failures: from the events of a run to ``failures.json``. Pure.

An injection is an event with the failure's id: "fault" (a rank), "service_killed", "corrupted".
Its detection is the first later event that only such a failure can cause; `_is_sign` defines these events for each
kind. The event names the detecting process. The report also has the first View of a newer generation, and the first
one in which the job runs again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.fault_grammar import (
    FOR_GOOD,
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    LogServerFault,
    RankFault,
    fault_id,
)

Event = Mapping[str, Any]
INJECTED = ("fault", "service_killed", "corrupted")
_WATCHED_S = 120.0
"""Seconds after an injection in which an event counts as its detection. A later one has another cause."""
_ASKED_LATER_S = 2.0
"""Seconds after the end of a lasting failure in which a suspicion from its duration may still be reported."""


def outcomes(
    faults: Sequence[Fault], trace: Sequence[Event], began: float, why_not: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns `failures` of the report, in the order of the schedule (docs/drills.md lists the fields).

    `trace`: events in order of time. `began`: event clock when the first rank was started. `why_not`: id -> reason why
    a failure was not injected, where it is known."""
    return [_outcome(fault, fault_id(index), trace, began, why_not) for index, fault in enumerate(faults)]


def _outcome(
    fault: Fault, name: str, trace: Sequence[Event], began: float, why_not: Mapping[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": name,
        "failure": str(fault),
        "injected_s": None,
        "why_not": "",
        "where": {},
        "over_s": None,
        "detected": None,
        "generation": None,
        "running_after_s": None,
    }
    injected = next((e for e in trace if e["event"] in INJECTED and e.get("id") == name), None)
    if injected is None:
        return found | {"why_not": why_not.get(name) or _never(fault)}
    at = injected["t"]
    hidden = (*INJECTED, "t", "who", "event", "id", "kind")
    found["injected_s"] = round(at - began, 6)
    found["where"] = {key: value for key, value in injected.items() if key not in hidden}
    until = at + _WATCHED_S
    over = next((e["t"] for e in trace if e["event"] == "fault_over" and e.get("id") == name), None)
    if over is not None:
        found["over_s"] = round(over - began, 6)
        until = over + (_ASKED_LATER_S if _lasts(fault) else _WATCHED_S)
    behind = [event for event in trace if event["t"] >= at]
    before = max((e["generation"] for e in trace if e["event"] == "view_seen" and e["t"] < at), default=0)
    newer = [e for e in behind if e["event"] == "view_seen" and e["generation"] > before]
    if newer:
        found["generation"] = newer[0]["generation"]
    signs = (e for e in behind if e["event"] != "view_seen" or e in newer)
    if sign := next((e for e in signs if e["t"] <= until and _is_sign(fault, injected, e)), None):
        found["detected"] = {"by": sign["event"], "who": sign["who"], "after_s": round(sign["t"] - at, 6)}
    if runs := next((e for e in newer if e["state"] in ("RUNNING", "FINISHED")), None):
        found["running_after_s"] = round(runs["t"] - at, 6)
    return found


def _never(fault: Fault) -> str:
    match fault:
        case RankFault(phase=phase, at_s=None):
            return f"rank {fault.rank} never came to its place ({phase})"
        case CorruptCopyFault():
            return "no replica gave that rank its state"
        case _:
            return "the run was over before"


def _lasts(fault: Fault) -> bool:
    return isinstance(fault, RankFault) and fault.kind not in FOR_GOOD


def _is_sign(fault: Fault, injected: Event, event: Event) -> bool:
    """Returns whether `event` shows that the failure was detected. The caller passes only Views of newer
    generations."""
    name, mine = event["event"], event.get("rank") == injected.get("rank")
    made_anew, reason = name == "view_seen", f"{event.get('reason', '')} "
    match fault:
        case RankFault(kind="kill" | "device"):
            return name == "child_exit" and event.get("pid") == injected.get("pid")
        case RankFault():
            fenced = f"rank {injected.get('rank')} " in reason
            # A suspicion with `told` set was reported by a rank, and it is about another rank.
            suspected = name == "suspicion_seen" and not event.get("told")
            return (mine and (suspected or name == "fenced_kill")) or (made_anew and fenced)
        case CoordinatorFault():
            return name in ("heartbeat_unanswered", "coordinator_unanswered")
        case LogServerFault() | LogLossFault():
            silent = name == "log_silent_seen" and event.get("address") == injected.get("address")
            return silent or (made_anew and str(injected.get("address")) in reason)
        case CorruptFault() | CorruptCheckpointFault() | CorruptCopyFault():
            refused = made_anew and any(word in reason for word in _DAMAGE)
            return refused or name in ("stream_corrupt", "refused")


_DAMAGE = (" refused ", "corrupt", "damage")
"""Substrings of a generation's reason that show that a process refused damaged data."""


def as_json(found: Sequence[Mapping[str, Any]], **about: Any) -> dict[str, Any]:
    """Builds ``failures.json``. `about`: further fields, placed first."""
    return {
        **about,
        "schedule": [outcome["failure"] for outcome in found],
        "injected": sum(outcome["injected_s"] is not None for outcome in found),
        "detected": sum(outcome["detected"] is not None for outcome in found),
        "failures": found,
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """Formats ``failures.json`` as text: a summary line, then one line for each failure."""
    planned = len(report["failures"])
    head = f"failures: {planned} planned, {report['injected']} injected, {report['detected']} noticed"
    return [head, *(f"  {outcome['failure']}: {_words(outcome)}" for outcome in report["failures"])]


def _words(outcome: Mapping[str, Any]) -> str:
    at, said = outcome["injected_s"], outcome["detected"]
    if at is None:
        return f"did not happen: {outcome['why_not']}"
    noticed = (
        f"noticed after {said['after_s']:.3f} s ({said['who']}: {said['by']})" if said else "nobody noticed"
    )
    words = [f"at {at:.3f} s", noticed]
    if outcome["over_s"] is not None:
        words.append(f"over after {outcome['over_s'] - at:.3f} s")
    if outcome["running_after_s"] is not None:
        words.append(f"generation {outcome['generation']} ran after {outcome['running_after_s']:.3f} s")
    return ", ".join(words)

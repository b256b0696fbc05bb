"""Compares injected with detected failures: from the events of a run to ``failures.json``. Pure.

An injection is an event with the failure's id: "fault" (a rank, a machine, a disk), "service_killed", "corrupted".
Its detection is the first later event that only such a failure can cause; `_is_sign` defines these events for each
kind. The event names the detecting process. The report also has the first View of a newer generation, and the first
one in which the job runs again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swift_ft.fault_grammar import (
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    FillFault,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Detected:
    """The first detection of a failure."""

    by: str
    """The event's name."""
    who: str
    """Name of the process that wrote the event ("launcher", "rank2")."""
    after_s: float
    """Detection latency: seconds since the failure was injected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one planned failure. Times are seconds since the first rank was started."""

    id: str
    failure: str
    injected_s: float | None
    """None: the failure was not injected."""
    why_not: str = ""
    where: Mapping[str, Any]
    """Coordinates as far as they are known: rank, process, step, ..."""
    over_s: float | None = None
    """End of a failure that lasts for a while."""
    detected: Detected | None = None
    """None: the failure was not detected."""
    generation: int | None = None
    """First generation created after the failure."""
    running_after_s: float | None = None
    """Seconds from the injection until the job ran in a newer generation."""


def outcomes(
    faults: Sequence[Fault], trace: Sequence[Event], began: float, why_not: Mapping[str, str]
) -> list[Outcome]:
    """Returns the result of every failure, in the order of the schedule.

    `trace`: events in order of time. `began`: event clock when the first rank was started. `why_not`: id -> reason why
    a failure was not injected, where it is known."""
    found = []
    for index, fault in enumerate(faults):
        name = fault_id(index)
        injected = next((e for e in trace if e["event"] in INJECTED and e.get("id") == name), None)
        if injected is None:
            why = why_not.get(name) or _never(fault)
            found.append(Outcome(id=name, failure=str(fault), injected_s=None, why_not=why, where={}))
            continue
        at = injected["t"]
        over = next((e for e in trace if e["event"] == "fault_over" and e.get("id") == name), None)
        until = (at if over is None else over["t"]) + (
            _ASKED_LATER_S if _lasts(fault) and over else _WATCHED_S
        )
        behind = [event for event in trace if event["t"] >= at]
        before = max((e["generation"] for e in trace if e["event"] == "view_seen" and e["t"] < at), default=0)
        newer = [e for e in behind if e["event"] == "view_seen" and e["generation"] > before]
        signs = (e for e in behind if e["event"] != "view_seen" or e in newer)
        sign = next((e for e in signs if e["t"] <= until and _is_sign(fault, injected, e)), None)
        runs = next((e for e in newer if e["state"] in ("RUNNING", "FINISHED")), None)
        hidden = (*INJECTED, "t", "who", "event", "id", "kind")
        found.append(
            Outcome(
                id=name,
                failure=str(fault),
                injected_s=round(at - began, 6),
                where={key: value for key, value in injected.items() if key not in hidden},
                over_s=None if over is None else round(over["t"] - began, 6),
                detected=None
                if sign is None
                else Detected(by=sign["event"], who=sign["who"], after_s=round(sign["t"] - at, 6)),
                generation=newer[0]["generation"] if newer else None,
                running_after_s=None if runs is None else round(runs["t"] - at, 6),
            )
        )
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
    return isinstance(fault, RankFault) and fault.kind != "kill"


def _rank_of(injected: Event) -> Callable[[Event], bool]:
    return lambda event: event.get("rank") == injected.get("rank")


def _is_sign(fault: Fault, injected: Event, event: Event) -> bool:
    """Returns whether `event` shows that the failure was detected. The caller passes only Views of newer
    generations."""
    name, mine = event["event"], _rank_of(injected)(event)
    made_anew, reason = name == "view_seen", f"{event.get('reason', '')} "
    match fault:
        case RankFault(kind="kill"):
            return name == "child_exit" and event.get("pid") == injected.get("pid")
        case RankFault():
            fenced = f"rank {injected.get('rank')} " in reason
            silent = name == "heartbeat_unanswered" and fault.kind == "network"
            # A suspicion with `told` set was reported by a rank, and it is about another rank.
            suspected = name == "suspicion_seen" and not event.get("told")
            return (mine and (suspected or silent or name == "fenced_kill")) or (made_anew and fenced)
        case CoordinatorFault():
            return name in ("heartbeat_unanswered", "coordinator_unanswered")
        case LogServerFault() | LogLossFault():
            silent = name == "log_silent_seen" and event.get("address") == injected.get("address")
            return silent or (made_anew and str(injected.get("address")) in reason)
        case FillFault():
            return name == "checkpoint_failed" or (
                name == "checkpoint_wanted_seen" and "log server" in reason
            )
        case CorruptFault() | CorruptCheckpointFault() | CorruptCopyFault():
            refused = made_anew and any(word in reason for word in _DAMAGE)
            return refused or name in ("stream_corrupt", "refused")


_DAMAGE = (" refused ", "corrupt", "damage")
"""Substrings of a generation's reason that show that a process refused damaged data."""


def as_json(found: Iterable[Outcome], **about: Any) -> dict[str, Any]:
    """Builds ``failures.json``. `about`: further fields, placed first."""
    listed = list(found)
    return {
        **about,
        "schedule": [outcome.failure for outcome in listed],
        "injected": sum(outcome.injected_s is not None for outcome in listed),
        "detected": sum(outcome.detected is not None for outcome in listed),
        "failures": [asdict(outcome) for outcome in listed],
    }


def lines(found: Sequence[Outcome]) -> list[str]:
    """Formats the results as text: a summary line, then one line for each failure."""
    injected = [outcome for outcome in found if outcome.injected_s is not None]
    noticed = sum(outcome.detected is not None for outcome in injected)
    head = f"failures: {len(found)} planned, {len(injected)} injected, {noticed} noticed"
    return [head, *(f"  {outcome.failure}: {_words(outcome)}" for outcome in found)]


def _words(outcome: Outcome) -> str:
    if outcome.injected_s is None:
        return f"did not happen: {outcome.why_not}"
    words = [f"at {outcome.injected_s:.3f} s"]
    if outcome.detected is None:
        words.append("nobody noticed")
    else:
        said = outcome.detected
        words.append(f"noticed after {said.after_s:.3f} s ({said.who}: {said.by})")
    if outcome.over_s is not None:
        words.append(f"over after {outcome.over_s - outcome.injected_s:.3f} s")
    if outcome.running_after_s is not None:
        words.append(f"generation {outcome.generation} ran after {outcome.running_after_s:.3f} s")
    return ", ".join(words)

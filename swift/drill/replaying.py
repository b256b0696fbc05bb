"""Replays in the report: what set their pace, whether they took what was predicted, what an interruption cost. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swift.drill import prediction
from swift.drill.config import DrillConfig
from swift.drill.timeline import Event, Recovery
from swift.drill.verdict_checks import Check, all_of
from swift.recovery import Assignment, Help, RankPlan, Strategy
from swift.recovery.cost import StageCost
from swift.recovery.prediction import Predictor

STEP_S_MIN = 0.1
"""A shorter step says nothing where ranks share cores: a message takes a millisecond or two from thread to thread."""
_WORDS = {"compute": "computing", "log": "the log", "neighbour": "a stage beside it", "line": "the line"}


def replays(
    config: DrillConfig, events: Sequence[Event], recovery: Recovery, measured: prediction.Measured
) -> list[dict[str, Any]]:
    """Every replay that came to its end: where its time went, and what was predicted. All wait for the one that was to
    take longest, so that one's time is judged; what replays beside it waits for it."""
    predicted, by = _predicted(config, events, recovery)
    longest = max(predicted, key=lambda rank: predicted[rank], default=None)
    shown = []
    for end in recovery.replays:
        if "split" not in end:
            continue
        rank, expected = int(end["rank"]), predicted.get(int(end["rank"]))
        judged = config.helpers > 0 and rank == longest
        why = _why_not(config, measured, expected, end["steps"]) if judged and expected else ""
        ratio = end["seconds"] / expected if expected else None
        shown.append(
            {
                "rank": rank,
                "steps": end["steps"],
                "seconds": end["seconds"],
                "bottleneck": end["bottleneck"],
                "split": dict(end["split"]),
                "waits": dict(end["waits"]),
                "predicted_seconds": expected,
                "predicted_by": by if expected is not None else None,
                "ratio": ratio,
                "within": abs(ratio - 1) <= prediction.TOLERANCE if ratio and judged and not why else None,
                "why": why,
            }
        )
    return shown


def _why_not(config: DrillConfig, measured: prediction.Measured, expected: float, steps: int) -> str:
    """Why the time cannot be compared; empty: it can."""
    if why := prediction.why_not(config, measured):
        return why
    if expected < steps * STEP_S_MIN and (measured.cores or 0) < config.topology.ranks:
        return (
            f"INCONCLUSIVE: where ranks share cores a step of {expected / steps * 1000:.0f} ms is made of messages as "
            "much as of what it computes; more --microbatches make it longer"
        )
    return ""


def _predicted(
    config: DrillConfig, events: Sequence[Event], recovery: Recovery
) -> tuple[dict[int, float], str]:
    """rank -> seconds, as the plan said; if it did not, with what was measured before the first failure."""
    plan = recovery.plan or {}
    if plan.get("predictions"):
        return {int(one["rank"]): float(one["seconds"]) for one in plan["predictions"]}, "plan"
    shape = config.topology
    if shape.replicas > 1 or shape.stages_per_rank > 1 or not recovery.replay_expected:
        return {}, ""
    try:
        costs = _costs(config, events)
    except prediction.Missing:
        return {}, ""
    ranks = [
        RankPlan(
            rank=e["rank"],
            strategy=Strategy(e["strategy"].upper()),
            from_version=e["from_version"],
            reason="",
        )
        for e in plan["ranks"]
    ]
    assignment = Assignment.told(
        num_stages=shape.stages, stages={rank: (rank,) for rank in range(shape.ranks)}
    )
    help = [
        Help(
            owner=one["owner"],
            helpers=tuple(one["helpers"]),
            until=one["until"],
            together=tuple(one.get("together", ())),
        )
        for one in plan.get("help", ())
    ]
    found = Predictor(ranks, int(plan["target_version"]), assignment, costs).of(help)
    return {one.rank: one.seconds for one in found}, "profile"


def _costs(config: DrillConfig, events: Sequence[Event]) -> dict[int, StageCost]:
    microbatches = config.topology.microbatches
    before = prediction.before_the_first_failure(events)
    return {
        rank: StageCost(
            microbatches=microbatches,
            microbatch_s=sum(prediction.compute_s(before, rank, kind, microbatches) for kind in "FB"),
            update_s=prediction.update_s(before, rank),
        )
        for rank in range(config.topology.ranks)
    }


def interruptions(events: Sequence[Event], recovery: Recovery) -> list[dict[str, Any]]:
    """A helper that died while it helped: what its owner had done already and did not do again, and when it went on."""
    shown = []
    for fault in recovery.faults:
        begun = [
            event
            for event in events
            if event["event"] == "help_begin"
            and event["t"] < fault["t"]
            and fault["rank"] in event["helpers"]
        ]
        mine = [event for event in begun if event["generation"] in recovery.generations]
        if not mine or mine[-1]["generation"] == recovery.generation:
            continue
        shown.append(_interruption(events, recovery, fault, mine[-1]))
    return shown


def _interruption(events: Sequence[Event], recovery: Recovery, fault: Event, begun: Event) -> dict[str, Any]:
    owner, killed_t = int(begun["rank"]), fault["t"]
    until = recovery.ended_t if recovery.ended_t is not None else float("inf")
    own = [e for e in events if e.get("rank") == owner and begun["t"] < e["t"] <= until]
    anew = [e for e in own if e.get("generation") == recovery.generation]
    replaying_t = min((e["t"] for e in anew if e["event"] == "replay_begin"), default=until)
    ended = [e for e in own if e["event"] == "step_end" and e["replay"]]
    resumed_t = min(
        (e["t"] for e in own if e["event"] == "step_begin" and e["replay"] and e["t"] > replaying_t),
        default=None,
    )
    helped = [e for e in anew if e["event"] == "help_begin"]
    return {
        "helper": int(fault["rank"]),
        "owner": owner,
        "steps_kept": sum(e["t"] < replaying_t for e in ended),
        "steps_again": sum(count - 1 for count in Counter(e["step"] for e in ended).values()),
        "helpers_after": list(helped[-1]["helpers"]) if helped else [],
        "seconds": None if resumed_t is None else round(resumed_t - killed_t, 6),
        "phases": _phases(events, recovery.generation, killed_t, replaying_t, resumed_t),
    }


def _phases(
    events: Sequence[Event], generation: int, killed_t: float, replaying_t: float, resumed_t: float | None
) -> dict[str, float]:
    """From the kill to the owner's next step: until the coordinator had heard of it; until there was a plan; until
    the owner replayed again, its groups being built and a fresh process in them; until its first step."""
    states = {
        str(e["state"]).lower(): e["t"]
        for e in events
        if e["event"] == "state" and e["t"] > killed_t and e.get("generation") == generation
    }
    marks = {
        "detect": states.get("fencing"),
        "plan": states.get("recovering"),
        "rebuild": replaying_t,
        "begin": resumed_t,
    }
    found: dict[str, float] = {}
    at = killed_t
    for name, mark in marks.items():
        if resumed_t is not None and mark is not None:
            found[name] = round(mark - at, 6)
            at = mark
    return found


def checks(config: DrillConfig, shown: Sequence[Mapping[str, Any]]) -> list[Check]:
    """`shown`: the recoveries of the report."""
    judged = [one for recovery in shown for one in recovery["replays"] if one["within"] is not None]
    cut = [one for recovery in shown for one in recovery["interruptions"]]
    found = []
    if judged:
        apart = ", ".join(f"{one['ratio']:.2f} of what was predicted" for one in judged)
        found.append(
            Check("a replay takes what was predicted", all_of(one["within"] for one in judged), apart)
        )
    if cut:
        again = sum(one["steps_again"] for one in cut)
        found.append(Check("no replayed step was done twice", again == 0, f"{again} steps were"))
    return found


def paced_by(one: Mapping[str, Any]) -> str:
    """What set the pace of a replay."""
    spent = one["split"]
    rest = ", ".join(f"{spent[name]:.2f} s {_WORDS[name]}" for name in _WORDS if spent[name] >= 0.005)
    return f"rank {one['rank']}: {_WORDS[one['bottleneck']]} ({rest or 'no time at all'} of {one['seconds']:.2f} s)"


def took(one: Mapping[str, Any]) -> str:
    if one["ratio"] is None:
        return ""
    judged = {True: "within a quarter", False: "NOT within a quarter", None: one["why"] or "not judged"}
    expected = f"{one['predicted_seconds']:.2f} s predicted"
    return f"rank {one['rank']}: {one['seconds']:.2f} s, {expected}: {judged[one['within']]}"


def cut_short(one: Mapping[str, Any]) -> str:
    on = "it did not go on" if one["seconds"] is None else f"it went on after {one['seconds']:.2f} s"
    return (
        f"rank {one['helper']} died while it helped rank {one['owner']}: {one['steps_kept']} steps were done and kept, "
        f"{one['steps_again']} done again; {on}"
    )

"""Replays in the report: what set their pace, whether they took what was predicted, what an interruption cost. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swift.drill import prediction
from swift.drill.facts import Facts
from swift.drill.timeline import Event, Recovery
from swift.drill.verdict_checks import Check, all_of
from swift.recovery import Assignment, Help, RankPlan, Strategy
from swift.recovery.cost import StageCost
from swift.recovery.prediction import Predictor

STEP_S_MIN = 0.1
"""A shorter step says nothing where ranks share cores: a message takes a millisecond or two from thread to thread."""
_WORDS = {"compute": "computing", "log": "the log", "neighbour": "a stage beside it", "line": "the line"}


def replays(facts: Facts, recovery: Recovery) -> list[dict[str, Any]]:
    """Every replay that came to its end: where its time went, and what was predicted. All wait for the one that was to
    take longest, so that one's time is judged; what replays beside it waits for it."""
    predicted, by = _predicted(facts, recovery)
    longest = max(predicted, key=lambda rank: predicted[rank], default=None)
    shown = []
    for end in recovery.replays:
        if "split" not in end:
            continue
        rank, expected = int(end["rank"]), predicted.get(int(end["rank"]))
        judged = facts.asked.helpers > 0 and rank == longest
        why = _why_not(facts, expected, end["steps"]) if judged and expected else ""
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


def _why_not(facts: Facts, expected: float, steps: int) -> str:
    """Why the time cannot be compared; empty: it can."""
    if why := prediction.why_not(facts):
        return why
    if expected < steps * STEP_S_MIN and (facts.measured.cores or 0) < facts.asked.topology.ranks:
        return (
            f"INCONCLUSIVE: where ranks share cores a step of {expected / steps * 1000:.0f} ms is made of messages as "
            "much as of what it computes; more --microbatches make it longer"
        )
    return ""


def _predicted(facts: Facts, recovery: Recovery) -> tuple[dict[int, float], str]:
    """rank -> seconds, as the plan said; if it did not, with what was measured before the first failure."""
    plan = recovery.plan or {}
    if plan.get("predictions"):
        return {int(each["rank"]): float(each["seconds"]) for each in plan["predictions"]}, "plan"
    shape = facts.asked.topology
    if shape.replicas > 1 or shape.stages_per_rank > 1 or not recovery.replay_expected:
        return {}, ""
    try:
        costs = _costs(facts)
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
            owner=shared["owner"],
            helpers=tuple(shared["helpers"]),
            until=shared["until"],
            together=tuple(shared.get("together", ())),
        )
        for shared in plan.get("help", ())
    ]
    replays = Predictor(ranks, int(plan["target_version"]), assignment, costs).of(help)
    return {replay.rank: replay.seconds for replay in replays}, "profile"


def _costs(facts: Facts) -> dict[int, StageCost]:
    microbatches = facts.asked.topology.microbatches
    before = prediction.before_the_first_failure(facts.events)
    return {
        rank: StageCost(
            microbatches=microbatches,
            microbatch_s=sum(prediction.compute_s(before, rank, kind, microbatches) for kind in "FB"),
            update_s=prediction.update_s(before, rank),
        )
        for rank in range(facts.asked.topology.ranks)
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
    phases: dict[str, float] = {}
    at = killed_t
    for name, mark in marks.items():
        if resumed_t is not None and mark is not None:
            phases[name] = round(mark - at, 6)
            at = mark
    return phases


def checks(shown: Sequence[Mapping[str, Any]]) -> list[Check]:
    """`shown`: the recoveries of the report."""
    judged = [replay for recovery in shown for replay in recovery["replays"] if replay["within"] is not None]
    cut = [interruption for recovery in shown for interruption in recovery["interruptions"]]
    answers = []
    if judged:
        apart = ", ".join(f"{replay['ratio']:.2f} of what was predicted" for replay in judged)
        answers.append(
            Check("a replay takes what was predicted", all_of(replay["within"] for replay in judged), apart)
        )
    if cut:
        again = sum(interruption["steps_again"] for interruption in cut)
        answers.append(Check("no replayed step was done twice", again == 0, f"{again} steps were"))
    return answers


def paced_by(replay: Mapping[str, Any]) -> str:
    """What set the pace of a replay."""
    spent = replay["split"]
    rest = ", ".join(f"{spent[name]:.2f} s {_WORDS[name]}" for name in _WORDS if spent[name] >= 0.005)
    pace, seconds = _WORDS[replay["bottleneck"]], replay["seconds"]
    return f"rank {replay['rank']}: {pace} ({rest or 'no time at all'} of {seconds:.2f} s)"


def took(replay: Mapping[str, Any]) -> str:
    if replay["ratio"] is None:
        return ""
    judged = {True: "within a quarter", False: "NOT within a quarter", None: replay["why"] or "not judged"}
    expected = f"{replay['predicted_seconds']:.2f} s predicted"
    return f"rank {replay['rank']}: {replay['seconds']:.2f} s, {expected}: {judged[replay['within']]}"


def cut_short(interruption: Mapping[str, Any]) -> str:
    """What the death of a helper cost the replay that it helped."""
    seconds, helper, owner = (interruption[name] for name in ("seconds", "helper", "owner"))
    on = "it did not go on" if seconds is None else f"it went on after {seconds:.2f} s"
    return (
        f"rank {helper} died while it helped rank {owner}: {interruption['steps_kept']} steps were done and kept, "
        f"{interruption['steps_again']} done again; {on}"
    )

"""The report's part on replays: what limited them, whether they took the predicted time, and what an interruption cost.
Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.fault_grammar import LogLossFault
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.topology import MODELS, NORM_BYTES
from swift_ft.lab.drill.verdict_checks import Check, all_of
from swift_ft.lab.plan.profile import Profile
from swift_ft.log import record
from swift_ft.planner.groups import RecoveryGroups

# The planner's predictions for the drill's recovery groups, compared with measurements.
#
# Bytes per stream and step follow from the sizes of the model, V = 2 M b s h e for a boundary (docs/planning.md). They
# must equal what is in the log, and what the ranks have measured. Recovery times follow from the planner's cost model,
# with the profile that the ranks of the same run have measured.

TOLERANCE = 0.25
"""Allowed deviation from a recovery's predicted time, relative to it."""


def section(facts: Facts) -> tuple[dict[str, Any] | None, list[Check]]:
    """Returns `prediction` of the report and its checks; (None, []) without recovery groups."""
    if not facts.asked.groups.starts:
        return None, []
    sizes, bytes_check = _bytes(facts)
    of_job, of_job_checks = _of_job(facts)
    times = _times(facts)
    checks = [bytes_check, *of_job_checks]
    judged = [time for time in times if time["within"] is not None]
    if judged:
        apart = ", ".join(f"{time['ratio']:.2f} of what was predicted" for time in judged)
        checks.append(Check("recovery takes what was predicted", all_of(t["within"] for t in judged), apart))
    return {"groups": str(facts.asked.groups), "bytes": sizes, "recoveries": times, "of_job": of_job}, checks


def is_planned(config: DrillConfig) -> bool:
    """Returns whether `swift-ft plan` supports this job."""
    shape = config.topology
    return bool(config.groups.starts) and shape.replicas == 1 and shape.stages_per_rank == 1


# --- bytes ---


def predicted_streams(config: DrillConfig, groups: RecoveryGroups | None = None) -> dict[str, int]:
    """Returns stream -> raw bytes that each step logs; other streams log none. `groups`: replaces the drill's
    groups."""
    shape, model, bytes_of = config.topology, MODELS[config.model], {}
    groups = config.groups if groups is None else groups
    if not groups.logs:
        return {}
    for dp_rank in range(shape.replicas):
        for stage in range(shape.stages):
            for neighbour, kind in ((stage + 1, "F"), (stage - 1, "B")):
                if 0 <= neighbour < shape.stages and shape.is_logged(stage, neighbour, groups):
                    name = record.boundary(stage, kind, dp_rank, shape.replicas)
                    bytes_of[name] = shape.microbatches * model.boundary_bytes
        for stage, kind in ((0, "X"), (shape.stages - 1, "T")):
            name = record.boundary(stage, kind, dp_rank, shape.replicas)
            bytes_of[name] = shape.microbatches * model.batch_bytes
    if config.updates == "after_backward":
        bytes_of |= {record.collectives(rank): NORM_BYTES for rank in range(shape.ranks)}
    return bytes_of


def _bytes(facts: Facts) -> tuple[dict[str, Any], Check]:
    """Compares what is predicted with what ranks gave to the log in every step, and with what is in the log at the end:
    the steps after the newest complete checkpoint."""
    wanted = predicted_streams(facts.asked)
    steps = [event for event in facts.events if event["event"] == "profiled"]
    written_by: defaultdict[int, set[str]] = defaultdict(set)
    for event in steps:
        written_by[event["rank"]] |= event["logged"].keys()
    given: defaultdict[str, set[int]] = defaultdict(set)
    for event in steps:
        for stream in written_by[event["rank"]]:
            given[stream].add(event["logged"].get(stream, 0))
    untold = sorted(wanted.keys() - given.keys())
    kept = _steps_in_log(facts)
    logged = facts.evidence.in_log or {}
    for stream in {*wanted, *logged} if kept else ():
        given[stream] |= {logged.get(stream, {}).get(step, 0) for step in kept}
    streams = {
        stream: {"predicted": wanted.get(stream, 0), "measured": sorted(given[stream])}
        for stream in sorted({*wanted, *given})
    }
    wrong = [
        f"{name} {s['measured']}, not {s['predicted']}"
        for name, s in streams.items()
        if s["measured"] != [s["predicted"]]
    ]
    equal = None if untold or not steps else not wrong
    shown = {
        "per_step": {
            "predicted": sum(wanted.values()),
            "measured": sum(wanted.values()) if equal else None,
        },
        "streams": streams,
        "steps": len(steps),
        "in_log": kept,
        "equal": equal,
    }
    return shown, Check(
        "the log takes the predicted bytes", equal, "; ".join(wrong) or "no step was measured"
    )


def _steps_in_log(facts: Facts) -> list[int]:
    if facts.evidence.in_log is None or any(isinstance(fault, LogLossFault) for fault in facts.asked.faults):
        return []
    complete = [int(e["version"]) for e in facts.events if e["event"] == "checkpoint_complete"]
    return list(range(max(complete, default=0), facts.asked.topology.steps))


def _of_job(facts: Facts) -> tuple[dict[str, Any], list[Check]]:
    """Checks the bytes in the profile that the ranks report to their coordinator: of all boundaries, also those inside
    a group."""
    if facts.evidence.fetched is None:
        return {"profile": None, "why": facts.evidence.not_fetched}, []
    every = predicted_streams(facts.asked, RecoveryGroups())
    last = facts.asked.topology.stages - 1
    wanted = {
        "forward_bytes": [every[f"s{boundary}.F"] for boundary in range(last)],
        "backward_bytes": [every[f"s{boundary + 1}.B"] for boundary in range(last)],
        "other_bytes": sum(size for stream, size in every.items() if stream[-1] not in "FB"),
    }
    profile = facts.evidence.fetched.document()
    wrong = [f"{name} {profile[name]}, not {size}" for name, size in wanted.items() if profile[name] != size]
    check = Check("the job's own profile has the predicted bytes", not wrong, "; ".join(wrong))
    return {"profile": profile, "why": ""}, [check]


# --- time ---


def _times(facts: Facts) -> list[dict[str, Any]]:
    if not is_planned(facts.asked):
        return []
    replayed = [
        r for r in facts.recoveries if r.replay_expected and r.made("replay_end") and r.seconds is not None
    ]
    profile = facts.evidence.fetched
    if profile is None:
        why = f"INCONCLUSIVE: {facts.evidence.not_fetched}"
        return [{"generation": r.generation, "ratio": None, "within": None, "why": why} for r in replayed]
    return [_compared(facts, recovery, profile) for recovery in replayed]


def _compared(facts: Facts, recovery: Recovery, profile: Profile) -> dict[str, Any]:
    from swift_ft.lab.plan.model import CostModel  # numpy

    model = CostModel(profile)
    assert recovery.seconds is not None
    runs: list[dict[str, Any]] = []
    for first, last, steps, loads in _runs(recovery):
        copies, shared = _copies(recovery, first, last, steps)
        runs.append(
            {
                "stages": [first, last],
                "copies": copies,
                "steps": steps,
                "shared_steps": shared,
                "load_seconds": float(model.load_s[first : last + 1].max()) if loads else 0.0,
                "step_seconds": model.replay_step_with(first, last + 1, copies),
                "alone_step_seconds": model.replay_step_with(first, last + 1, 1),
            }
        )
    predicted: float = max(
        run["load_seconds"]
        + run["shared_steps"] * run["step_seconds"]
        + (run["steps"] - run["shared_steps"]) * run["alone_step_seconds"]
        for run in runs
    )
    took = recovery.seconds["restore"] + _replay_s(facts.events, recovery)
    ratio = took / predicted
    why = why_not(facts)
    return {
        "generation": recovery.generation,
        "replayed": runs,
        "predicted_seconds": predicted,
        "measured_seconds": took,
        "ratio": ratio,
        "within": None if why else abs(ratio - 1) <= TOLERANCE,
        "why": why,
    }


def _copies(recovery: Recovery, first: int, last: int, steps: int) -> tuple[int, int]:
    """Returns (number of ranks, owner and helpers, that replay such a run; number of steps they share)."""
    ended = {event["rank"]: event for event in recovery.made("replay_end")}
    copies = {
        (1 + len(begun["helpers"]), int(ended[begun["rank"]]["shared_steps"]))
        for begun in recovery.made("help_begin")
        if first <= begun["rank"] <= last and begun["rank"] in ended
    }
    return copies.pop() if len(copies) == 1 else (1, 0)


def _replay_s(events: Sequence[Event], recovery: Recovery) -> float:
    """Returns seconds from when all replaying ranks have begun until the last has finished. Before that the first ones
    wait for a fresh process, whose log is opened."""
    ended = max(event["t"] for event in recovery.made("replay_end"))
    begun = max(
        event["t"]
        for event in events
        if event["event"] == "replay_begin" and event.get("generation") == recovery.generation
    )
    return float(ended - begun)


def why_not(facts: Facts) -> str:
    """Returns why the times cannot be compared; empty: they can."""
    if MODELS[facts.asked.model].forward_s:
        return ""
    ranks = facts.asked.topology.ranks
    if facts.evidence.cores is not None and facts.evidence.cores >= ranks:
        return ""
    return (
        f"INCONCLUSIVE: {ranks} ranks compute on {facts.evidence.cores or 'an unknown number of'} cores, so a step is "
        "slower than a replay by fewer ranks; --model paced has stages that take a fixed time"
    )


def _runs(recovery: Recovery) -> list[tuple[int, int, int, bool]]:
    """Returns (first stage, last stage, steps, whether a checkpoint is loaded) of each concurrent replay. Neighbours
    that begin at the same version feed each other as one pipeline."""
    plan = recovery.plan or {}
    target, runs = int(plan["target_version"]), list[tuple[int, int, int, bool]]()
    for entry in sorted(plan["ranks"], key=lambda entry: entry["rank"]):
        steps = target - entry["from_version"]
        if steps <= 0:
            continue
        rank, loads = int(entry["rank"]), str(entry["strategy"]).lower() == "replay"
        if runs and runs[-1][1] == rank - 1 and runs[-1][2] == steps:
            first, _, _, loaded = runs.pop()
            runs.append((first, rank, steps, loads or loaded))
        else:
            runs.append((rank, rank, steps, loads))
    return runs


# Replays that other ranks helped with, from the trace. Pure.


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


def check_helpers(helpers: int, recoveries: Sequence[Recovery]) -> list[Check]:
    """Checks that planned help was given, in the recoveries that were not interrupted."""
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
    silent = sum(len((recovery.made_by or {})["help"]) for recovery in planned) - len(helped_replays(planned))
    if silent > 0:
        return [Check(name, None, "a shared replay is not in the trace")]
    return [Check(name, not without, "; ".join(without))]


def words(shared: Mapping[str, Any]) -> str:
    if not shared["helpers"]:
        return f"rank {shared['rank']} replayed alone"
    names = ", ".join(map(str, shared["helpers"]))
    shares = " + ".join(map(str, shared["shares"]))
    return f"rank {shared['rank']} and {names} ({shares} microbatches of a step): {shared['steps']} steps"


STEP_S_MIN = 0.1
"""Shortest step whose time is judged where ranks share cores: a message between threads takes a millisecond or two."""
_WORDS = {"compute": "computing", "log": "the log", "neighbour": "a stage beside it", "line": "the line"}


def replays(facts: Facts, recovery: Recovery) -> list[dict[str, Any]]:
    """Returns for each finished replay where its time went and what was predicted. Only the replay predicted to take
    longest is judged, because all others wait for it."""
    predictions = (recovery.plan or {}).get("predictions") or []
    predicted = {int(each["rank"]): float(each["seconds"]) for each in predictions}
    longest = max(predicted, key=lambda rank: predicted[rank], default=None)
    shown = []
    for end in recovery.made("replay_end"):
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
                "ratio": ratio,
                "within": abs(ratio - 1) <= TOLERANCE if ratio and judged and not why else None,
                "why": why,
            }
        )
    return shown


def _why_not(facts: Facts, expected: float, steps: int) -> str:
    """Returns why the time cannot be compared; empty: it can."""
    if why := why_not(facts):
        return why
    if expected < steps * STEP_S_MIN and (facts.evidence.cores or 0) < facts.asked.topology.ranks:
        return (
            f"INCONCLUSIVE: where ranks share cores a step of {expected / steps * 1000:.0f} ms is made of messages as "
            "much as of what it computes; more --microbatches make it longer"
        )
    return ""


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
    """Returns the checks of replays and interruptions. `shown`: the recoveries of the report."""
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
    """Returns which resource limited a replay, and whether it took what was predicted, as text."""
    spent = replay["split"]
    rest = ", ".join(f"{spent[name]:.2f} s {_WORDS[name]}" for name in _WORDS if spent[name] >= 0.005)
    pace = f"{_WORDS[replay['bottleneck']]} ({rest or 'no time at all'} of {replay['seconds']:.2f} s)"
    if replay["ratio"] is None:
        return f"rank {replay['rank']}: {pace}"
    judged = {True: "within a quarter", False: "NOT within a quarter", None: replay["why"] or "not judged"}
    return f"rank {replay['rank']}: {pace}; {replay['predicted_seconds']:.2f} s predicted: {judged[replay['within']]}"


def cut_short(interruption: Mapping[str, Any]) -> str:
    """Returns the cost of a helper's death to the replay that it helped, as text."""
    seconds, helper, owner = (interruption[name] for name in ("seconds", "helper", "owner"))
    on = "it did not go on" if seconds is None else f"it went on after {seconds:.2f} s"
    return (
        f"rank {helper} died while it helped rank {owner}: {interruption['steps_kept']} steps were done and kept, "
        f"{interruption['steps_again']} done again; {on}"
    )

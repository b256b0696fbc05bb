"""The report's part on replays: what limited them, whether they took the predicted time, and what an interruption cost.
Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import LogLossFault
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.topology import MODELS, NORM_BYTES
from swift_ft.lab.drill.verdict_checks import Check, all_of
from swift_ft.lab.plan.profile import RATE_MAX, Profile
from swift_ft.log import record
from swift_ft.planner import Assignment, Help, RankPlan, Strategy
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.replay_cost import Predictor, StageCost

# The planner's predictions for the drill's recovery groups, compared with measurements. Pure.
#
# Bytes per stream and step follow from the sizes of the model, V = 2 M b s h e for a boundary (docs/planning.md). They
# must equal what ranks logged in every step, and what is in the log. Recovery times follow from the planner's
# cost model, with a profile that was measured in the same run before its first failure.

TOLERANCE = 0.25
"""Allowed deviation from a recovery's predicted time, relative to it."""
_WARM_STEPS = 2
"""Number of first steps left out: they allocate memory and infer shapes."""
_UNKNOWN_MTBF_S = 86400.0
_SHOWN = 4
"""Number of differences that a detail lists."""


def section(facts: Facts) -> tuple[dict[str, Any] | None, list[Check]]:
    """Returns `prediction` of the report and its checks; (None, []) without recovery groups."""
    if not facts.asked.groups.starts:
        return None, []
    sizes, bytes_check = _bytes(facts)
    times, profile = _times(facts)
    of_job, of_job_checks = _of_job(facts)
    checks = [bytes_check, *of_job_checks]
    judged = [time for time in times if time["within"] is not None]
    if judged:
        apart = ", ".join(f"{time['ratio']:.2f} of what was predicted" for time in judged)
        checks.append(Check("recovery takes what was predicted", all_of(t["within"] for t in judged), apart))
    shown = {
        "groups": str(facts.asked.groups),
        "bytes": sizes,
        "recoveries": times,
        "profile": None if profile is None else profile.document(),
        "of_job": of_job,
    }
    return shown, checks


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
    wanted = predicted_streams(facts.asked)
    given: defaultdict[str, Counter[int]] = defaultdict(Counter)
    steps: Counter[int] = Counter()
    for event in facts.events:
        if event["event"] != "profiled":
            continue
        steps[event["rank"]] += 1
        for stream in {*event["logged"], *_written_by(facts.asked, event["rank"], wanted)}:
            given[stream][event["logged"].get(stream, 0)] += 1
    other = {
        stream: sorted(sizes) for stream, sizes in given.items() if set(sizes) != {wanted.get(stream, 0)}
    }
    unseen = sorted(set(wanted) - set(given))
    kept, wrong_in_log = _in_log(facts, wanted)
    equal = None if not steps or unseen else not (other or wrong_in_log)
    shown = {
        "per_step": {
            "predicted": sum(wanted.values()),
            "measured": None if other or unseen else sum(max(sizes) for sizes in given.values()),
        },
        "streams": {
            stream: {"predicted": wanted.get(stream, 0), "measured": sorted(given[stream])}
            for stream in sorted({*wanted, *given})
        },
        "steps": sum(steps.values()),
        "in_log": kept,
        "equal": equal,
    }
    wrong = [f"{stream} {sizes}, not {wanted.get(stream, 0)}" for stream, sizes in sorted(other.items())]
    wrong += wrong_in_log
    if len(wrong) > _SHOWN:
        wrong[_SHOWN:] = [f"and {len(wrong) - _SHOWN} more"]
    detail = "; ".join(wrong) or (f"nothing was told of {', '.join(unseen)}" if unseen else "")
    return shown, Check("the log takes the predicted bytes", equal, detail or "no step was measured")


def _written_by(config: DrillConfig, rank: int, wanted: Mapping[str, int]) -> list[str]:
    """Returns the streams to which a rank must write in each of its steps."""
    shape = config.topology
    names = {record.collectives(rank)} | {
        record.boundary(stage, kind, shape.dp_rank(rank), shape.replicas)
        for stage in shape.stages_of(rank)
        for kind in record.KINDS
    }
    return sorted(names & set(wanted))


def _in_log(facts: Facts, wanted: Mapping[str, int]) -> tuple[dict[str, Any] | None, list[str]]:
    """Compares the log at the end with `wanted`: it must hold the steps after the newest complete checkpoint. Returns
    (section or None, differences)."""
    lossy = any(isinstance(fault, LogLossFault) for fault in facts.asked.faults)
    if facts.measured.in_log is None or lossy:
        return None, []
    complete = [int(e["version"]) for e in facts.events if e["event"] == "checkpoint_complete"]
    steps = list(range(max(complete, default=0), facts.asked.topology.steps))
    wrong = [
        f"{stream} of step {step} is in the log with {facts.measured.in_log.get(stream, {}).get(step, 0)} bytes, "
        f"not {wanted.get(stream, 0)}"
        for step in steps
        for stream in sorted({*wanted, *facts.measured.in_log})
        if facts.measured.in_log.get(stream, {}).get(step, 0) != wanted.get(stream, 0)
    ]
    return {"steps": steps, "equal": not wrong if steps else None}, wrong


def _of_job(facts: Facts) -> tuple[dict[str, Any], list[Check]]:
    """Checks the bytes in the profile that the ranks report to their coordinator: of all boundaries, also those inside
    a group."""
    if facts.measured.fetched is None:
        return {"profile": None, "why": facts.measured.not_fetched}, []
    every = predicted_streams(facts.asked, RecoveryGroups())
    last = facts.asked.topology.stages - 1
    wanted = {
        "forward_bytes": [every[f"s{boundary}.F"] for boundary in range(last)],
        "backward_bytes": [every[f"s{boundary + 1}.B"] for boundary in range(last)],
        "other_bytes": sum(size for stream, size in every.items() if stream[-1] not in "FB"),
    }
    profile = facts.measured.fetched.document()
    wrong = [f"{name} {profile[name]}, not {size}" for name, size in wanted.items() if profile[name] != size]
    check = Check("the job's own profile has the predicted bytes", not wrong, "; ".join(wrong))
    return {"profile": profile, "why": ""}, [check]


# --- time ---


def _times(facts: Facts) -> tuple[list[dict[str, Any]], Profile | None]:
    replayed = [
        r for r in facts.recoveries if r.replay_expected and r.made("replay_end") and r.seconds is not None
    ]
    shape = facts.asked.topology
    if shape.replicas > 1 or shape.stages_per_rank > 1 or not replayed:
        return [], None
    try:
        profile = measured_profile(facts)
    except Missing as missing:
        return [_unjudged(recovery, str(missing)) for recovery in replayed], None
    return [_compared(facts, recovery, profile) for recovery in replayed], profile


def before_the_first_failure(events: Sequence[Event]) -> list[Event]:
    until = min((e["t"] for e in events if e["event"] == "fault"), default=float("inf"))
    return [event for event in events if event["t"] < until]


class Missing(Exception):
    """Raised if a value was not measured in this run."""


def measured_profile(facts: Facts) -> Profile:
    """Returns the profile of the steps before the first failure; the log's read rate is measured in the replays. Raises
    Missing if a value was not measured."""
    shape, model = facts.asked.topology, MODELS[facts.asked.model]
    before = before_the_first_failure(facts.events)
    boundary = shape.microbatches * model.boundary_bytes
    sizes = facts.measured.checkpoint_bytes or {}
    if any(rank not in sizes for rank in range(shape.ranks)):
        raise Missing("no checkpoint is left to measure")
    saves = [(sizes[rank], seconds) for rank, seconds in _saves(before)]
    if not saves:
        raise Missing("no checkpoint was saved before the failure")
    wanted = predicted_streams(facts.asked)
    other = [size for stream, size in wanted.items() if stream[-1] not in "FB"]
    rate = min(_read_rate(facts.events), RATE_MAX)
    try:
        return Profile(
            name=f"drill, {facts.asked.model} model",
            source="measured in the drill; how often machines fail, and how quickly the log is written, is not",
            microbatches=shape.microbatches,
            forward_s=tuple(compute_s(before, rank, "F", shape.microbatches) for rank in range(shape.ranks)),
            backward_s=tuple(compute_s(before, rank, "B", shape.microbatches) for rank in range(shape.ranks)),
            update_s=tuple(update_s(before, rank) for rank in range(shape.ranks)),
            step_s=_step_s(before),
            forward_bytes=(boundary,) * (shape.stages - 1),
            backward_bytes=(boundary,) * (shape.stages - 1),
            other_bytes=sum(other),
            machine_of_stage=tuple(range(shape.stages)),
            log_write_bytes_per_s=rate,
            log_read_bytes_per_s=rate,
            checkpoint_interval_steps=shape.checkpoint_every,
            checkpoint_bytes=tuple(sizes[rank] for rank in range(shape.ranks)),
            checkpoint_bytes_per_s=median(size / seconds for size, seconds in saves),
            machine_mtbf_s=(_UNKNOWN_MTBF_S,) * shape.stages,
        )
    except UsageError as error:
        raise Missing(str(error)) from None


def _steps(before: Sequence[Event], rank: int) -> list[Event]:
    steps = [
        event
        for event in before
        if event["event"] == "profiled" and event["rank"] == rank and event["step"] >= _WARM_STEPS
    ]
    if not steps:
        raise Missing(f"rank {rank} has done too few steps before the failure")
    return steps


def compute_s(before: Sequence[Event], rank: int, kind: str, microbatches: int) -> float:
    seconds = [float(event["seconds"].get(f"s{rank}.{kind}", 0.0)) for event in _steps(before, rank)]
    return median(seconds) / microbatches


def update_s(before: Sequence[Event], rank: int) -> float:
    return median(float(event["update_s"]) for event in _steps(before, rank))


def _step_s(before: Sequence[Event]) -> float:
    begun: dict[tuple[int, int], float] = {}
    took: list[float] = []
    for event in before:
        if event["event"] == "step_begin":
            begun[event["rank"], event["step"]] = event["t"]
        elif event["event"] == "step_end" and event["step"] >= _WARM_STEPS:
            took.append(event["t"] - begun[event["rank"], event["step"]])
    return median(took)


def _saves(before: Sequence[Event]) -> list[tuple[int, float]]:
    """Returns (rank, seconds) of each checkpoint, from the end of its last step until it was durable."""
    ended = {(e["rank"], e["step"] + 1): e["t"] for e in before if e["event"] == "step_end"}
    return [
        (e["rank"], e["t"] - ended[e["rank"], e["version"]])
        for e in before
        if e["event"] == "checkpoint_durable" and (e["rank"], e["version"]) in ended
    ]


def _read_rate(events: Sequence[Event]) -> float:
    """Returns the log's read rate over all replays: bytes per second of waiting for the log."""
    reads = [event["read"] for event in events if event["event"] == "profiled" and event["replay"]]
    waited = sum(seconds for _, seconds in reads)
    return sum(size for size, _ in reads) / waited if waited else RATE_MAX


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
        # The model predicts loading a state and replaying steps. The other phases are taken as measured.
        "predicted_seconds": predicted,
        "measured_seconds": took,
        "total": {
            "predicted_seconds": predicted + recovery.seconds["total"] - took,
            "measured_seconds": recovery.seconds["total"],
        },
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


def _unjudged(recovery: Recovery, why: str) -> dict[str, Any]:
    return {"generation": recovery.generation, "ratio": None, "within": None, "why": f"INCONCLUSIVE: {why}"}


def why_not(facts: Facts) -> str:
    """Returns why the times cannot be compared; empty: they can."""
    if MODELS[facts.asked.model].forward_s:
        return ""
    ranks = facts.asked.topology.ranks
    if facts.measured.cores is not None and facts.measured.cores >= ranks:
        return ""
    return (
        f"INCONCLUSIVE: {ranks} ranks compute on {facts.measured.cores or 'an unknown number of'} cores, so a step is "
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
    predicted, by = _predicted(facts, recovery)
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
                "predicted_by": by if expected is not None else None,
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
    if expected < steps * STEP_S_MIN and (facts.measured.cores or 0) < facts.asked.topology.ranks:
        return (
            f"INCONCLUSIVE: where ranks share cores a step of {expected / steps * 1000:.0f} ms is made of messages as "
            "much as of what it computes; more --microbatches make it longer"
        )
    return ""


def _predicted(facts: Facts, recovery: Recovery) -> tuple[dict[int, float], str]:
    """Returns (rank -> predicted seconds, source): from the plan if it has predictions, else from the profile measured
    before the first failure."""
    plan = recovery.plan or {}
    if plan.get("predictions"):
        return {int(each["rank"]): float(each["seconds"]) for each in plan["predictions"]}, "plan"
    shape = facts.asked.topology
    if shape.replicas > 1 or shape.stages_per_rank > 1 or not recovery.replay_expected:
        return {}, ""
    try:
        costs = _costs(facts)
    except Missing:
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
    before = before_the_first_failure(facts.events)
    return {
        rank: StageCost(
            microbatches=microbatches,
            microbatch_s=sum(compute_s(before, rank, kind, microbatches) for kind in "FB"),
            update_s=update_s(before, rank),
        )
        for rank in range(facts.asked.topology.ranks)
    }


def interruptions(events: Sequence[Event], recovery: Recovery) -> list[dict[str, Any]]:
    """Returns, for each helper that died while helping, the steps its owner kept and repeated, and when the owner
    continued."""
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
    """Returns phase -> seconds from the kill to the owner's next step: until the coordinator detected it; until there
    was a plan; until the owner replayed again, with groups rebuilt and a fresh process in them; until its first
    step."""
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
    """Returns which resource limited a replay, as text."""
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
    """Returns the cost of a helper's death to the replay that it helped, as text."""
    seconds, helper, owner = (interruption[name] for name in ("seconds", "helper", "owner"))
    on = "it did not go on" if seconds is None else f"it went on after {seconds:.2f} s"
    return (
        f"rank {helper} died while it helped rank {owner}: {interruption['steps_kept']} steps were done and kept, "
        f"{interruption['steps_again']} done again; {on}"
    )

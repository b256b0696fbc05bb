"""What the planner predicts for the drill's recovery groups, beside what was measured. Pure.

Bytes per stream and step follow from the sizes of the model, V = 2 M b s h e for a boundary (docs/planning.md). They
must be what ranks gave to the log in every step, and what is in the log. Recovery times follow from the planner's cost
model, with a profile that was measured in the same run before its first failure.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from swift.drill import regroup
from swift.drill.config import DrillConfig
from swift.drill.facts import Facts
from swift.drill.sizes import MODELS, NORM_BYTES
from swift.drill.timeline import Event, Recovery
from swift.drill.verdict_checks import Check, all_of
from swift.errors import UsageError
from swift.failures.grammar import LogLossFault
from swift.log import streams
from swift.plan.profile import RATE_MAX, Profile
from swift.recovery.groups import RecoveryGroups

TOLERANCE = 0.25
"""Of a recovery's predicted time."""
_WARM_STEPS = 2
"""The first steps allocate memory and infer shapes."""
_UNKNOWN_MTBF_S = 86400.0
_SHOWN = 4
"""So much of what is wrong is told."""


def section(facts: Facts) -> tuple[dict[str, Any] | None, list[Check]]:
    """`prediction` of the report and what the verdict rests on; (None, []) without recovery groups."""
    if not facts.asked.groups.starts:
        return None, []
    sizes, bytes_check = _bytes(facts)
    regroups, regroup_checks = regroup.section(facts.asked.regroups, facts.asked.groups, facts.events)
    times, profile = _times(facts)
    of_job, of_job_checks = _of_job(facts)
    checks = [bytes_check, *of_job_checks, *regroup_checks]
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
        **({"regroups": regroups} if regroups is not None else {}),
    }
    return shown, checks


def is_planned(config: DrillConfig) -> bool:
    """`swift-ft plan` knows such jobs."""
    shape = config.topology
    return bool(config.groups.starts) and shape.replicas == 1 and shape.stages_per_rank == 1


# --- bytes ---


def predicted_streams(config: DrillConfig, groups: RecoveryGroups | None = None) -> dict[str, int]:
    """stream -> raw bytes that each step gives to the log; what is not named logs nothing. `groups`: others than the
    drill's."""
    shape, model, bytes_of = config.topology, MODELS[config.model], {}
    groups = config.groups if groups is None else groups
    if not groups.logs:
        return {}
    for dp_rank in range(shape.replicas):
        for stage in range(shape.stages):
            for neighbour, kind in ((stage + 1, "F"), (stage - 1, "B")):
                if 0 <= neighbour < shape.stages and shape.is_logged(stage, neighbour, groups):
                    name = streams.boundary(stage, kind, dp_rank, shape.replicas)
                    bytes_of[name] = shape.microbatches * model.boundary_bytes
        for stage, kind in ((0, "X"), (shape.stages - 1, "T")):
            name = streams.boundary(stage, kind, dp_rank, shape.replicas)
            bytes_of[name] = shape.microbatches * model.batch_bytes
    if config.updates == "after_backward":
        bytes_of |= {streams.collectives(rank): NORM_BYTES for rank in range(shape.ranks)}
    return bytes_of


def _bytes(facts: Facts) -> tuple[dict[str, Any], Check]:
    of_groups = _OfGroups(facts.asked)
    groups = (regroup.history(facts.asked.groups, facts.events)[-1].groups,)
    wanted = of_groups.streams(groups)
    given: defaultdict[str, Counter[int]] = defaultdict(Counter)
    steps: Counter[int] = Counter()
    other: dict[str, list[int]] = {}
    for event in facts.events:
        if event["event"] != "profiled":
            continue
        by = regroup.logged_by(event, facts.asked.groups)
        expected = of_groups.streams(by)
        steps[event["rank"]] += 1
        for stream in {*event["logged"], *_written_by(facts.asked, event["rank"], expected)}:
            size = event["logged"].get(stream, 0)
            if size != expected.get(stream, 0):
                other[stream] = sorted({*other.get(stream, []), size})
            if by == groups:
                given[stream][size] += 1
            of_groups.see(by, int(event["step"]), stream, size)
    unseen = sorted(set(wanted) - set(given))
    kept, wrong_in_log = _in_log(facts, of_groups)
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
        **({"by_groups": of_groups.shown()} if facts.asked.regroups else {}),
        "in_log": kept,
        "equal": equal,
    }
    wrong = [f"{stream} {sizes}, not {wanted.get(stream, 0)}" for stream, sizes in sorted(other.items())]
    wrong += wrong_in_log
    if len(wrong) > _SHOWN:
        wrong[_SHOWN:] = [f"and {len(wrong) - _SHOWN} more"]
    detail = "; ".join(wrong) or (f"nothing was told of {', '.join(unseen)}" if unseen else "")
    return shown, Check("the log takes the predicted bytes", equal, detail or "no step was measured")


class _OfGroups:
    """What the steps log that are logged by one or several groups."""

    def __init__(self, config: DrillConfig) -> None:
        self._config = config
        self._streams: dict[tuple[str, ...], dict[str, int]] = {}
        self._sizes: dict[tuple[str, ...], dict[str, int]] = {}
        self._by_step: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def streams(self, by: tuple[str, ...]) -> dict[str, int]:
        """Whatever crosses any of them."""
        if by not in self._streams:
            self._streams[by] = {
                stream: size
                for groups in by
                for stream, size in predicted_streams(self._config, RecoveryGroups.parse(groups)).items()
            }
        return self._streams[by]

    def see(self, by: tuple[str, ...], step: int, stream: str, size: int) -> None:
        seen = self._sizes.setdefault(by, {})
        seen[stream] = max(size, seen.get(stream, 0))
        if stream in self.streams(by):
            self._by_step[step][stream] = self.streams(by)[stream]

    def of_step(self, step: int) -> Mapping[str, int]:
        """stream -> bytes, by whatever groups its writer has logged the step at any time."""
        return self._by_step[step] if self._config.regroups else self.streams((str(self._config.groups),))

    def shown(self) -> list[dict[str, Any]]:
        return [
            {
                "logged_by": list(by),
                "predicted": sum(self.streams(by).values()),
                # Not all ranks go from one to the next in the same step: what nobody logged so is not known.
                "measured": sum(sizes.values()) if set(sizes) >= set(self.streams(by)) else None,
            }
            for by, sizes in self._sizes.items()
        ]


def _written_by(config: DrillConfig, rank: int, wanted: Mapping[str, int]) -> list[str]:
    """The streams that a rank must have given something to in each of its steps."""
    shape = config.topology
    names = {streams.collectives(rank)} | {
        streams.boundary(stage, kind, shape.dp_rank(rank), shape.replicas)
        for stage in shape.stages_of(rank)
        for kind in streams.KINDS
    }
    return sorted(names & set(wanted))


def _in_log(facts: Facts, of_groups: "_OfGroups") -> tuple[dict[str, Any] | None, list[str]]:
    """What of the log was kept at the end: the steps behind the newest complete checkpoint. And what is wrong."""
    lossy = any(isinstance(fault, LogLossFault) for fault in facts.asked.faults)
    if facts.measured.in_log is None or lossy:
        return None, []
    complete = [int(e["version"]) for e in facts.events if e["event"] == "checkpoint_complete"]
    steps = list(range(max(complete, default=0), facts.asked.topology.steps))
    wrong = [
        f"{stream} of step {step} is in the log with {facts.measured.in_log.get(stream, {}).get(step, 0)} bytes, "
        f"not {of_groups.of_step(step).get(stream, 0)}"
        for step in steps
        for stream in sorted({*of_groups.of_step(step), *facts.measured.in_log})
        if facts.measured.in_log.get(stream, {}).get(step, 0) != of_groups.of_step(step).get(stream, 0)
    ]
    return {"steps": steps, "equal": not wrong if steps else None}, wrong


def _of_job(facts: Facts) -> tuple[dict[str, Any], list[Check]]:
    """What the ranks count for their coordinator: of all boundaries, those inside a group as well."""
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
    replayed = [r for r in facts.recoveries if r.replay_expected and r.replays and r.seconds is not None]
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
    """Something was not measured in this run."""


def measured_profile(facts: Facts) -> Profile:
    """Of the steps before the first failure; what the log gives to a replay is measured in the replays. Raises
    Missing if something was not measured."""
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
    """(rank, seconds) of each checkpoint: from the end of its last step until it was durable."""
    ended = {(e["rank"], e["step"] + 1): e["t"] for e in before if e["event"] == "step_end"}
    return [
        (e["rank"], e["t"] - ended[e["rank"], e["version"]])
        for e in before
        if e["event"] == "checkpoint_durable" and (e["rank"], e["version"]) in ended
    ]


def _read_rate(events: Sequence[Event]) -> float:
    """Of all replays: bytes over the seconds for which they waited for the log."""
    reads = [event["read"] for event in events if event["event"] == "profiled" and event["replay"]]
    waited = sum(seconds for _, seconds in reads)
    return sum(size for size, _ in reads) / waited if waited else RATE_MAX


def _compared(facts: Facts, recovery: Recovery, profile: Profile) -> dict[str, Any]:
    from swift.plan.model import CostModel  # numpy

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
        # What the model derives: a state loaded, and steps replayed. The rest is measured and taken as it is.
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
    """(in how many copies such a run is replayed, in how many of its steps): its owners and the helpers of each."""
    ended = {event["rank"]: event for event in recovery.replays}
    copies = {
        (1 + len(begun["helpers"]), int(ended[begun["rank"]]["shared_steps"]))
        for begun in recovery.helps
        if first <= begun["rank"] <= last and begun["rank"] in ended
    }
    return copies.pop() if len(copies) == 1 else (1, 0)


def _replay_s(events: Sequence[Event], recovery: Recovery) -> float:
    """Until the last has replayed, since all that replay have begun: until then the first wait for a fresh process,
    whose log is opened."""
    ended = max(event["t"] for event in recovery.replays)
    begun = max(
        event["t"]
        for event in events
        if event["event"] == "replay_begin" and event.get("generation") == recovery.generation
    )
    return float(ended - begun)


def _unjudged(recovery: Recovery, why: str) -> dict[str, Any]:
    return {"generation": recovery.generation, "ratio": None, "within": None, "why": f"INCONCLUSIVE: {why}"}


def why_not(facts: Facts) -> str:
    """Why the times cannot be compared; empty: they can."""
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
    """(first stage, last stage, steps, whether a checkpoint is loaded) of what replays side by side: neighbours that
    begin at the same version feed each other as one pipeline."""
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

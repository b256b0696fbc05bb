"""The report's parts that strategies add: checks and a section each. Pure.

They are derived from what ranks and the launcher reported, independently of the planner.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from swift_ft.fault_grammar import CorruptCopyFault, RankFault
from swift_ft.lab.drill import shrinking
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import TRAINED_FIELDS, Check
from swift_ft.planner import SETTINGS


def checks(facts: Facts) -> list[Check]:
    asked = facts.asked
    return [
        *(_shrink_checks(facts) if asked.shrinks else []),
        *([_steps_lost_check(facts)] if asked.snapshot_every else []),
        *([_newest_checkpoint_check(facts)] if SETTINGS[asked.strategy].only_restores else []),
        *(_lossy_checks(facts) if asked.finishes_cut_steps else []),
        *([_begun_again_check(facts)] if asked.strategy == "reinit" else []),
    ]


def sections(facts: Facts) -> dict[str, Any]:
    """Returns section name -> its content; None where it does not apply."""
    asked = facts.asked
    return {
        "shrink": _shrink(facts) if asked.shrinks else None,
        "snapshot": _snapshot(facts) if asked.snapshot_every else None,
        "checkpoint": _checkpoint(facts),
        "lossy": _lossy(facts) if asked.finishes_cut_steps else None,
        "reinit": _reinit(facts) if asked.strategy == "reinit" else None,
    }


# shrink, rollback and auto with a lost-shard policy: vacant slots, and the ranks that computed their batches.


def _shrink_checks(facts: Facts) -> list[Check]:
    if shrinking.moves(facts.asked):
        return [_moved_check(facts)]
    calculation = [_calculation_check(facts)] if facts.asked.drops else []
    return [_vacant_check(facts), *_growth_checks(facts), *calculation]


def _vacant_check(facts: Facts) -> Check:
    """Checks that every lost rank left the slots of its cell vacant, and no other did."""
    name = "the slots of lost ranks were left vacant"
    lost = shrinking.vacated(facts.asked)
    left = {event["rank"] for event in facts.named("left_vacant")}
    seen = {rank for recovery in facts.recoveries for rank in recovery.vacant}
    if not lost:
        return Check(name, None, "no rank was to be lost")
    if not facts.recoveries:
        return Check(name, None, "no recovery in the trace")
    return Check(
        name, lost == left == seen, f"lost {sorted(lost)}, left vacant {sorted(left)}, without {sorted(seen)}"
    )


def _moved_check(facts: Facts) -> Check:
    """Checks that every lost rank, and no other, got a process in the place of another rank."""
    lost, moved = shrinking.victims(facts.asked), set(_moves(facts))
    return Check(
        "the stages of lost ranks moved", lost == moved, f"lost {sorted(lost)}, moved {sorted(moved)}"
    )


def _moves(facts: Facts) -> dict[int, int]:
    """Returns lost rank -> the rank whose place its new process shares."""
    return {event["rank"]: event["beside"] for event in facts.named("moved")}


def _growth_checks(facts: Facts) -> list[Check]:
    lost, version = shrinking.vacated(facts.asked), facts.asked.grown_at
    last = facts.recoveries[-1].vacant if facts.recoveries else frozenset()
    if version is None:
        return [Check("they stayed vacant", last == lost, f"vacant at the end: {sorted(last)}")]
    came = {rank: r.target_version for r in facts.recoveries for rank in r.returned}
    wanted = dict.fromkeys(lost, version)
    detail = f"rank -> version: {came}, not {wanted}"
    return [Check("lost ranks came back when they were to", came == wanted and not last, detail)]


def _computed_for(event: dict[str, Any], facts: Facts) -> int:
    """Returns the lost rank whose origin's batch another rank of the same stage computed."""
    rank, places = event["rank"], facts.asked.topology.places
    return int(rank // places * places + event["origin"])


def _calculation_check(facts: Facts) -> Check:
    """Checks that the calculation has the failure-free run's bits until the first loss, so that it calculates the right
    thing."""
    name = "the calculation has the failure-free run's bits until the loss"
    evidence = facts.evidence
    lost = [r.target_version for r in facts.recoveries if r.vacant and r.target_version is not None]
    until = min([*lost, *lossy_buckets(facts.events)], default=-1)
    pairs = [
        (evidence.calculated.get(version), evidence.twin.digests.get(f"rank0-v{version}"))
        for version in range(1, until + 1)
    ]
    known = [(ours, twin) for ours, twin in pairs if ours is not None and twin is not None]
    if not known or len(known) < len(pairs):
        return Check(name, None, "no digests to compare")
    equal = [all(ours[field] == twin[field] for field in TRAINED_FIELDS) for ours, twin in known]
    return Check(name, all(equal), f"{equal.count(False)} of {len(equal)} versions differ")


def _shrink(facts: Facts) -> dict[str, Any]:
    adopted = Counter((_computed_for(e, facts), e["rank"]) for e in facts.named("adopted_step"))
    return {
        "lost_shard": "drop" if facts.asked.drops else "redistribute",
        "moved": {str(rank): beside for rank, beside in sorted(_moves(facts).items())},
        "vacant_after": [sorted(recovery.vacant) for recovery in facts.recoveries],
        "returned": {
            str(rank): recovery.target_version
            for recovery in facts.recoveries
            for rank in sorted(recovery.returned)
        },
        "batches_computed_for": [
            {"rank": lost, "by": rank, "steps": count} for (lost, rank), count in sorted(adopted.items())
        ],
        "compared_with": "an independent calculation" if facts.asked.drops else "the failure-free run",
        "compared_at_end": sorted(map(int, facts.at_end.ranks)),
    }


# Snapshots: the copies, the ones restored, and their cost.


def may_leave_snapshots(facts: Facts) -> bool:
    """Returns whether a fallback to a checkpoint is permitted: no snapshot is whole any more, the checkpoint is as new
    as the newest one, or a snapshot was refused."""
    every = facts.asked.snapshot_every
    corrupt = any(isinstance(fault, CorruptCopyFault) for fault in facts.asked.faults)
    return every > 0 and (
        corrupt
        or all(
            "no snapshot of rank" in r.fell_back or (r.steps_lost is not None and r.steps_lost < every)
            for r in facts.recoveries
            if r.fell_back
        )
    )


def _steps_lost_check(facts: Facts) -> Check:
    """Checks that at most the steps since the last snapshot and those in progress were lost."""
    name = "no more steps were lost than there are between snapshots"
    lost = [
        recovery.steps_lost
        for recovery in facts.recoveries
        if any(strategy == "snapshot" for strategy, _ in recovery.strategies().values())
    ]
    if None in lost:
        return Check(name, None, "a recovery did not tell to which version it led")
    most = max((steps or 0 for steps in lost), default=0)
    return Check(
        name,
        most <= facts.asked.snapshot_every + 1,
        f"{most}, with --snapshot-every {facts.asked.snapshot_every}",
    )


def _snapshot(facts: Facts) -> dict[str, Any]:
    keepers: dict[int, set[int]] = {}
    for event in facts.named("snapshot_taken"):
        for rank in event["kept_for"]:
            keepers.setdefault(rank, set()).add(event["rank"])
    told = ("rank", "version", "source", "bytes", "seconds")
    return {
        "every": facts.asked.snapshot_every,
        "partners": {str(rank): sorted(keepers[rank]) for rank in sorted(keepers)},
        "restored": [{name: event[name] for name in told} for event in facts.named("snapshot_restored")],
    }


# Checkpoints: their cost, and the one to which all had to go back.


def _newest_checkpoint_check(facts: Facts) -> Check:
    name = "all went back to the newest complete checkpoint"
    complete: set[int] = set()
    planned, wrong = None, []
    for event in facts.events:
        match event["event"]:
            case "checkpoint_complete":
                complete.add(event["version"])
            case "plan":
                planned = event["target_version"]
                # A newer target was complete, but the coordinator was killed before it could record that.
                if not complete or planned < max(complete):
                    there = f"{max(complete)} was complete" if complete else "none was complete"
                    wrong.append(f"to version {planned}, and {there}")
            case "refused":
                complete.discard(planned)
            case "state" if event["state"] == "RUNNING" and planned is not None:
                complete = {version for version in complete if version <= planned}
    if planned is None:
        return Check(name, True, "none was needed")  # other checks decide whether one was needed
    return Check(name, not wrong, "; ".join(wrong))


def _checkpoint(facts: Facts) -> dict[str, Any]:
    """Returns bytes and seconds of one rank's part of a version; None where no rank reported any."""
    durable = [event for event in facts.named("checkpoint_durable") if "stall_s" in event]
    # Version 0 is left out: before the first step optimizers have no state.
    warm = [event for event in durable if event["version"] > 0]
    return {
        "mode": facts.asked.checkpoint_mode,
        "every": facts.asked.topology.checkpoint_every,
        "saved": len(durable),
        "bytes_max": max((event["bytes"] for event in warm), default=None),
        **{
            f"{name}_{of.__name__}": of(event[name] for event in warm) if warm else None
            for name in ("seconds", "stall_s")
            for of in (median, max)
        },
    }


# lossy-forward: the contributors of each bucket in a step interrupted by a loss.
#
# Every rank that has finished such a step reports its buckets (event "lossy_step"). The drill recomputes the step from
# them (`swift_ft.lab.drill.calculation`), so the report must match what was done, bit for bit. The checks verify that
# the reported buckets are possible.


Bucket = Mapping[str, Any]
"""One bucket. `parameters`: indices in the optimizer's order; `contributors`: data-parallel ranks; `divisor`."""


def lossy_buckets(events: Sequence[Event]) -> dict[int, list[Bucket]]:
    """Returns step -> its buckets, as reported by the first rank."""
    steps: dict[int, list[Bucket]] = {}
    for event in events:
        if event["event"] == "lossy_step":
            steps.setdefault(event["step"], event["buckets"])
    return steps


def _lossy_checks(facts: Facts) -> list[Check]:
    return [
        _finished_check(facts),
        _alike_check(facts),
        *(_possible_check(step, facts) for step in lossy_buckets(facts.events)),
    ]


def _finished_check(facts: Facts) -> Check:
    """Checks that steps with an interrupted reduction were finished. A rank killed in a reduction waits until the
    others are in it (`swift_ft.lab.drill.faults`)."""
    cut = {
        fault.step
        for fault in facts.asked.faults
        if isinstance(fault, RankFault) and fault.phase in ("reduce", "update")
    }
    finished = {
        recovery.target_version - 1
        for recovery in facts.recoveries
        for strategy, _ in recovery.strategies().values()
        if strategy in ("lossy_forward", "roll_forward") and recovery.target_version is not None
    }
    dropped = cut - finished
    return Check("steps whose reductions were cut short are finished", not dropped, f"not: {dropped}")


def _alike_check(facts: Facts) -> Check:
    first = lossy_buckets(facts.events)
    told = facts.named("lossy_step")
    other = [(e["rank"], e["step"]) for e in told if e["buckets"] != first[e["step"]]]
    return Check("all tell the same of these buckets", not other, f"(rank, step): {other}")


def _possible_check(step: int, facts: Facts) -> Check:
    """Checks that each parameter is in one bucket, and that each bucket is the mean over ranks that were present
    together."""
    name = f"the buckets of step {step} are means of ranks that were there together"
    buckets = lossy_buckets(facts.events)[step]
    numbers = sorted(number for bucket in buckets for number in bucket["parameters"])
    worlds = [sorted(world) for world in _worlds(step, facts)]
    wrong = [
        dict(bucket)
        for bucket in buckets
        if bucket["divisor"] != len(bucket["contributors"]) or list(bucket["contributors"]) not in worlds
    ]
    whole = numbers == list(range(len(numbers))) and bool(numbers)
    return Check(name, whole and not wrong, f"parameters {numbers}; not means over one of {worlds}: {wrong}")


def _worlds(step: int, facts: Facts) -> list[set[int]]:
    """Returns the ranks present in each generation in which this step may have been reduced."""
    ranks = set(range(facts.asked.topology.ranks))
    before: set[int] = ranks
    worlds = []
    for recovery in facts.recoveries:
        after = ranks - recovery.vacant
        if recovery.target_version is not None and recovery.target_version - 1 == step:
            worlds += [before, after]
            # Several losses in the same recovery: each of the lost ranks may have been the first.
            worlds += [before - {rank} for rank in before - after]
        before = after
    return worlds


def _lossy(facts: Facts) -> list[dict[str, Any]]:
    buckets = lossy_buckets(facts.events)
    return [{"step": step, "buckets": buckets[step]} for step in sorted(buckets)]


# reinit: the ranks that restarted their training function, and in which process.


def _begun_again_check(facts: Facts) -> Check:
    name = "every survivor began its training function again"
    if any(recovery.ended_t is None for recovery in facts.recoveries):
        return Check(name, None, "a recovery has no end")
    ranks = set(range(facts.asked.topology.ranks))
    missing = [
        f"recovery {number}: rank {rank} went on where it was"
        for number, recovery in enumerate(facts.recoveries, start=1)
        for rank in sorted(ranks - recovery.victims - {event["rank"] for event in recovery.named("reinit")})
    ]
    return Check(name, not missing, "; ".join(missing))


def _reinit(facts: Facts) -> dict[str, Any]:
    again = facts.named("reinit")
    return {"begun_again": [{"rank": event["rank"], "pid": event["pid"]} for event in again]}

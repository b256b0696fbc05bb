"""The report's part on shrinking the world: the vacant slots, and the ranks that computed their batches."""

from collections import Counter
from typing import Any

from swift_ft.lab.drill import lossy, shrinking
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import vacant_at
from swift_ft.lab.drill.verdict_checks import TRAINED_FIELDS, Check


def checks(facts: Facts) -> list[Check]:
    """Returns the additional checks of a drill whose strategy shrinks the world."""
    if not facts.asked.shrinks:
        return []
    if shrinking.moves(facts.asked):
        return [_moved_check(facts)]
    calculation = [_calculation_check(facts)] if facts.asked.drops else []
    return [_vacant_check(facts), *_growth_checks(facts), _shares_check(facts), *calculation]


def _vacant_check(facts: Facts) -> Check:
    """Checks that every lost rank left its slot vacant, and no other did."""
    name = "the slots of lost ranks were left vacant"
    lost = shrinking.victims(facts.asked)
    left = {int(event["rank"]) for event in facts.events if event["event"] == "left_vacant"}
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
    return {int(e["rank"]): int(e["beside"]) for e in facts.events if e["event"] == "moved"}


def _growth_checks(facts: Facts) -> list[Check]:
    lost, version = shrinking.victims(facts.asked), facts.asked.grown_at
    last = facts.recoveries[-1].vacant if facts.recoveries else frozenset()
    if version is None:
        return [Check("they stayed vacant", last == lost, f"vacant at the end: {sorted(last)}")]
    came = {rank: r.target_version for r in facts.recoveries for rank in r.returned}
    stepped = {e["rank"] for e in facts.events if e["event"] == "step_end" and e["step"] >= version}
    wanted = dict.fromkeys(lost, version)
    return [
        Check(
            "lost ranks came back when they were to", came == wanted, f"rank -> version: {came}, not {wanted}"
        ),
        Check(
            "and took part again",
            not last and lost <= stepped,
            f"steps behind were done by {sorted(stepped)}",
        ),
    ]


def _shares_check(facts: Facts) -> Check:
    """Checks that another rank computed the batch in every step done without a rank; with "drop", that none did."""
    name = (
        "nobody computed a lost batch" if facts.asked.drops else "every lost batch was computed, and no other"
    )
    computed: set[tuple[int, int]] = set()
    shared: dict[tuple[int, int], set[int]] = {}
    """(step, lost rank) -> microbatches computed, where several ranks share a batch."""
    needless = []
    for event in facts.events:
        if event["event"] == "adopted_step":
            lost = _computed_for(event, facts)
            microbatches = shared.setdefault((event["step"], lost), set())
            microbatches.update(event.get("microbatches", range(facts.asked.topology.microbatches)))
            if len(microbatches) == facts.asked.topology.microbatches:
                computed.add((event["step"], lost))
            # By time, not by version: a step undone when a rank rejoins was done without that rank.
            before = [r.vacant for r in facts.recoveries if r.ended_t is not None and r.ended_t <= event["t"]]
            if not before or lost not in before[-1]:
                needless.append((event["step"], lost))
    if facts.asked.drops:
        return Check(name, not computed, f"{len(computed)} were")
    wanted = {
        (step, rank)
        for step in range(facts.asked.topology.steps)
        for rank in vacant_at(step, facts.recoveries)
    }
    if not wanted:
        return Check(name, None, "no step was done without a rank")
    without = sorted(wanted - computed)
    return Check(
        name, not without and not needless, f"(step, rank) by nobody: {without}; not lost: {needless}"
    )


def _computed_for(event: dict[str, Any], facts: Facts) -> int:
    """Returns the lost rank whose origin's batch another rank of the same stage computed."""
    rank, replicas = int(event["rank"]), facts.asked.topology.replicas
    return rank // replicas * replicas + int(event["origin"])


def _calculation_check(facts: Facts) -> Check:
    """Checks that the calculation has the failure-free run's bits until the first loss, so that it calculates the right
    thing."""
    name = "the calculation has the failure-free run's bits until the loss"
    evidence = facts.evidence
    lost = [r.target_version for r in facts.recoveries if r.vacant and r.target_version is not None]
    until = min([*lost, *lossy.told(facts.events)], default=-1)
    pairs = [
        (evidence.calculated.get(version), evidence.twin_digests.get(f"rank0-v{version}"))
        for version in range(1, until + 1)
    ]
    known = [(ours, twin) for ours, twin in pairs if ours is not None and twin is not None]
    if not known or len(known) < len(pairs):
        return Check(name, None, "no digests to compare")
    equal = [all(ours[field] == twin[field] for field in TRAINED_FIELDS) for ours, twin in known]
    return Check(name, all(equal), f"{equal.count(False)} of {len(equal)} versions differ")


def section(facts: Facts) -> dict[str, Any] | None:
    """Returns `shrink` of the report; None with another strategy."""
    if not facts.asked.shrinks:
        return None
    adopted = Counter(
        (_computed_for(e, facts), int(e["rank"])) for e in facts.events if e["event"] == "adopted_step"
    )
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

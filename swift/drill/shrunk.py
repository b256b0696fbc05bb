"""What the strategy "shrink" adds to a report: which slots were vacant, and who computed their batches."""

from collections import Counter
from typing import Any

from swift.drill import shrinking
from swift.drill.facts import Facts
from swift.drill.timeline import vacant_at
from swift.drill.verdict_checks import Check


def checks(facts: Facts) -> list[Check]:
    """Those that a drill of this strategy needs besides."""
    if not facts.asked.shrinks:
        return []
    return [_vacant_check(facts), *_growth_checks(facts), _shares_check(facts)]


def _vacant_check(facts: Facts) -> Check:
    """Every lost rank left its slot vacant, and no other did."""
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
    """In every step that was done without a rank its batch was computed by one other rank; with "drop" by nobody."""
    name = (
        "nobody computed a lost batch" if facts.asked.drops else "every lost batch was computed by one rank"
    )
    owners: dict[tuple[int, int], set[int]] = {}
    for event in facts.events:
        if event["event"] == "adopted_step":
            owners.setdefault((event["step"], event["origin"]), set()).add(event["rank"])
    if facts.asked.drops:
        return Check(name, not owners, f"{len(owners)} were")
    wanted = {
        (step, rank)
        for step in range(facts.asked.topology.steps)
        for rank in vacant_at(step, facts.recoveries)
    }
    if not wanted:
        return Check(name, None, "no step was done without a rank")
    # A step that is taken back in a later loss may have had another owner.
    without = sorted(wanted - owners.keys())
    others = sorted(owners.keys() - wanted)
    return Check(name, not without and not others, f"(step, rank) by nobody: {without}; not lost: {others}")


def section(facts: Facts) -> dict[str, Any] | None:
    """`shrink` of the report; None with another strategy."""
    if not facts.asked.shrinks:
        return None
    adopted = Counter(
        (int(e["origin"]), int(e["rank"])) for e in facts.events if e["event"] == "adopted_step"
    )
    return {
        "lost_shard": facts.asked.lost_shard or "redistribute",
        "vacant_after": [sorted(recovery.vacant) for recovery in facts.recoveries],
        "returned": {
            str(rank): recovery.target_version
            for recovery in facts.recoveries
            for rank in sorted(recovery.returned)
        },
        "batches_computed_for": [
            {"rank": origin, "by": rank, "steps": count} for (origin, rank), count in sorted(adopted.items())
        ],
        "compared_at_end": sorted(map(int, facts.at_end.ranks)),
    }

"""What the strategy "lossy-forward" adds to a report: of what buckets were made, in a step that a loss had cut short.

Every rank that has finished such a step tells it (event "lossy_step"). The drill calculates the step from there
(`swift_ft.lab.drill.calculation`), so what is told must be what was done, bit for bit, and here it must be what can be.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.fault_grammar import RankFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import Check

Bucket = Mapping[str, Any]
"""`parameters`: numbers in the optimizer's order; `contributors`: data-parallel ranks; `divisor`."""


def told(events: Sequence[Event]) -> dict[int, list[Bucket]]:
    """Step -> its buckets, as the first rank has told them."""
    steps: dict[int, list[Bucket]] = {}
    for event in events:
        if event["event"] == "lossy_step":
            steps.setdefault(int(event["step"]), event["buckets"])
    return steps


def checks(facts: Facts) -> list[Check]:
    """Those that a drill of this strategy needs besides."""
    if not facts.asked.finishes_cut_steps:
        return []
    return [
        _finished_check(facts),
        _told_check(facts),
        _alike_check(facts),
        *(_possible_check(step, facts) for step in told(facts.events)),
    ]


def _finished(facts: Facts) -> set[tuple[int, int]]:
    """(rank, step)"""
    return {
        (rank, recovery.target_version - 1)
        for recovery in facts.recoveries
        for rank, (strategy, _) in recovery.strategies().items()
        if strategy in ("lossy_forward", "roll_forward") and recovery.target_version is not None
    }


def _finished_check(facts: Facts) -> Check:
    """A rank that is killed in a reduction waits until the others are in it
    (`swift_ft.lab.drill.faults`)."""
    cut = {
        fault.step
        for fault in facts.asked.faults
        if isinstance(fault, RankFault) and fault.phase in ("reduce", "update")
    }
    dropped = cut - {step for _, step in _finished(facts)}
    return Check("steps whose reductions were cut short are finished", not dropped, f"not: {dropped}")


def _told_check(facts: Facts) -> Check:
    """Whoever has finished a step that was cut short has told of it, and nobody has told of another one."""
    finished = _finished(facts)
    have_told = {(int(e["rank"]), int(e["step"])) for e in facts.events if e["event"] == "lossy_step"}
    return Check(
        "whoever has finished a step that was cut short tells of its buckets",
        finished == have_told,
        f"(rank, step) finished: {sorted(finished)}, told: {sorted(have_told)}",
    )


def _alike_check(facts: Facts) -> Check:
    first = told(facts.events)
    other = [
        (int(e["rank"]), int(e["step"]))
        for e in facts.events
        if e["event"] == "lossy_step" and e["buckets"] != first[int(e["step"])]
    ]
    return Check("all tell the same of these buckets", not other, f"(rank, step): {other}")


def _possible_check(step: int, facts: Facts) -> Check:
    """Each parameter is in one bucket; each bucket is the mean of those that were there at a time."""
    name = f"the buckets of step {step} are means of ranks that were there together"
    buckets = told(facts.events)[step]
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
    """The ranks that were there in each generation in which this step may have been reduced."""
    ranks = set(range(facts.asked.topology.ranks))
    before: set[int] = ranks
    worlds = []
    for recovery in facts.recoveries:
        after = ranks - recovery.vacant
        if recovery.target_version is not None and recovery.target_version - 1 == step:
            worlds += [before, after]
            # A second loss in the same recovery: each of the lost may have been the first one.
            worlds += [before - {rank} for rank in before - after]
        before = after
    return worlds


def section(facts: Facts) -> list[dict[str, Any]] | None:
    """`lossy` of the report: the steps that were cut short; None with another strategy."""
    if not facts.asked.finishes_cut_steps:
        return None
    return [
        {
            "step": step,
            "buckets": [
                {
                    "parameters": len(bucket["parameters"]),
                    "contributors": list(bucket["contributors"]),
                    "divisor": bucket["divisor"],
                }
                for bucket in buckets
            ],
        }
        for step, buckets in sorted(told(facts.events).items())
    ]


def words(section: Sequence[Mapping[str, Any]] | None) -> str:
    """A line for each step that was cut short: of whose gradients its buckets are means."""
    lines = []
    for cut in section or ():
        kinds = Counter(tuple(bucket["contributors"]) for bucket in cut["buckets"])
        of_ranks = [
            f"{count} of ranks {', '.join(map(str, contributors))}" for contributors, count in kinds.items()
        ]
        lines.append(f"step {cut['step']}: buckets that are means: {'; '.join(of_ranks)}")
    return "\n".join(lines)

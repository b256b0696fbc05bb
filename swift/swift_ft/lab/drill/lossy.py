"""The report's part on the strategy "lossy-forward": the contributors of each bucket in a step interrupted by a loss.

Every rank that has finished such a step reports its buckets (event "lossy_step"). The drill recomputes the step from
them (`swift_ft.lab.drill.calculation`), so the report must match what was done, bit for bit. The checks here verify
that the reported buckets are possible.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.fault_grammar import RankFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import Check

Bucket = Mapping[str, Any]
"""One bucket. `parameters`: indices in the optimizer's order; `contributors`: data-parallel ranks; `divisor`."""


def told(events: Sequence[Event]) -> dict[int, list[Bucket]]:
    """Returns step -> its buckets, as reported by the first rank."""
    steps: dict[int, list[Bucket]] = {}
    for event in events:
        if event["event"] == "lossy_step":
            steps.setdefault(int(event["step"]), event["buckets"])
    return steps


def checks(facts: Facts) -> list[Check]:
    """Returns the additional checks of a drill of this strategy."""
    if not facts.asked.finishes_cut_steps:
        return []
    return [
        _finished_check(facts),
        _told_check(facts),
        _alike_check(facts),
        *(_possible_check(step, facts) for step in told(facts.events)),
    ]


def _finished(facts: Facts) -> set[tuple[int, int]]:
    """Returns (rank, step) of every interrupted step that a rank finished, according to the plans."""
    return {
        (rank, recovery.target_version - 1)
        for recovery in facts.recoveries
        for rank, (strategy, _) in recovery.strategies().items()
        if strategy in ("lossy_forward", "roll_forward") and recovery.target_version is not None
    }


def _finished_check(facts: Facts) -> Check:
    """Checks that steps with an interrupted reduction were finished. A rank killed in a reduction waits until the
    others are in it (`swift_ft.lab.drill.faults`)."""
    cut = {
        fault.step
        for fault in facts.asked.faults
        if isinstance(fault, RankFault) and fault.phase in ("reduce", "update")
    }
    dropped = cut - {step for _, step in _finished(facts)}
    return Check("steps whose reductions were cut short are finished", not dropped, f"not: {dropped}")


def _told_check(facts: Facts) -> Check:
    """Checks that exactly the ranks that finished an interrupted step reported its buckets."""
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
    """Checks that each parameter is in one bucket, and that each bucket is the mean over ranks that were present
    together."""
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


def section(facts: Facts) -> list[dict[str, Any]] | None:
    """Returns `lossy` of the report: the interrupted steps; None with another strategy."""
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
    """Returns a line for each interrupted step, with the ranks whose gradients its buckets average."""
    lines = []
    for cut in section or ():
        kinds = Counter(tuple(bucket["contributors"]) for bucket in cut["buckets"])
        of_ranks = [
            f"{count} of ranks {', '.join(map(str, contributors))}" for contributors, count in kinds.items()
        ]
        lines.append(f"step {cut['step']}: buckets that are means: {'; '.join(of_ranks)}")
    return "\n".join(lines)

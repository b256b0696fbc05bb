"""Loss curves of both runs, side by side.

A loss is averaged over the data-parallel ranks that both runs have told at that step. What an arithmetic undo gets
wrong is a few ulps of a parameter: it moves the drill's losses by 1e-7 of their size, 150 steps later still. A step
that is lost, doubled, or applied in some of the buckets only moves them by 1e-3 and more. The bound lies between.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from swift.drill.timeline import Event
from swift.drill.verdict_checks import Check

TOLERANCE = 1e-4
"""Of the loss, at every single step."""

Losses = Mapping[int, Mapping[int, float]]
"""step -> data-parallel rank -> loss"""


def losses(events: Sequence[Event]) -> dict[int, dict[int, float]]:
    """Of the last time that each step was done: a step that was dropped is done again."""
    losses_of: dict[int, dict[int, float]] = {}
    for event in events:
        if event["event"] == "loss":
            losses_of.setdefault(int(event["step"]), {})[int(event["dp_rank"])] = float(event["loss"])
    return losses_of


def curves(
    ours: Losses, twin: Losses, steps: int, dp_size: int, *, vacancies: bool = False
) -> dict[str, Any] | None:
    """`loss` of the report; None: there are no losses in a trace. `vacancies`: ranks that are lost tell none."""
    rows = []
    for step in sorted(ours):
        common = sorted(ours[step].keys() & twin.get(step, {}).keys())
        if common:
            means = [sum(run[step][c] for c in common) / len(common) for run in (ours, twin)]
            rows.append((step, *means))
    if not rows:
        return None
    window = max(1, steps // 10)
    last = [row for row in rows if row[0] >= steps - window]
    final = {
        "recovered": _mean([row[1] for row in last]),
        "failure_free": _mean([row[2] for row in last]),
    }
    relative = [abs(row[1] - row[2]) / abs(row[2]) if row[2] else math.inf for row in rows]
    fewest = {id(ours): 1 if vacancies else dp_size, id(twin): dp_size}
    whole = all(len(run.get(step, {})) >= fewest[id(run)] for run in (ours, twin) for step in range(steps))
    return {
        "steps": [row[0] for row in rows],
        "recovered": [_finite(row[1]) for row in rows],
        "failure_free": [_finite(row[2]) for row in rows],
        "whole": whole,
        # Not a number is the largest of all.
        "largest_relative_difference": None if any(map(math.isnan, relative)) else _finite(max(relative)),
        "final_window_steps": window,
        "final": {
            **final,
            "difference": _difference(final, relative=False),
            "relative_difference": _difference(final, relative=True),
        },
        "tolerance": TOLERANCE,
    }


def check(loss: Mapping[str, Any] | None) -> Check:
    """Is it the failure-free run's at every step?"""
    name = "the loss curve is the failure-free run's"
    if loss is None or not loss["whole"]:
        return Check(name, None, "losses of some steps are not in the traces")
    if None in (*loss["recovered"], *loss["failure_free"]):
        return Check(name, False, "a loss is not finite")
    largest, final = loss["largest_relative_difference"], loss["final"]["relative_difference"]
    if largest is None:
        return Check(name, None, "a loss of the failure-free run is 0")
    apart = f"losses differ by {largest:.1e} of their size at most ({TOLERANCE:.0e} is allowed), {final:.1e} at the end"
    return Check(name, largest <= TOLERANCE, apart)


def _mean(values: Sequence[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _finite(value: float) -> float | None:
    """JSON has no word for the others."""
    return value if math.isfinite(value) else None


def _difference(final: Mapping[str, float | None], *, relative: bool) -> float | None:
    ours, twin = final["recovered"], final["failure_free"]
    if ours is None or twin is None:
        return None
    return abs(ours - twin) / abs(twin) if relative else abs(ours - twin)

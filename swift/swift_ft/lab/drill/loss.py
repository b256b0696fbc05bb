"""Loss curves of both runs, compared step by step.

A loss is averaged over the data-parallel ranks whose loss both runs report at that step. An arithmetic undo is wrong by
a few ulps of a parameter: it moves the drill's losses by 1e-7 of their size, also 150 steps later. A step that is lost,
repeated, or applied in only some of the buckets moves them by 1e-3 or more. The bound lies between.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.lab.drill.timeline import Event
from swift_ft.lab.drill.verdict_checks import Check

TOLERANCE = 1e-4
"""Allowed relative difference of the loss, at every single step."""

Losses = Mapping[int, Mapping[int, float]]
"""step -> data-parallel rank -> loss"""


def losses(events: Sequence[Event]) -> dict[int, dict[int, float]]:
    """Returns step -> data-parallel rank -> loss. A dropped step is done again; the last loss counts."""
    losses_of: dict[int, dict[int, float]] = {}
    for event in events:
        if event["event"] == "loss":
            losses_of.setdefault(int(event["step"]), {})[int(event["dp_rank"])] = float(event["loss"])
    return losses_of


def curves(
    ours: Losses, twin: Losses, steps: int, dp_size: int, *, vacancies: bool = False
) -> dict[str, Any] | None:
    """Returns `loss` of the report, or None if a trace has no losses. `vacancies`: lost ranks report none."""
    rows = []
    for step in sorted(ours):
        common = sorted(ours[step].keys() & twin.get(step, {}).keys())
        if common:
            means = [sum(run[step][c] for c in common) / len(common) for run in (ours, twin)]
            rows.append((step, *means))
    if not rows:
        return None
    relative = [abs(row[1] - row[2]) / abs(row[2]) if row[2] else math.inf for row in rows]
    fewest = {id(ours): 1 if vacancies else dp_size, id(twin): dp_size}
    whole = all(len(run.get(step, {})) >= fewest[id(run)] for run in (ours, twin) for step in range(steps))
    return {
        "steps": [row[0] for row in rows],
        "recovered": [_finite(row[1]) for row in rows],
        "failure_free": [_finite(row[2]) for row in rows],
        "whole": whole,
        # NaN counts as the largest difference.
        "largest_relative_difference": None if any(map(math.isnan, relative)) else _finite(max(relative)),
        "tolerance": TOLERANCE,
    }


def check_losses(loss: Mapping[str, Any] | None) -> Check:
    """Checks that the loss equals the failure-free run's at every step, within `TOLERANCE`."""
    name = "the loss curve is the failure-free run's"
    if loss is None or not loss["whole"]:
        return Check(name, None, "losses of some steps are not in the traces")
    if None in (*loss["recovered"], *loss["failure_free"]):
        return Check(name, False, "a loss is not finite")
    largest = loss["largest_relative_difference"]
    if largest is None:
        return Check(name, None, "a loss of the failure-free run is 0")
    apart = f"losses differ by {largest:.1e} of their size at most ({TOLERANCE:.0e} is allowed)"
    return Check(name, largest <= TOLERANCE, apart)


def _finite(value: float) -> float | None:
    """Returns None for NaN and infinities, which JSON cannot express."""
    return value if math.isfinite(value) else None

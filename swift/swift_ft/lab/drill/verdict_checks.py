"""Checks on which a verdict rests, and the comparisons of digests and of losses with the failure-free run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.lab.drill.timeline import Event

DIGEST_FIELDS = ("parameters", "optimizer", "scheduler", "rng", "data")
TRAINED_FIELDS = ("parameters", "optimizer")
"""Fields that an arithmetic undo changes and that replicas share."""

Digest = Mapping[str, Any]


@dataclass
class Check:
    """One check of the verdict. `answer` None: there is no evidence."""

    name: str
    answer: bool | None
    detail: str = ""


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Returns False if any answer is False, else None if any is None or there is none, else True."""
    known = list(answers)
    if False in known:
        return False
    return None if None in known or not known else True


@dataclass
class Comparison:
    """Digests of both runs at one version, by rank."""

    version: int
    generation: int | None
    """Generation of the recovery; None: at the end of the run."""
    ranks: dict[str, dict[str, Any]]
    inexact: bool
    """Whether an inexact operation came before: trained fields may differ from the failure-free run's."""

    def as_json(self) -> dict[str, Any]:
        head = {"version": self.version, "equal": self.equal}
        if self.generation is not None:
            head["generation"] = self.generation
        return {**head, "ranks": self.ranks}

    @property
    def equal(self) -> bool | None:
        return all_of(entry["equal"] for entry in self.ranks.values())

    @property
    def where(self) -> str:
        return "at the end" if self.generation is None else f"at version {self.version}"

    def check(self) -> Check:
        """Returns whether all digests are equal, except for trained fields after an inexact operation."""
        name = f"digests {self.where}"
        absent = [rank for rank, entry in self.ranks.items() if entry["equal"] is None]
        differing = self._differing(DIGEST_FIELDS)
        wrong = self._differing([f for f in DIGEST_FIELDS if f not in TRAINED_FIELDS or not self.inexact])
        if wrong:
            fields = sorted({field for fields in wrong.values() for field in fields})
            return Check(name, False, f"rank {', '.join(wrong)}: {', '.join(fields)} differ")
        if absent:
            return Check(name, None, f"rank {', '.join(absent)}: no digest to compare")
        return Check(name, True, f"rank {', '.join(differing)} differ, as they may" if differing else "")

    def _differing(self, fields: Sequence[str]) -> dict[str, list[str]]:
        """Returns rank -> fields that both runs have, with different values."""
        differing_of = {}
        for rank, entry in self.ranks.items():
            ours, twin = entry["recovered"] or {}, entry["failure_free"] or {}
            differing = [f for f in fields if f in ours and f in twin and ours[f] != twin[f]]
            if differing:
                differing_of[rank] = differing
        return differing_of


def compare(
    version: int,
    generation: int | None,
    ranks: Sequence[int],
    digests: Mapping[str, Digest],
    twin: Mapping[str, Digest],
    *,
    inexact: bool,
) -> Comparison:
    at = "" if generation is None else f"-g{generation}"
    compared = {}
    for rank in ranks:
        ours, theirs = digests.get(f"rank{rank}-v{version}{at}"), twin.get(f"rank{rank}-v{version}")
        compared[str(rank)] = {
            "recovered": ours,
            "failure_free": theirs,
            "equal": equal_digests(ours, theirs),
        }
    return Comparison(version, generation, compared, inexact)


def equal_digests(ours: Digest | None, twin: Digest | None) -> bool | None:
    if ours is None or twin is None:
        return None
    known = [name for name in DIGEST_FIELDS if name in ours and name in twin]
    if any(ours[name] != twin[name] for name in known):
        return False
    return True if len(known) == len(DIGEST_FIELDS) else None


# Loss curves, compared step by step.
#
# A loss is averaged over the data-parallel ranks whose loss both runs report at that step. An arithmetic undo is wrong
# by a few ulps of a parameter: it moves the drill's losses by 1e-7 of their size, also 150 steps later. A step that is
# lost, repeated, or applied in only some of the buckets moves them by 1e-3 or more. The bound lies between.

TOLERANCE = 1e-4
"""Allowed relative difference of the loss, at every single step."""

Losses = Mapping[int, Mapping[int, float]]
"""step -> data-parallel rank -> loss"""


def losses_of(events: Sequence[Event]) -> dict[int, dict[int, float]]:
    """Returns step -> data-parallel rank -> loss. A dropped step is done again; the last loss counts."""
    found: dict[int, dict[int, float]] = {}
    for event in events:
        if event["event"] == "loss":
            found.setdefault(int(event["step"]), {})[int(event["dp_rank"])] = float(event["loss"])
    return found


def compare_losses(
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
    fewest = (ours, 1 if vacancies else dp_size), (twin, dp_size)
    whole = all(len(run.get(step, {})) >= ranks for run, ranks in fewest for step in range(steps))
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

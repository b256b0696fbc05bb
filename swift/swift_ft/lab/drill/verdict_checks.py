"""Checks on which a verdict rests, and the comparison of digests."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    inexact: bool = False
    """Whether an inexact operation came before: trained fields may differ from the failure-free run's."""

    def as_json(self) -> dict[str, Any]:
        head = {"version": self.version, "equal": self.equal}
        if self.generation is not None:
            head["generation"] = self.generation
        return {**head, "ranks": self.ranks}

    def theirs(self, rank: int) -> str:
        return f"rank{rank}-v{self.version}"

    def ours(self, rank: int) -> str:
        name = self.theirs(rank)
        return name if self.generation is None else f"{name}-g{self.generation}"

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
    comparison = Comparison(version, generation, inexact=inexact)
    for rank in ranks:
        ours, theirs = digests.get(comparison.ours(rank)), twin.get(comparison.theirs(rank))
        comparison.ranks[str(rank)] = {
            "recovered": ours,
            "failure_free": theirs,
            "equal": equal_digests(ours, theirs),
        }
    return comparison


def equal_digests(ours: Digest | None, twin: Digest | None) -> bool | None:
    if ours is None or twin is None:
        return None
    known = [name for name in DIGEST_FIELDS if name in ours and name in twin]
    if any(ours[name] != twin[name] for name in known):
        return False
    return True if len(known) == len(DIGEST_FIELDS) else None

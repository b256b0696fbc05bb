"""How far apart the parameters of two runs are, from the values that go with their digests. Pure.

A recovery that is not bit for bit is judged by it. What gradients get from another order of additions is an ulp or so
of the largest of them, and moves the drill's parameters by 1e-6 of their norm (a single one by more: an optimizer that
divides by the size of gradients, such as Adam, makes whole steps of those that are zero but for rounding). A step that
is lost or doubled moves them by 1e-3. The bound lies between.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from swift.drill.verdict_checks import Check, Comparison, Digest, all_of

TOLERANCE = 1e-4
"""Of the norm of a rank's parameters."""
VALUES = "values"
"""In a digest: values of parameters, evenly spaced over all of them, as the hexadecimal bytes of float32."""


def between(
    comparisons: Sequence[Comparison], digests: Mapping[str, Digest], twin: Mapping[str, Digest]
) -> list[dict[str, Any]]:
    """Of each comparison, by rank: `relative`, of norms; `largest`, of a single value over their root mean square."""
    return [
        {
            "where": comparison.where,
            "ranks": {
                str(rank): _of(
                    values(digests.get(comparison.ours(rank))), values(twin.get(comparison.theirs(rank)))
                )
                for rank in map(int, comparison.ranks)
            },
        }
        for comparison in comparisons
    ]


def values(digest: Digest | None) -> Sequence[float] | None:
    """None: they were not kept."""
    if digest is None or VALUES not in digest:
        return None
    found = array("f")
    found.frombytes(bytes.fromhex(digest[VALUES]))
    return found


def _of(ours: Sequence[float] | None, twin: Sequence[float] | None) -> dict[str, float] | None:
    if ours is None or twin is None or len(ours) != len(twin) or not len(ours):
        return None
    apart = [abs(a - b) for a, b in zip(ours, twin, strict=True)]
    norm = math.sqrt(math.fsum(value * value for value in twin))
    if not norm:
        return None
    return {
        "relative": math.sqrt(math.fsum(value * value for value in apart)) / norm,
        "largest": max(apart) / (norm / math.sqrt(len(twin))),
    }


def check(found: Sequence[Mapping[str, Any]]) -> Check:
    """Are they close enough wherever the runs were compared?"""
    name = "parameters are close to the failure-free run's"
    everywhere = [one for entry in found for one in entry["ranks"].values()]
    answer = all_of(None if one is None else one["relative"] <= TOLERANCE for one in everywhere)
    known = [one["relative"] for one in everywhere if one is not None]
    if not known:
        return Check(name, None, "no values were kept with the digests")
    detail = f"parameters differ by {max(known):.1e} of their norm at most ({TOLERANCE:.0e} is allowed)"
    return Check(name, answer, detail)

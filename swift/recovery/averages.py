"""Which buckets of a step that a loss has cut short are averaged already, and who gives them to whom.

A bucket is averaged in one generation, over the ranks that were in it. Some of them have the result, and the loss has
come before others had it. Whoever is left agrees on these (strategy "lossy-forward"):

    somebody has it    it stays: all that lack it get the same bits from one who has it
    nobody has it      it is averaged anew, over those that are left

So a bucket that was averaged in one generation is averaged in no later one, as long as somebody has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """An average that some have and others lack."""

    bucket: int
    generation: int
    """In which it was averaged: over its ranks, by their number."""
    source: int
    """The place of the one that gives it."""
    to: frozenset[int]
    """The places of those that lack it."""


def given(held: Sequence[Sequence[int]]) -> list[Given]:
    """`held`: of each rank that is left, by its place, the generation in which each bucket was averaged, or 0.

    Whoever gives is the first that has it. ValueError: no such step can be, and nothing that is done now would lead to
    one state.
    """
    if len({len(generations) for generations in held}) != 1:
        raise ValueError("ranks of one step have other buckets")
    gifts = []
    for bucket, of_places in enumerate(zip(*held, strict=True)):
        if len(set(of_places) - {0}) > 1:
            raise ValueError(f"bucket {bucket} was averaged in generations {sorted(set(of_places) - {0})}")
        having = [place for place, generation in enumerate(of_places) if generation]
        lacking = frozenset(place for place, generation in enumerate(of_places) if not generation)
        if having and lacking:
            source = having[0]
            gifts.append(Given(bucket=bucket, generation=of_places[source], source=source, to=lacking))
    return gifts

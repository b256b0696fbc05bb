"""What is measured, in which order. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LIMITS = "limits"
"""In the place of a format: what the machine does with the same bytes."""
SHARDED, GATHERED = "sharded", "gathered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One save and one load of all ranks, or the limits of one."""

    parameter_bytes: int
    """Of the whole model."""
    layout: str
    """Each rank saves its own shard, or rank 0 gathers all of them and saves."""
    round: int
    """From 0; -1 is for warming up."""
    format: str
    fsync: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Of all turns with one number of ranks."""

    ranks: int
    sizes: tuple[int, ...]
    """Bytes of parameters."""
    rounds: int
    formats: Mapping[str, tuple[bool, ...]]
    """By name: without fsync (False), with it (True), or both."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """With one rank they are the same."""
        return (SHARDED,) if self.ranks == 1 else (SHARDED, GATHERED)

    def turns(self) -> Iterator[Turn]:
        """In every round all formats have their turns, so that a busy machine slows them all. Before the first round of
        the smallest size there is one that does not count: whatever is imported or made at first is then there."""
        for size in self.sizes:
            for layout in self.layouts:
                for number in range(-1 if size == self.sizes[0] else 0, self.rounds):
                    at: dict[str, Any] = {"parameter_bytes": size, "layout": layout, "round": number}
                    yield Turn(format=LIMITS, **at)
                    for name, fsyncs in self.formats.items():
                        for fsync in fsyncs:
                            yield Turn(format=name, fsync=fsync, **at)


class Pace:
    """What a save would take, by the format's time at smaller sizes; what would take too long is left out."""

    def __init__(self, save_s_max: float) -> None:
        self._save_s_max = save_s_max
        self._taken: dict[tuple[str, str], tuple[int, float]] = {}

    def note(self, turn: Turn, save_s: float) -> None:
        """After a turn."""
        size, quickest_s = self._taken.get((turn.layout, turn.format), (0, 0.0))
        if size == turn.parameter_bytes:
            save_s = min(save_s, quickest_s)
        self._taken[turn.layout, turn.format] = (turn.parameter_bytes, save_s)

    def too_long(self, turn: Turn) -> float | None:
        """Seconds that it would take; None: it is short enough, or nobody knows. What was begun at a size is ended."""
        size, save_s = self._taken.get((turn.layout, turn.format), (turn.parameter_bytes, 0.0))
        would_s = save_s * turn.parameter_bytes / size
        return would_s if size < turn.parameter_bytes and would_s > self._save_s_max else None

"""A step that has been put in an order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift.recovery.adaptive.work import Action


class Timed(NamedTuple):
    """When a worker does something."""

    begin: float
    end: float
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Who does what, when. The times are as the costs say; what counts for a run is the order."""

    slots: Mapping[int, Sequence[Timed]]
    """By worker, in its order."""

    @property
    def length(self) -> float:
        """From the first begin to the last end."""
        return max((slots[-1].end for slots in self.slots.values() if slots), default=0.0)

    def orders(self) -> dict[int, tuple[Action, ...]]:
        """By worker: what it does, one after the other. Walked so by all, whatever each part takes, they come to the
        end: each action waits only for such as began earlier here."""
        return {worker: tuple(slot.action for slot in slots) for worker, slots in self.slots.items()}

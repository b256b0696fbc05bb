"""Where the time of a replay goes: what each of its ranks waited for, and which of it set the pace. No torch.

log        records that come out of the log
neighbour  records that a stage beside this one, which replays as well, has yet to write
line       weights on their way down, gradients on their way up, and whoever they wait for
compute    forwards and backwards; of the owner the rest of its steps too, for which the others wait
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LOG, NEIGHBOUR, LINE, COMPUTE = "log", "neighbour", "line", "compute"
BOTTLENECKS = (COMPUTE, LOG, NEIGHBOUR, LINE)


class ReplayClock:
    """Of one rank: the seconds of its trainer's thread, by what it did or waited for."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(BOTTLENECKS, 0.0)

    @contextmanager
    def line(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[LINE] += time.perf_counter() - began

    def computed(self, seconds: float) -> None:
        self.seconds[COMPUTE] += seconds

    def read(self, waited_s: float, *, replayed_too: bool) -> None:
        """A record has come. `replayed_too`: its writer does that step again at the same time."""
        self.seconds[NEIGHBOUR if replayed_too else LOG] += waited_s

    def told(self) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in self.seconds.items()}


def split(
    seconds: float, owner: Mapping[str, float], helpers: Mapping[int, Mapping[str, float]]
) -> dict[str, float]:
    """The `seconds` of a replay by what set the pace.

    The line waits for its busiest rank, the one that computed and waited for the log longest: its seconds of both
    count, and what its owner does besides, alone. What is left is the line's own: even the busiest rank waited then.
    """
    rest = max(0.0, seconds - sum(owner.values()))
    busiest = max([owner, *helpers.values()], key=lambda seconds_of: seconds_of[COMPUTE] + seconds_of[LOG])
    seconds_of = {
        COMPUTE: busiest[COMPUTE] + rest,
        LOG: busiest[LOG],
        NEIGHBOUR: owner[NEIGHBOUR],
    }
    seconds_of[LINE] = max(0.0, seconds - sum(seconds_of.values()))
    return {name: round(seconds_of[name], 6) for name in BOTTLENECKS}


def bottleneck(shares: Mapping[str, float]) -> str:
    """What took longest. Of equals what is first in BOTTLENECKS."""
    return max(BOTTLENECKS, key=lambda name: shares[name])

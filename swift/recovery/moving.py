"""When a running job moves a loss to another stage, where its step is shorter.

Peers share the microbatches of lost ranks, so a step is as long as the stage that has fewest ranks left. If a rank of
another stage ends, and a process in its place takes the lost rank's, the losses are spread (the failure normalization
of ReCycle, arXiv 2405.14009). That costs two generations and a copy of the state.

Nobody knows when the lost rank is repaired. So the rule is that of `swift.recovery.waiting`: the loss is moved once the
steps since then have taken longer, by as much as the move costs, than they would have taken with the loss elsewhere.
Whenever the repair comes, such a move has lost not more than twice the least possible time.

Only a loss at a stage that has lost two ranks more than the other one is moved. So moves come to an end, whatever is
measured: each makes the losses more even.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from swift.recovery.measured import RankMeasured
from swift.recovery.waiting import two_generations_s

LEAST = 0.1
"""What a move saves of a step, at least: what is measured differs by some of that from time to time."""


class Move(NamedTuple):
    """The process of a rank ends, and another one in its place becomes a rank that was lost."""

    rank: int
    to: int


def worth_moving(
    measured: Mapping[int, RankMeasured],
    *,
    stage_groups: int,
    replicas: int,
    lost: Mapping[int, int],
    version: int,
    movable: Mapping[int, Collection[int]],
) -> Move | None:
    """The move that saves most, if one has come to pay. None: none has, or a stage has not been measured.

    `stage_groups`, `replicas`: of the full world. `measured`: of the ranks that are there. `lost`: each lost rank ->
    the version since when it is missing. `version`: the newest. `movable`: each lost rank -> those whose place may
    become its own.
    """
    if not lost:
        return None
    losses = Counter(rank // replicas for rank in lost)
    seconds: dict[int, float] = {}
    for rank, known in measured.items():
        takes = sum(stage.forward_s + stage.backward_s for stage in known.stages)
        seconds[rank // replicas] = max(seconds.get(rank // replicas, 0.0), takes)
    if len(seconds) < stage_groups:
        return None
    # A rank has measured what it computes for lost peers as well.
    microbatches = min(
        known.microbatches * (replicas - losses[rank // replicas]) / replicas
        for rank, known in measured.items()
    )

    def step_s(counts: Mapping[int, int]) -> float:
        busy = (
            takes * microbatches * replicas / (replicas - counts[group]) for group, takes in seconds.items()
        )
        return max(busy) + sum(seconds.values()) - max(seconds.values())

    steps = version - max(lost.values())
    cost_s, now_s = two_generations_s(list(measured.values())), step_s(losses)
    best, most = None, 0.0
    for to in sorted(lost):
        # Of stages that save as much, the quickest: it bears a loss best.
        for rank in sorted(movable.get(to, ()), key=lambda rank: (seconds[rank // replicas], rank)):
            group = rank // replicas
            if losses[group] + 2 > losses[to // replicas] or losses[group] + 2 > replicas:
                continue
            saved_s = now_s - step_s(losses + Counter({group: 1, to // replicas: -1}))
            if saved_s > most and saved_s >= LEAST * now_s and saved_s * steps >= cost_s:
                best, most = Move(rank, to), saved_s
    return best

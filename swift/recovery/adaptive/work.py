"""One step of all data-parallel ranks, before anybody has put it in an order.

A *worker* is a rank, by its slot's number. It runs the stages of its stage group, for the microbatches of its own
*origin* (its data-parallel rank's batch) and for those that it has adopted. Times are in any one unit.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""A forward; a whole backward; the two parts of a split one, for inputs and for weights."""


class Action(NamedTuple):
    """What a worker does at a time."""

    kind: str
    stage: int
    origin: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}@{self.origin}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What each part takes for one microbatch, by stage; one number stands for all stages."""

    forward: Sequence[float] = (1.0,)
    backward_input: Sequence[float] = (1.0,)
    backward_weight: Sequence[float] = (1.0,)
    transfer: float = 0.0
    """Between two stages on different workers. A worker computes meanwhile."""

    def of(self, kind: str, stage: int) -> float:
        if kind == FORWARD:
            return self.forward[stage % len(self.forward)]
        inputs = self.backward_input[stage % len(self.backward_input)]
        weights = self.backward_weight[stage % len(self.backward_weight)]
        return {BACKWARD: inputs + weights, BACKWARD_INPUT: inputs, BACKWARD_WEIGHT: weights}[kind]


Owners = Mapping[tuple[int, int], Sequence[int]]
"""(stage, origin) -> the worker that computes each of its microbatches, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Raises ValueError if it can be nobody's."""

    stages: int
    origins: int
    microbatches: int
    """Of each origin."""
    owners: Owners
    """Of every stage and origin."""
    split: bool = False
    """Backwards are split: gradients of weights may be computed later."""
    costs: Costs = Costs()
    cap: Mapping[int, int] | None = None
    """Worker -> how many microbatches' activations it may hold at a time, over all its stages. None: any number."""

    def __post_init__(self) -> None:
        costs = self.costs
        parts = (*costs.forward, *costs.backward_input, *costs.backward_weight, costs.transfer)
        if not all(0 <= part < math.inf for part in parts):
            raise ValueError("what a part of a step takes is a number of at least 0")
        if min(self.stages, self.origins, self.microbatches) < 1:
            raise ValueError("a step has at least one stage, one origin and one microbatch")
        for stage in range(self.stages):
            for origin in range(self.origins):
                if len(self.owners.get((stage, origin), ())) != self.microbatches:
                    raise ValueError(
                        f"stage {stage} of origin {origin} has not one owner for each microbatch"
                    )
        if self.cap is not None and any(
            self.cap.get(worker, 0) < len(stages) for worker, stages in self.stages_of().items()
        ):
            raise ValueError(
                "a worker must be able to hold the activations of one microbatch at each of its stages"
            )

    def stages_of(self) -> dict[int, tuple[int, ...]]:
        """Worker -> the stages that it computes anything of, ascending; workers ascending."""
        found: dict[int, set[int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker in owners:
                found.setdefault(worker, set()).add(stage)
        return {worker: tuple(sorted(found[worker])) for worker in sorted(found)}

    def kinds(self) -> tuple[str, ...]:
        """What is done with each microbatch at each stage, in this order."""
        return (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)

    def adds(self) -> str:
        """The kind that adds to gradients of weights."""
        return BACKWARD_WEIGHT if self.split else BACKWARD

    def actions(self) -> Iterator[tuple[int, Action]]:
        """(worker, action) of all that is to be done."""
        kinds = self.kinds()
        for (stage, origin), owners in self.owners.items():
            for microbatch, worker in enumerate(owners):
                for kind in kinds:
                    yield worker, Action(kind, stage, origin, microbatch)

    def bound(self) -> float:
        """No order is quicker. Each worker waits for the first microbatch to come to it, computes all of its own, and
        the last one has to go back to the first stage; and it has no more activations at a time than its cap: if each
        is held for L at least, n of them take n * L / cap."""
        head, tail, _ = self._ways()
        longest = head[-1] + self.costs.of(FORWARD, self.stages - 1)
        longest += self.costs.of(self.kinds()[1], self.stages - 1) + tail[-1]
        for first, busy, weights, span in self._loads():
            longest = max(longest, head[first] + busy - weights + tail[first], head[first] + busy)
            longest = max(longest, head[first] + span + (0.0 if self.split else tail[first]))
        return longest

    def period_bound(self) -> float:
        """The same of the time from one step to the next, if they may overlap: a worker waits for nobody."""
        return max(max(busy, span) for _, busy, _, span in self._loads())

    def _loads(self) -> Iterator[tuple[int, float, float, float]]:
        """Of each worker: its first stage; what it computes, and how much of that are gradients of weights alone; and
        how long its activations need room (0: it has any)."""
        held = self._ways()[2]
        for worker, counts in self.counts().items():
            load = [
                sum(n * self.costs.of(kind, stage) for stage, n in counts.items()) for kind in self.kinds()
            ]
            span = 0.0
            if self.cap is not None:
                span = sum(n * held[stage] for stage, n in counts.items()) / self.cap[worker]
            yield min(counts), sum(load), load[-1] if self.split else 0.0, span

    def counts(self) -> dict[int, dict[int, int]]:
        """Worker -> stage -> of how many microbatches it computes it."""
        found: dict[int, dict[int, int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker, count in Counter(owners).items():
                of = found.setdefault(worker, {})
                of[stage] = of.get(stage, 0) + count
        return found

    def _ways(self) -> tuple[list[float], list[float], list[float]]:
        """By stage, at least: until the first forward can begin; from the end of a backward (of its part for inputs) to
        the end of the step; and for how long an activation is held."""
        costs, backward = self.costs, self.kinds()[1]
        crosses = [0.0]  # into each stage
        for stage in range(1, self.stages):
            stays = any(
                before == behind
                for origin in range(self.origins)
                for before, behind in zip(
                    self.owners[stage - 1, origin], self.owners[stage, origin], strict=True
                )
            )
            crosses.append(0.0 if stays else costs.transfer)
        head, tail = [0.0], [costs.of(BACKWARD_WEIGHT, 0) if self.split else 0.0]
        for stage in range(1, self.stages):
            head.append(head[-1] + costs.of(FORWARD, stage - 1) + crosses[stage])
            tail.append(tail[-1] + costs.of(backward, stage - 1) + crosses[stage])
        held, through = [0.0] * self.stages, 0.0
        for stage in reversed(range(self.stages)):
            through += costs.of(FORWARD, stage) + costs.of(backward, stage)
            held[stage] = through + (costs.of(BACKWARD_WEIGHT, stage) if self.split else 0.0)
            through += 2 * crosses[stage]
        return head, tail, held


def shared(
    *, group_stages: Sequence[Sequence[int]], origins: int, microbatches: int, lost: Sequence[tuple[int, int]]
) -> Owners:
    """A job of `group_stages` (the stages of each stage group) in which these (stage group, origin) are lost: their
    microbatches go to the peers that are left, in turn. Worker numbers are group * origins + origin.

    Raises ValueError if a stage group has nobody left.
    """
    gone = set(lost)
    owners: dict[tuple[int, int], tuple[int, ...]] = {}
    for group, stages in enumerate(group_stages):
        left = [group * origins + origin for origin in range(origins) if (group, origin) not in gone]
        if not left:
            raise ValueError(f"stage group {group} has nobody left")
        turn = 0
        for origin in range(origins):
            own = group * origins + origin
            if (group, origin) not in gone:
                mine = (own,) * microbatches
            else:
                mine = tuple(left[(turn + mb) % len(left)] for mb in range(microbatches))
                turn = (turn + microbatches) % len(left)
            owners |= {(stage, origin): mine for stage in stages}
    return owners

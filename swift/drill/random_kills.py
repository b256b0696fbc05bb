"""Kills of ranks at coordinates that a seed decides (``--random-kills``)."""

import random
from collections.abc import Sequence

from swift.drill.faults import phases_of
from swift.drill.topology import Topology
from swift.errors import UsageError
from swift.failures.grammar import MICROBATCH_PHASES, RECOVERY_PHASES, Fault, RankFault

RANDOM_GAP = 4
"""Steps between two random kills: the first one's recovery is over long before the next."""
_SPREAD_ATTEMPTS = 20


def kills_of(
    count: int, topology: Topology, seed: int, updates: str, beside: Sequence[Fault] = ()
) -> tuple[RankFault, ...]:
    """`count` kills of ranks at seeded coordinates, in the order of their steps, apart from each other and from
    those that are there already (`beside`). Raises UsageError if there are too few steps for that."""
    taken = [fault.step for fault in beside if isinstance(fault, RankFault) and fault.step is not None]
    generator = random.Random(f"kills {seed}")
    free = [step for step in range(1, topology.steps) if all(abs(step - t) >= RANDOM_GAP for t in taken)]
    steps = _spread(free, count, generator)
    if steps is None:
        raise UsageError(
            f"--random-kills {count}: {topology.steps} steps have no room for them, {RANDOM_GAP} steps apart; "
            "give more --steps"
        )
    left_out = ("save", "weights", *RECOVERY_PHASES)  # not every microbatch has its weights apart
    phases = [phase for phase in phases_of(topology, updates) if phase not in left_out]
    kills = []
    for step in steps:
        phase = generator.choice(phases)
        microbatch = generator.randrange(topology.microbatches)
        rank = generator.randrange(topology.ranks)
        kills.append(
            RankFault(
                rank=rank,
                step=step,
                phase=phase,
                microbatch=microbatch if phase in MICROBATCH_PHASES else 0,
            )
        )
    return tuple(kills)


def _spread(free: Sequence[int], count: int, generator: random.Random) -> list[int] | None:
    """`count` of the ascending `free`, at least `RANDOM_GAP` apart, ascending. None: they do not fit."""
    for attempt in range(_SPREAD_ATTEMPTS + 1):
        order = list(free)
        if attempt < _SPREAD_ATTEMPTS:  # the last attempt packs them, which fits if anything does
            generator.shuffle(order)
        chosen: list[int] = []
        for step in order:
            if len(chosen) < count and all(abs(step - other) >= RANDOM_GAP for other in chosen):
                chosen.append(step)
        if len(chosen) == count:
            return sorted(chosen)
    return None

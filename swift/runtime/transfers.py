"""What a message between neighbouring stages takes, measured between two steps.

The ranks of each pipeline send each other a message as large as those that their stages send, there and back: first
those of even stage groups to the next ones, then those of odd ones. The shortest of several rounds counts.
"""

import math
import time
from collections.abc import Mapping

import torch

from swift.recovery import Assignment
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.tags import PROBE

ROUNDS = 3
"""The first one may have to wait for the other rank."""
FIRST_MEASURED = 4
"""The step before which they are for the first time: some steps are measured by then."""


def measures(step: int) -> bool:
    """Before this step all ranks measure, and plan ahead: steps 4, 16, 64 and so on."""
    return step >= FIRST_MEASURED and step & (step - 1) == 0 and step.bit_length() % 2 == 1


def transfer_s(
    world: ReconfigurableGroup, assignment: Assignment, slot: int, sizes: Mapping[int, int]
) -> float:
    """(all ranks of a full world) Seconds one way, to the rank of the next stage group; nan for the last group's ranks,
    and where no size is known. `sizes`: stage group -> bytes of a message to the next one; the same at all ranks.
    Raises RuntimeError if a rank is lost."""
    group, origin = assignment.slots[slot].stage_group, assignment.slots[slot].dp_rank
    taken = math.nan
    for parity in (0, 1):
        if group % 2 == parity:
            if group in sizes and group + 1 < assignment.stage_groups:
                taken = _ask(world, assignment.at(group + 1, origin), sizes[group])
        elif group > 0 and group - 1 in sizes:
            _answer(world, assignment.at(group - 1, origin), sizes[group - 1])
    return taken


def _ask(world: ReconfigurableGroup, other: int, size: int) -> float:
    out, back = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    shortest = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        sent = world.send([out], other, PROBE)
        world.recv([back], other, PROBE).wait()
        sent.wait()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest / 2


def _answer(world: ReconfigurableGroup, other: int, size: int) -> None:
    buffer = torch.empty(size, dtype=torch.uint8)
    for _ in range(ROUNDS):
        world.recv([buffer], other, PROBE).wait()
        world.send([buffer], other, PROBE).wait()

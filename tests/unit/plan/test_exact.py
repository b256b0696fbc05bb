"""The list scheduler beside the shortest step there is, and beside the bound."""

import math
from typing import Any

import pytest

from swift_ft.planner.schedule import Work, plan_step
from tests.unit.plan.integer_program import exact_step
from tests.unit.recovery.adaptive.works import Lost, one_each, problems

KNOWN = """
D P M lost     fused     split     split with twice the activations: planned/shortest/bound
2 2 4 none     15/15/15  14/14/13  13/13/13
2 2 4 stage 0  27/27/24  25/25/24  24/24/24
2 2 4 stage 1  27/27/27  26/26/25  25/25/25
2 3 3 none     15/15/15  13/13/11  12/12/11
2 3 3 stage 0  24/24/18  20/20/18  18/18/18
2 3 3 stage 1  24/24/21  21/21/19  19/19/19
2 3 3 stage 2  24/24/24  22/22/20  21/21/20
2 3 4 none     18/18/18  16/16/14  15/15/14
2 3 4 stage 0  30/30/24  27/26/24  24/24/24
2 3 4 stage 1  30/30/27  27/27/25  25/25/25
2 3 4 stage 2  30/30/30  28/28/26  27/27/26
3 2 4 none     15/15/15  14/14/13  13/13/13
3 2 4 stage 0  23/21/18  20/19/18  18/18/18
3 2 4 stage 1  21/21/21  20/20/19  19/19/19
3 3 3 none     15/15/15  13/13/11  12/12/11
3 3 3 stage 0  23/21/15  18/17/15  15/15/15
3 3 3 stage 1  21/21/18  18/18/16  16/16/16
3 3 3 stage 2  21/21/21  19/19/17  18/18/17
3 3 4 none     18/18/18  16/16/14  15/15/14
3 3 4 stage 0  26/24/18  21/20/18  18/18/18
3 3 4 stage 1  26/24/21  22/21/19  19/19/19
3 3 4 stage 2  24/24/24  22/22/20  21/21/20
"""
QUICK = ("2 2", "2 3 3", "3 3 3 none", "3 3 3 stage 1")
"""The others are proven in the matrix."""


def rows() -> list[Any]:
    """(origins, stages, microbatches, lost, what is known of each kind)."""
    found = []
    for line in KNOWN.strip().splitlines()[1:]:
        origins, stages, microbatches, *place, fused, split, twice = line.split()
        lost = [] if place == ["none"] else [(int(place[1]), 0)]
        found.append(
            pytest.param(
                int(origins),
                int(stages),
                int(microbatches),
                lost,
                [fused, split, twice],
                id=line[:13].strip().replace(" ", "-"),
                marks=() if line.startswith(QUICK) else pytest.mark.matrix,
            )
        )
    return found


def works(origins: int, stages: int, microbatches: int, lost: Lost) -> list[Work]:
    return [
        one_each(origins, stages, microbatches, lost=lost, split=split, factor=factor)
        for split, factor in ((False, 1), (True, 1), (True, 2))
    ]


@pytest.mark.parametrize(("origins", "stages", "microbatches", "lost", "known"), rows())
def test_planned_steps_are_the_shortest_or_nearly(
    origins: int, stages: int, microbatches: int, lost: Lost, known: list[str]
) -> None:
    found = []
    for work in works(origins, stages, microbatches, lost):
        planned = plan_step(work)
        exact = exact_step(work, planned)
        assert problems(work, exact) == []
        bound = math.ceil(work.bound() - 1e-9)
        assert bound <= exact.length <= planned.length
        found.append(f"{planned.length:g}/{exact.length:g}/{bound}")
    assert found == known

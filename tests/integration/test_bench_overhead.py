"""`swift-ft bench overhead` with real ranks: each part is there, and one that is slower shows in it."""

import pytest

from swift_ft.lab.bench.overhead import REST, Size, accounts, measure
from swift_ft.lab.bench.overhead_ranks import BURNED_S, PARTS
from swift_ft.lab.drill.topology import MODELS

LOOP = "loop of the session"


@pytest.mark.matrix
def test_a_part_that_is_made_slower_shows_in_that_part() -> None:
    size = Size(model=MODELS["tiny"], goal=1.0)
    (found,) = measure(size, rounds=1, slice_steps=3, stages=2, burned=LOOP)
    plain, metered = found["plain"], found["metered"]
    assert {part for part, _, _ in PARTS} <= metered["parts"].keys()  # each is met: no name has gone astray
    parts = accounts(plain, metered)
    assert parts[LOOP] >= 2 * BURNED_S  # two ranks, once in a step
    assert abs(parts[REST]) < 0.05 * metered["cpu_s"]
    assert sum(parts.values()) + plain["cpu_s"] == pytest.approx(metered["cpu_s"])

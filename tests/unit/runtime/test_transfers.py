"""What messages between neighbouring stages take (`swift_ft.train.rerouting`)."""

import math
import time
from typing import Any

import pytest

from swift_ft.planner import Assignment
from swift_ft.train.rerouting import ROUNDS, transfer_s
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.test_gradient_chain import in_parallel


class _Slow:
    """A message that needs its time on the way."""

    def __init__(self, pending: Any, seconds: float) -> None:
        self._pending, self._seconds = pending, seconds

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(self._seconds)


class _SlowWire(LocalWire):
    """Messages to stage group 2 take so long."""

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        pending = super().recv(tensors, source, tag)
        return _Slow(pending, 0.03) if self._own // 2 == 2 else pending


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_each_rank_measures_the_way_to_the_next_stage(stages: int) -> None:
    world, network = Assignment.grid(2 * stages, replicas=2), Network()
    sizes = {group: 1000 + group for group in range(stages)}
    wires = [_SlowWire(network, slot) for slot in range(2 * stages)]
    taken = in_parallel(2 * stages, lambda slot: transfer_s(wires[slot], world, slot, sizes))  # type: ignore[arg-type]
    for slot, seconds in enumerate(taken):
        assert math.isnan(seconds) == (slot // 2 == stages - 1), "the last stage has no next one"
        if slot // 2 == 1 and stages > 2:
            assert seconds >= 0.014, "there and back take 0.03 s"
    assert network.left() == 0
    assert network.sent == sum(2 * 2 * ROUNDS * sizes[group] for group in range(stages - 1))


def test_what_sends_nothing_is_not_measured() -> None:
    world, network = Assignment.grid(3, replicas=1), Network()
    wires = [LocalWire(network, slot) for slot in range(3)]
    taken = in_parallel(3, lambda slot: transfer_s(wires[slot], world, slot, {0: 8}))  # type: ignore[arg-type]
    assert [math.isnan(seconds) for seconds in taken] == [False, True, True]

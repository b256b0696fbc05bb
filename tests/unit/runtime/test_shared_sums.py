"""Gradients of microbatches that several ranks compute have the bits of one rank's, and take the memory of a few."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swift_ft.comm.backend import Collective
from swift_ft.comm.message_collectives import MessageCircuit
from swift_ft.comm.worker_thread import Runner, Task
from swift_ft.errors import UsageError
from swift_ft.train.rerouted_call import Parameter, SharedSums, Turn
from tests.local_backend import LocalWire, Network, in_parallel

SHAPES = [(3, 5), (1,), (0,), (7, 2), (4,)]
Gradients = dict[Parameter, torch.Tensor]


class Group:
    """Of one rank, as `ReconfigurableGroup.submit` is."""

    def __init__(self, network: Network, own: int, count: int) -> None:
        self.runner = Runner(f"test-{own}")
        wire: Any = LocalWire(network, own)
        self._circuit = MessageCircuit(wire, own, count, 0, self.runner)

    def submit(self, run: Collective) -> Task:
        return self._circuit.submit(run)


def model(stages: int) -> dict[int, list[Parameter]]:
    """Of two dtypes, and one parameter that is not trained."""
    parameters = {}
    for stage in range(stages):
        dtypes = [torch.bfloat16 if n % 3 == 1 else torch.float32 for n in range(len(SHAPES))]
        of_stage = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(SHAPES, dtypes, strict=True)]
        parameters[stage] = [*of_stage, nn.Parameter(torch.zeros(6), requires_grad=False)]
    return parameters


def gradients(turn: Turn, parameters: list[Parameter], seed: int) -> Gradients:
    """Of many magnitudes, so that the order of additions shows; some are -0.0, and some parameters have none."""
    draw = random.Random(f"{turn[:3]} {seed}")
    never = draw.randrange(2 * len(SHAPES)) if turn.microbatch == 0 else -1
    given = {}
    for number, parameter in enumerate(parameters[:-1]):
        unused = random.Random(f"{turn.stage} {turn.origin} {number} {seed}").random() < 0.2
        if unused or number == never or draw.random() < 0.2:
            continue
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        numbers = torch.randn(parameter.shape, generator=generator) * 10.0 ** draw.randint(-3, 3)
        numbers[torch.rand(parameter.shape, generator=generator) < 0.3] = -0.0
        given[parameter] = numbers.to(parameter.dtype)
    return given


def by_one_rank(each: list[Gradients]) -> Gradients:
    """As autograd adds them up."""
    total: Gradients = {}
    for gradients in each:
        for parameter, gradient in gradients.items():
            if parameter in total:
                total[parameter] += gradient
            else:
                total[parameter] = gradient.clone()
    return total


def shared(
    count: int,
    turns: list[Turn],
    of: Mapping[Turn, Gradients],
    parameters: Mapping[int, list[Parameter]],
    seed: int,
) -> list[SharedSums]:
    """What each rank has at last."""
    network, sums = Network(), list[SharedSums]()
    groups: Any = [Group(network, own, count) for own in range(count)]
    for own in range(count):
        sums.append(SharedSums(groups[own], own, count, turns, parameters))

    def trainer(own: int) -> None:
        mine = [turn for turn in turns if turn.owner == own]
        random.Random(f"{own} {seed}").shuffle(mine)  # a rank may compute them in another order
        for turn in mine:
            sums[own].give(turn, of[turn])

    in_parallel(count, trainer)
    for each in sums:
        each.wait()
    for group in groups:
        group.runner.stop()
    assert network.left() == 0
    return sums


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 5),
    stages=st.integers(1, 2),
    origins=st.integers(1, 2),
    microbatches=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_the_parts_of_all_ranks_are_the_sum_of_one(
    count: int, stages: int, origins: int, microbatches: int, seed: int
) -> None:
    draw = random.Random(seed)
    parameters = model(stages)
    turns = [
        Turn(stage, origin, mb, draw.randrange(count))
        for mb in range(microbatches)
        for stage in range(stages)
        for origin in range(origins)
    ]
    of = {turn: gradients(turn, parameters[turn.stage], seed) for turn in turns}
    sums = shared(count, turns, of, parameters, seed)
    for origin in range(origins):
        parts = [each.part(origin) for each in sums]
        for stage in range(stages):
            expected = by_one_rank([of[t] for t in turns if (t.stage, t.origin) == (stage, origin)])
            frozen = parameters[stage][-1]  # an optimizer may have it all the same
            assert not any(part.has(frozen) for part in parts)
            assert all(torch.equal(part.numbers(frozen), torch.zeros(6)) for part in parts)
            for parameter in parameters[stage][:-1]:
                assert all(part.has(parameter) == (parameter in expected) for part in parts)
                first, *others = (part.numbers(parameter) for part in parts)
                for other in others:
                    first += other
                wanted = expected.get(parameter, torch.zeros_like(parameter)).reshape(-1)
                assert first.dtype == wanted.dtype
                assert torch.equal(first.view(torch.uint8), wanted.contiguous().view(torch.uint8)), (
                    "bit for bit"
                )


@pytest.mark.parametrize("microbatches", [8, 64])
def test_a_rank_holds_no_more_for_many_microbatches(microbatches: int) -> None:
    """One after the other, as in a schedule: each is given once the one before was taken."""
    count, parameter = 4, nn.Parameter(torch.zeros(4096))
    turns = [Turn(0, 1, mb, mb % count) for mb in range(microbatches)]
    network = Network()
    groups: Any = [Group(network, own, count) for own in range(count)]
    sums = [SharedSums(group, own, count, turns, {0: [parameter]}) for own, group in enumerate(groups)]
    for turn in turns:
        sums[turn.owner].give(turn, {parameter: torch.ones(4096)})
        with sums[turn.owner]._changed:
            while turn in sums[turn.owner]._computed:
                sums[turn.owner]._changed.wait(0.001)
    for each in sums:
        each.wait()
    for group in groups:
        group.runner.stop()
    assert max(each.bytes_max for each in sums) <= 2 * parameter.nbytes


def test_who_waits_for_what_is_never_computed_need_not() -> None:
    parameters = model(1)
    group: Any = Group(Network(), 0, 2)
    sums = SharedSums(group, 0, 2, [Turn(0, 1, 0, 0)], parameters)
    sums.abandon()
    with pytest.raises(RuntimeError, match="connection: this call of the schedule has ended"):
        sums.wait()
    group.runner.stop()
    group.runner.join(5)
    assert not group.runner._thread.is_alive()


def test_a_sparse_gradient_is_refused() -> None:
    parameters = model(1)
    group: Any = Group(Network(), 0, 2)
    sums = SharedSums(group, 0, 2, [Turn(0, 1, 0, 0)], parameters)
    with pytest.raises(UsageError, match="sparse=False"):
        sums.give(Turn(0, 1, 0, 0), {parameters[0][0]: torch.zeros(3, 5).to_sparse()})
    sums.abandon()
    group.runner.stop()

"""A weight that stages share: summed once for each update, counted once, and refused where that cannot be."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swift_ft.comm import backend
from swift_ft.comm.backend import Collective
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import Alone
from swift_ft.errors import UsageError
from swift_ft.train.config import SessionConfig
from swift_ft.train.pipeline_collectives import Crossing, Ties
from tests.local_backend import LocalBackend
from tests.unit.runtime.test_gate import Log, Rank
from tests.unit.runtime.wired import site_of, updates_of

RANKS = (0, 1, 2, 3)


class Group(ReconfigurableGroup):
    """Every other rank says what this one says, but for `others`, which change what comes of it."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int):
        super().__init__(name, ranks, rank, LocalBackend())
        self.asked = 0
        self.others: Callable[[list[torch.Tensor]], None] = lambda _said: None

    def part(self, places: Any) -> Any:
        return self if len(set(places)) == len(self.ranks) else super().part(places)

    def run(self, run: Collective) -> None:
        self.asked += 1
        group = self

        class Said(Alone):
            def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
                super().all_gather(outputs, own)
                group.others(outputs)

        run(Said(self._own, len(self.ranks)))


class Tied:
    """One of four ranks with one tied weight and one of its own."""

    def __init__(self, rank: int = 0, log: Log | None = None, sources: tuple[int, ...] | None = None) -> None:
        self.group = Group("pipeline", RANKS, rank)
        self.rank = Rank(log or Log(), rank, sources, self.group)
        self.updates = self.rank.updates
        self.ties: Ties = self.updates.ties
        self.shared = torch.nn.Parameter(torch.full((3,), 2.0))
        self.own = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.shared, self.own], lr=1.0)
        self.updates.add(self.optimizer)
        self.ties.add(self.shared, RANKS)
        self.updates.begin_step(0)

    def backward(self) -> None:
        self.shared.grad = torch.full((3,), 1.5)
        self.own.grad = torch.ones(2)


def test_it_is_summed_once_before_each_update() -> None:
    tied = Tied()
    tied.backward()
    tied.updates.reduce()
    tied.updates.reduce()
    assert tied.shared.grad is not None
    assert tied.shared.grad.tolist() == [6.0] * 3
    tied.optimizer.step()
    assert tied.shared.tolist() == [-4.0] * 3
    tied.backward()
    tied.optimizer.step()
    assert tied.shared.tolist() == [-10.0] * 3
    assert tied.own.tolist() == [-1.0] * 2


def test_a_replay_takes_the_sum_from_the_log_and_asks_nobody() -> None:
    log = Log()
    first = Tied(2, log)
    first.backward()
    first.optimizer.step()
    again = Tied(0, log, sources=(2,))
    again.backward()
    again.optimizer.step()
    assert again.group.asked == 0
    assert torch.equal(again.shared, first.shared)


def test_a_step_without_an_update_sums_nothing() -> None:
    """Its gradient may go on to the next one, and would be summed again."""
    tied = Tied()
    tied.backward()
    tied.updates.end_step()
    assert tied.shared.grad is not None
    assert tied.shared.grad.tolist() == [1.5] * 3


@pytest.mark.parametrize(("used", "expected"), [((1, 0, 0, 1), [3.0] * 3), ((0, 0, 0, 0), None)])
def test_who_has_not_used_it_adds_nothing(used: tuple[int, ...], expected: list[float] | None) -> None:
    tied = Tied()

    def others(said: list[torch.Tensor]) -> None:
        if said[0].dtype == torch.int64:
            for one, has in zip(said, used, strict=True):
                one[1] = has

    tied.group.others = others
    if used[0]:
        tied.backward()
    tied.updates.reduce()
    assert (None if tied.shared.grad is None else tied.shared.grad.tolist()) == expected


def crossing_of(tied: Tied) -> Crossing:
    state = SimpleNamespace(updates=tied.updates, objects={})
    return Crossing(site_of(channel=tied.rank.channel, state=state), {"pipeline": cast(Any, tied.group)})


def test_a_norm_counts_it_once() -> None:
    """The first of its ranks does. 4.498 was said for a true 4.254."""
    for rank, parts in ((0, [1.5] * 3 + [1.0] * 2), (2, [1.0] * 2)):
        tied = Tied(rank)
        crossing = crossing_of(tied)
        tied.backward()
        norm = crossing.clip_grad_norm_([tied.shared, tied.own], 1e9, 2.0, ())
        own = torch.tensor([4 * value if value == 1.5 else value for value in parts])  # it is summed by then
        assert torch.isclose(norm, (4 * own.square().sum()).sqrt())


def test_a_norm_leaves_out_what_is_named_so_and_clips_it() -> None:
    tied = Tied()
    crossing = crossing_of(tied)
    tied.backward()
    norm = crossing.clip_grad_norm_([tied.own], 1.0, 2.0, [tied.own])
    assert norm == 0
    norm = crossing.clip_grad_norm_([tied.own, tied.shared], 1.0, 2.0, [tied.own])
    assert tied.own.grad is not None
    assert torch.isclose(norm, torch.tensor((4 * 3 * 36.0) ** 0.5))
    assert torch.allclose(tied.own.grad, torch.ones(2) / norm)


def test_ranks_that_mean_another_weight_are_named() -> None:
    tied = Tied()
    tied.ties.align()

    def others(said: list[torch.Tensor]) -> None:
        if said[2].dtype == torch.uint8:
            said[2].copy_(torch.frombuffer(bytearray(b"[]".ljust(len(said[2]))), dtype=torch.uint8))

    tied.group.others = others
    with pytest.raises(UsageError, match=r"rank 0 ties .* and rank 2 nothing over the ranks \[0, 1, 2, 3\]"):
        tied.ties.align()


def test_ranks_at_other_steps_are_named() -> None:
    tied = Tied()

    def others(said: list[torch.Tensor]) -> None:
        if said[1].dtype == torch.int64:
            said[1][0] = 7

    tied.group.others = others
    tied.backward()
    with pytest.raises(UsageError, match="tie 0 is updated in step 0 here and in step 7 on rank 1"):
        tied.updates.reduce()


def test_what_cannot_be_tied_is_refused() -> None:
    tied = Tied()
    with pytest.raises(UsageError, match="this parameter before"):
        tied.ties.add(tied.shared, RANKS)
    with pytest.raises(UsageError, match=r"ranks=\[1, 2\]: give pipeline ranks from 0 to 3, this one \(0\)"):
        tied.ties.add(tied.own, [1, 2])
    with pytest.raises(UsageError, match="give two ranks or more"):
        tied.ties.add(tied.own, [0])
    with pytest.raises(UsageError, match="no optimizer of this rank holds"):
        tied.ties.check([tied.own])
    with pytest.raises(UsageError, match="wait_free"):
        updates_of(SessionConfig(replicas=2, updates="wait_free"), object()).tie(tied.own, RANKS)
    with pytest.raises(UsageError, match="LBFGS"):
        tied.ties.check_closure([tied.shared])


def test_parts_of_a_group_keep_their_messages_apart() -> None:
    numbers = [backend.group_number(f"pipeline[0,{other}]") for other in range(1, 40)]
    assert all(backend.GROUPS <= number < 2 * backend.GROUPS for number in numbers)
    whole = [
        backend.group_number(name)
        for name in ("default", "all", "pipeline", "data", "replicate", "shard", "tensor")
    ]
    assert len(set(whole)) == len(whole)
    assert max(whole) < backend.GROUPS
    assert backend.first_tag(backend.TRAINERS_GROUPS + backend.TRAINERS_GROUPS_MAX) < 2**31

"""A copy of a state in an older copy's memory, where other names share one tensor than before."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from swift_ft.state.checkpoint_file import Snapshot
from swift_ft.state.tree import join, split
from tests.unit.runtime.test_snapshots import RANKS, Job
from tests.unit.runtime.test_staggering import Rank

NAMES = "abc"
TYINGS = ["012", "001", "010", "011", "000"]
"""Which of the three names have the same memory."""
CHANGES = [*product(TYINGS, TYINGS)]


def tied(tying: str, value: float, *, transposed: bool = False) -> dict[str, torch.Tensor]:
    """Every memory with a value of its own. The names come in another order for another value: a swap."""
    memories = {which: torch.full((2, 3), value + 10 * int(which)) for which in tying}
    if transposed:
        memories = {which: memory.T for which, memory in memories.items()}
    pairs = list(zip(NAMES, tying, strict=True))
    if int(value) % 2:
        pairs.reverse()
    return {name: memories[which] for name, which in pairs}


def is_copy(copy: dict[str, torch.Tensor], of: dict[str, torch.Tensor]) -> None:
    """Its bits, and its ties; in memory of its own."""
    for name, tensor in of.items():
        assert torch.equal(copy[name], tensor), name
        assert copy[name].stride() == tensor.stride()
        assert copy[name].data_ptr() != tensor.data_ptr()
        for other in of:
            are_one = of[other].data_ptr() == tensor.data_ptr()
            assert (copy[other].data_ptr() == copy[name].data_ptr()) is are_one, f"{name} and {other}"


def memories(state: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in state.values()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_copy(before: str, after: str, transposed: bool) -> None:
    first = Snapshot(tied(before, 0.0, transposed=transposed)).state()
    state = tied(after, 1.0, transposed=transposed)
    second = Snapshot(state, into=split(first)[0]).state()
    is_copy(second, state)
    assert used_again(memories(first), memories(second), whole=before == after)


def used_again(before: set[int], after: set[int], *, whole: bool) -> bool:
    return before == after if whole else bool(before & after)


class Tied:
    """The state of a rank whose names share memory otherwise from version to version."""

    version = 0

    def __init__(self, rank: int, tyings: Sequence[str], *, transposed: bool) -> None:
        self.rank, self.tyings, self.transposed = rank, tyings, transposed

    def step(self) -> None:
        self.version += 1

    def named(self) -> dict[str, torch.Tensor]:
        tying = self.tyings[self.version // 2]
        return tied(tying, self.version // 2 + 100.0 * self.rank, transposed=self.transposed)

    def state_dict(self) -> dict[str, Any]:
        self.told = self.named()
        return {"version": self.version, "names": self.told}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_snapshots_of_this_rank_and_of_others(before: str, after: str, transposed: bool) -> None:
    """The third one is in the memory of the first."""
    job = Job()
    job.states = [Tied(rank, [before, "012", after], transposed=transposed) for rank in range(RANKS)]
    job.ranks = [job.fresh(rank) for rank in range(RANKS)]
    seen: list[list[set[int]]] = []
    for _ in range(3):
        job.take()
        version = job.states[0].version
        seen.append([])
        for rank, of in product(range(RANKS), range(RANKS)):
            if of not in (rank, (rank - 1) % RANKS):
                continue
            copy = job.ranks[rank].of(of, version)  # its digest is what was taken
            names = join(copy.state["skeleton"], copy.state["tensors"])["names"]
            is_copy(names, job.states[of].told)
            seen[-1].append(memories(names))
        job.steps(2)
    for first, third in zip(seen[0], seen[2], strict=True):
        assert used_again(first, third, whole=before == after)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_what_a_rank_that_is_ahead_goes_back_to(before: str, after: str) -> None:
    rank = Rank()
    state: Any = rank.state
    state.named = tied(before, 0.0)
    state.state_dict = lambda: {"version": state.version, "named": state.named}
    state.load_state_dict = lambda loaded: setattr(state, "named", loaded["named"])
    rank.step().done = True
    first = memories(split(rank.staggering._copies[0].state())[0])
    rank.step().done = True
    state.named = tied(after, 1.0)
    rank.step()
    is_copy(rank.staggering._copies[2].state()["named"], state.named)
    third = memories(split(rank.staggering._copies[2].state())[0])
    assert used_again(first, third, whole=before == after)
    wanted = state.named
    assert rank.staggering.take_back(2)
    is_copy(state.named, wanted)


def test_an_average_that_begins_as_the_weights() -> None:
    """It has their memory until it is first computed."""
    weights = torch.ones(4)
    first = Snapshot({"w": weights, "average": weights.detach()})
    weights += 1
    average = 0.9 * torch.ones(4) + 0.1 * weights
    second = Snapshot({"w": weights, "average": average}, into=split(first.state())[0]).state()
    assert torch.equal(second["w"], weights)
    assert torch.equal(second["average"], average)

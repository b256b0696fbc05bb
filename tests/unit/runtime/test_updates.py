"""When buckets are reduced, voted on and applied, and what a rank can say of itself in between."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.train.config import SessionConfig
from swift_ft.train.updates import Outcome, Standing, ballot, outcome
from tests.unit.runtime.wired import updates_of


class Reduction:
    task = SimpleNamespace(done=True)

    def __init__(self, bucket: Any):
        self.bucket = bucket


class HalvingReducer:
    """A reducer whose other replica has no gradients: averages are halves. Breaks at the n-th bucket."""

    seconds = 0.0

    def __init__(self, breaks_at: int | None = None):
        self.breaks_at, self.launched = breaks_at, 0

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def launch(self, bucket: Any) -> Reduction:
        self.launched += 1
        return Reduction(bucket)

    def finish(self, reduction: Reduction, *, kept: bool = False) -> None:
        if self.breaks_at is not None and self.launched > self.breaks_at:
            raise RuntimeError("Connection closed by peer")
        for parameter in reduction.bucket:
            if parameter.grad is not None:
                parameter.grad.div_(2)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class World:
    """One rank with a model of four layers, one bucket each."""

    def __init__(
        self, reducer: HalvingReducer | None = None, *, replicas: int = 2, make: Any = adamw, **settings: Any
    ):
        """`make`: the optimizer, of the model."""
        self.model = layers()
        config = SessionConfig(replicas=replicas, bucket_bytes=1, **settings)
        reducer = None if replicas == 1 else reducer or HalvingReducer()
        self.updates = updates_of(config, reducer, vote=self.vote)
        self.votes: list[Standing] = []
        self.fails: Exception | None = None
        self.unit = WholeModule(self.model)
        if self.updates.wait_free:
            self.updates.awaited.add(self.unit)
        self.optimizer = make(self.model)
        self.updates.add(self.optimizer)
        self.updates.begin_step(0)

    def vote(self) -> None:
        self.updates.voting = True
        self.votes.append(self.updates.standing(0))
        if self.fails is not None:
            raise self.fails

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()

    def bits(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain_step() -> list[torch.Tensor]:
    """The model after one step of stock torch with the averaged gradients."""
    world = World()
    optimizer = torch.optim.AdamW(world.model.parameters(), lr=0.1)
    world.backward()
    for parameter in world.model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2)
    optimizer.step()
    return world.bits()


def test_nothing_is_applied_before_the_vote() -> None:
    world = World()
    before = world.bits()
    world.backward()
    world.fails = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError):
        world.optimizer.step()
    assert same(world.bits(), before)
    # Nobody knows before the first vote whether some rank writes lines.
    assert world.votes == [Standing(version=0, forward_to=1, forward_by_all=True)]


def test_after_the_vote_the_step_has_the_bits_of_a_plain_one() -> None:
    world = World()
    world.backward()
    world.optimizer.step()
    assert same(world.bits(), plain_step())
    assert world.updates.standing(0) == Standing(version=None)  # until the trainer's step has ended
    world.updates.begin_step(1)
    assert world.updates.standing(1) == Standing(version=1)


def test_a_broken_reduction_is_no_vote() -> None:
    world = World(HalvingReducer(breaks_at=2))
    before = world.bits()
    world.backward()
    with pytest.raises(RuntimeError):
        world.optimizer.step()
    assert not world.votes
    assert same(world.bits(), before)
    assert world.updates.standing(0) == Standing(version=0)


def test_wait_free_buckets_are_applied_while_backward_goes_on_and_taken_back() -> None:
    world = World(updates="wait_free", undo="exact")
    before = world.bits()
    world.backward()
    assert world.updates.journals[0].applied == (0, 1, 2)  # the one launched last goes on beside backward
    assert world.updates.standing(0) == Standing(version=None, undo_to=0, undo_exact=True)
    assert not same(world.bits(), before)
    results = world.updates.undo()
    assert [(r.buckets, r.exact) for r in results] == [(3, True)]
    assert same(world.bits(), before)
    assert not world.optimizer.state


def test_a_wait_free_step_has_the_bits_of_a_plain_one_and_votes_last() -> None:
    world = World(updates="wait_free")
    world.backward()
    world.optimizer.step()
    assert same(world.bits(), plain_step())
    assert world.votes == [
        Standing(version=None, undo_to=0, undo_exact=True, forward_to=1, forward_by_all=True)
    ]


def test_a_wait_free_step_that_breaks_in_the_middle_comes_back() -> None:
    world = World(HalvingReducer(breaks_at=2), updates="wait_free")
    before = world.bits()
    with pytest.raises(RuntimeError):
        world.backward()
    assert world.updates.standing(0).undo_to == 0
    world.updates.undo()
    assert same(world.bits(), before)


def test_an_arithmetic_undo_says_that_it_is_not_exact() -> None:
    world = World(updates="wait_free", undo="arithmetic")
    world.backward()
    assert world.updates.standing(0) == Standing(version=None, undo_to=0, undo_exact=False)


def test_a_second_backward_pass_of_a_wait_free_step_is_refused() -> None:
    world = World(updates="wait_free")
    world.backward()
    with pytest.raises(UsageError, match="accumulating"):
        world.backward()


def test_what_cannot_go_together_with_wait_free_updates_is_named() -> None:
    world = World(updates="wait_free")
    with pytest.raises(UsageError, match="gradient scaler"):
        world.updates.check_complete({"scaler": torch.amp.GradScaler("cpu")})
    world.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="pre-hook"):
        world.updates.check_complete({})
    world.updates.elsewhere.update(world.model.parameters())
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        world.updates.check_complete({})


def test_two_optimizers_vote_once() -> None:
    world = World()
    other = nn.Parameter(torch.ones(3))
    second = torch.optim.SGD([other], lr=0.5)
    world.updates.add(second)
    world.updates.begin_step(0)
    world.backward()
    other.grad = torch.ones(3)
    world.optimizer.step()
    second.step()
    assert len(world.votes) == 1
    assert torch.equal(other.detach(), torch.full((3,), 0.75))


def test_an_optimizer_that_computes_gradients_in_its_first_step_votes_behind_it() -> None:
    """LBFGS from step 6 on: a replica that is lost in its first step leaves nobody with an update that only it could
    have finished."""
    world = World(HalvingReducer(breaks_at=2))
    lbfgs = torch.optim.LBFGS(world.model.parameters(), max_iter=3)
    world.updates.add(lbfgs)
    world.updates.begin_step(6)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = world.model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="closed by peer"):
        lbfgs.step(closure)
    assert world.votes == []
    assert world.updates.standing(6).forward_to is None


@pytest.mark.parametrize("lines", [False, True])
def test_a_vote_says_whether_another_rank_writes_lines(lines: bool) -> None:
    updates = World().updates
    updates.begin_step(0)
    said = updates.ballot(0, 1, lines=False, waits=False)
    said[1] = float(lines)  # the greatest of what all ranks say
    updates.apply_outcome(said, 0)
    updates.voting = True
    assert updates.standing(0).forward_by_all is lines


# -- what a vote says is the greatest of what ranks have said ------------------------------------------


def of(*said: torch.Tensor) -> Outcome:
    return outcome(torch.stack(said).amax(0), step=7)


def rank(
    group: int, *, holds: bool = False, lines: bool = False, waits: bool = False, steps: float = 1.0
) -> torch.Tensor:
    return ballot(holds=holds, lines=lines, waits=waits, steps=steps, group=group, groups=2)


def test_what_one_rank_says_holds_for_all() -> None:
    assert of(rank(0), rank(0), rank(1), rank(1)) == Outcome(hold_next=False, lines=False, waits_next=False)
    assert of(rank(0), rank(0, holds=True), rank(1)) == Outcome(hold_next=True, lines=False, waits_next=False)
    assert of(rank(0), rank(1), rank(1, lines=True)) == Outcome(hold_next=False, lines=True, waits_next=False)
    assert of(rank(0), rank(1, waits=True)) == Outcome(hold_next=False, lines=False, waits_next=True)


def test_replicas_step_alike_and_stages_as_they_like() -> None:
    of(rank(0, steps=2.0), rank(0, steps=2.0), rank(1, steps=0.0))
    with pytest.raises(
        UsageError, match="in step 7 optimizers have stepped 2 times on one replica of pipeline rank 1"
    ):
        of(rank(0), rank(1, steps=2.0), rank(1, steps=1.0))

"""Gradients that a step leaves to the next one: a step that is dropped and a state that is loaded have them, too."""

import json
from collections.abc import Callable

import pytest
import torch

from swift_ft.state.carried_gradients import LeftGradients
from swift_ft.state.tree import join, split

STEPS = 24


class Trainer:
    """One weight, with plain torch and what the session does around a step."""

    def __init__(self, habit: "Habit", *, sparse: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4, 3) if sparse else torch.ones(3))
        self.sparse = sparse
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.left, self.habit, self.updated = LeftGradients(), habit, False

    def backward(self, step: int) -> None:
        torch.manual_seed(step)
        weight = self.weight
        if self.sparse:
            weight = torch.nn.functional.embedding(torch.randint(4, (3,)), weight, sparse=True)
        (weight * torch.rand(3)).square().sum().backward()

    def update(self) -> None:
        self.left.update_begins([self.weight])
        self.optimizer.step()
        self.updated = True

    def step(self, step: int) -> None:
        self.left.begin([self.weight])
        self.updated = False
        self.habit(self, step)
        self.left.end([self.weight], updated=self.updated)

    def drop(self, step: int) -> None:
        """A step that is cut short before its update."""
        self.left.begin([self.weight])
        self.optimizer.zero_grad()
        self.backward(step)
        self.left.restore([self.weight])

    def begins_again(self) -> "Trainer":
        """In another process, by what this one's state holds."""
        other = Trainer(self.habit, sparse=self.sparse)
        other.weight.data.copy_(self.weight.data)
        tensors, skeleton = split(self.left.state({"w": self.weight}))
        assert all(tensor.layout is torch.strided for tensor in tensors.values()), "as checkpoints want them"
        other.left.load({"w": other.weight}, join(json.loads(json.dumps(skeleton)), tensors))
        return other


Habit = Callable[[Trainer, int], None]


def zeroes(trainer: Trainer, step: int) -> None:
    trainer.optimizer.zero_grad()
    trainer.backward(step)
    trainer.update()


def updates_first(trainer: Trainer, step: int) -> None:
    if step:
        trainer.update()
    trainer.optimizer.zero_grad()
    trainer.backward(step)


def accumulates_from(begin: int, *, to_none: bool = True) -> Habit:
    """Two steps for each update from there on."""

    def habit(trainer: Trainer, step: int) -> None:
        count = 2 if step >= begin else 1
        if step % count == 0:
            trainer.optimizer.zero_grad(set_to_none=to_none)
        trainer.backward(step)
        if step % count == count - 1:
            trainer.update()

    return habit


def skips(trainer: Trainer, step: int) -> None:
    """The update of every fourth step, and goes on with what it has."""
    trainer.backward(step)
    if step % 4 != 3:
        trainer.update()
        trainer.optimizer.zero_grad()


HABITS: dict[str, Habit] = {
    "zeroes": zeroes,
    "updates first": updates_first,
    "accumulates": accumulates_from(0),
    "accumulates later": accumulates_from(10),
    "accumulates later, in place": accumulates_from(10, to_none=False),
    "skips": skips,
}


@pytest.mark.parametrize("at", range(1, STEPS))
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("habit", HABITS)
def test_a_step_that_is_dropped_leaves_what_the_one_before_has_left(
    habit: str, sparse: bool, at: int
) -> None:
    never, dropped, again = (Trainer(HABITS[habit], sparse=sparse) for _ in range(3))
    for step in range(STEPS):
        if step == at:
            dropped.drop(step)
            again = again.begins_again()
        for trainer in (never, dropped, again):
            trainer.step(step)
    assert torch.equal(dropped.weight, never.weight), "dropped"
    assert torch.equal(again.weight, never.weight), "loaded"


def leaves_some_behind_its_update(trainer: Trainer, step: int) -> None:
    """As a generator's backward does in a discriminator: the next step zeroes them."""
    zeroes(trainer, step)
    trainer.backward(step)


def leaves_some_and_zeroes_in_place(trainer: Trainer, step: int) -> None:
    trainer.optimizer.zero_grad(set_to_none=False)
    trainer.backward(step)
    trainer.update()
    trainer.backward(step)


COMPARED = {
    "updates first": (updates_first, True),
    "accumulates": (accumulates_from(0), False),
    "leaves": (leaves_some_behind_its_update, False),
    "leaves, in place": (leaves_some_and_zeroes_in_place, False),
    "zeroes": (zeroes, False),
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("habit", COMPARED)
def test_replicas_have_in_common_what_the_next_update_uses(habit: str, elsewhere: bool) -> None:
    """The session averages the rest, or nobody uses it. What DDP averages later is each replica's own."""
    does, used = COMPARED[habit]
    trainer = Trainer(does)
    for step in range(5):
        trainer.step(step)
    own = {trainer.weight} if elsewhere else set()
    parts = trainer.left.parts({"w": trainer.weight}, {trainer.weight}, own)
    assert bool(parts) is (used or (elsewhere and habit == "accumulates"))
    again = trainer.begins_again()
    assert again.left.parts({"w": again.weight}, {again.weight}, set()).keys() == (
        parts.keys() if used else set()
    )


@pytest.mark.parametrize("at", range(1, 8))
def test_who_joins_sees_accumulation_in_the_same_step(at: int) -> None:
    trainer = never = Trainer(accumulates_from(3))
    seen = []
    for step in range(8):
        if step == at:
            trainer = trainer.begins_again()
        trainer.step(step)
        if trainer is not never:
            never.step(step)
        seen.append((trainer.left.news(), trainer.left._adds))
        assert trainer.left._adds is never.left._adds is (step >= 5)
    assert (True, True) in seen[at:] or at > 5


def test_that_they_are_wanted_is_news_once_also_for_who_joins() -> None:
    trainer = Trainer(updates_first)
    told = []
    for step in range(5):
        trainer.step(step)
        told.append(trainer.left.news())
    assert told.count(True) == 1
    assert not trainer.begins_again().left.news()


def test_who_zeroes_has_nothing_kept() -> None:
    trainer = Trainer(zeroes)
    for step in range(3):
        trainer.step(step)
    assert trainer.left.state({"w": trainer.weight}) == {"wanted": False, "of": {}}


def test_what_a_dropped_step_has_shown_is_news_when_it_is_done_again() -> None:
    """Replicas compare at such news, and one that has come meanwhile has not seen the dropped step."""
    survivor = Trainer(updates_first)
    survivor.step(0)
    assert not survivor.left.news()
    survivor.left.begin([survivor.weight])
    survivor.update()
    survivor.left.restore([survivor.weight])
    replacement = survivor.begins_again()
    for trainer in (survivor, replacement):
        trainer.step(1)
    assert survivor.left.news()
    assert replacement.left.news()

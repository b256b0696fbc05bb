"""A step that gives its optimizer other parameters updates those, as plain torch does; or it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.errors import UsageError
from tests.unit.runtime.test_updates import World, layers, same

STEPS, CHANGES_AT = 4, 1
Optimizer = torch.optim.Optimizer
Change = Callable[[nn.Module, Optimizer], None]


def adds_a_group(model: Any, optimizer: Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})


def appends(model: Any, optimizer: Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.param_groups[0]["params"].append(model[0].weight)


def replaces_the_list(model: Any, optimizer: Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.param_groups[0]["params"] = [model[0].weight, model[1].weight]


def removes_a_group(model: Any, optimizer: Optimizer) -> None:
    for parameter in optimizer.param_groups.pop()["params"]:
        del optimizer.state[parameter]


def unfreezes(model: Any, optimizer: Optimizer) -> None:
    model[1].requires_grad_(True)


def freezes(model: Any, optimizer: Optimizer) -> None:
    model[3].requires_grad_(False)


CHANGES = [adds_a_group, appends, replaces_the_list, removes_a_group, unfreezes, freezes]


def grouped(kind: type[Optimizer]) -> Callable[[Any], Optimizer]:
    """Of all layers but the first, which is frozen; so is the second one, which the optimizer has."""

    def make(model: Any) -> Optimizer:
        model[:2].requires_grad_(False)
        groups = [{"params": model[1:3].parameters()}, {"params": model[3].parameters(), "weight_decay": 0.2}]
        return kind(groups, lr=0.1)  # type: ignore[call-arg]

    return make


def train(
    model: Any, optimizer: Optimizer, change: Change, place: str, *, begins: Any, after_backward: Any
) -> list[Any]:
    """The parameters and the optimizer's state of each of them, after each step."""
    seen: list[Any] = []
    for step in range(STEPS):
        begins(step)

        def at(here: str, step: int = step) -> None:
            if (step, here) == (CHANGES_AT, place):
                change(model, optimizer)

        at("start")
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        at("backward")
        after_backward()
        at("reduced")
        optimizer.step()
        state = {
            name: {key: torch.as_tensor(value).clone() for key, value in optimizer.state[p].items()}
            for name, p in model.named_parameters()
            if p in optimizer.state
        }
        seen.append([[p.detach().clone() for p in model.parameters()], state])
    return seen


def plain(change: Change, place: str, kind: type[Optimizer], divisor: int) -> list[Any]:
    model = layers()
    optimizer = grouped(kind)(model)

    def halved() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    return train(model, optimizer, change, place, begins=lambda step: None, after_backward=halved)


def changing(kind: type[Optimizer] = torch.optim.AdamW, **settings: Any) -> World:
    return World(make=grouped(kind), **settings)


def trained(world: World, change: Change, place: str) -> list[Any]:
    def reduces() -> None:
        if place == "reduced":  # as clip_grad_norm_ does
            world.updates.reduce_of(world.model.parameters())

    begins = world.updates.begin_step
    return train(world.model, world.optimizer, change, place, begins=begins, after_backward=reduces)


def equal(one: list[Any], other: list[Any]) -> bool:
    for (parameters, state), (others, other_state) in zip(one, other, strict=True):
        if not same(parameters, others) or state.keys() != other_state.keys():
            return False
        if any(not torch.equal(v, other_state[n][k]) for n, each in state.items() for k, v in each.items()):
            return False
    return True


class Own(torch.optim.AdamW):
    """A class that is not known: one bucket."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("place", ["start", "backward", "reduced"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Own])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_updates_what_its_optimizer_has_by_then(
    change: Change, kind: type[Optimizer], place: str, replicas: int
) -> None:
    world = changing(kind, replicas=replicas)
    assert equal(trained(world, change, place), plain(change, place, kind, replicas))


@pytest.mark.parametrize("change", CHANGES)
def test_so_does_a_wait_free_step_before_its_backward_pass(change: Change) -> None:
    world = changing(updates="wait_free")
    assert equal(trained(world, change, "start"), plain(change, "start", torch.optim.AdamW, 2))


@pytest.mark.parametrize("change", [adds_a_group, appends, replaces_the_list, removes_a_group])
def test_and_behind_it_is_refused(change: Change) -> None:
    world = changing(updates="wait_free")
    with pytest.raises(UsageError, match=r"wait_free.*before the backward pass"):
        trained(world, change, "backward")


def test_a_parameter_of_a_wait_free_step_of_which_no_module_knew_is_refused() -> None:
    def puts_another(model: Any, optimizer: Optimizer) -> None:
        model[3].weight = nn.Parameter(model[3].weight.detach().clone())
        optimizer.param_groups[1]["params"][:] = [model[3].weight]

    with pytest.raises(UsageError, match=r"wait_free.*before the backward pass"):
        trained(changing(updates="wait_free"), puts_another, "start")


def test_a_hook_of_an_optimizer_does_not_change_its_parameters() -> None:
    world = changing()
    world.optimizer.register_step_pre_hook(lambda *_: adds_a_group(world.model, world.optimizer))
    with pytest.raises(UsageError, match="in the middle of its update"):
        trained(world, freezes, "start")


def test_a_step_with_another_group_is_taken_back() -> None:
    """As when it is cut short behind its updates: nothing of the new parameters is left."""
    world = changing()
    trained(world, freezes, "start")
    before, groups = world.bits(), list(world.optimizer.param_groups)
    state = {id(p): {k: v.clone() for k, v in of.items()} for p, of in world.optimizer.state.items()}
    world.updates.hold_next = True
    world.updates.begin_step(STEPS)
    for change in (adds_a_group, unfreezes):
        change(world.model, world.optimizer)
        world.optimizer.zero_grad()
        world.model(torch.ones(2, 4)).square().sum().backward()
        world.optimizer.step()
    assert not same(world.bits(), before)
    world.optimizer.param_groups[:] = groups
    world.updates.undo()
    assert same(world.bits(), before)
    assert {id(p) for p in world.optimizer.state} == set(state)
    for parameter, of in world.optimizer.state.items():
        assert all(torch.equal(value, state[id(parameter)][key]) for key, value in of.items())

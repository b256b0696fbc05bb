"""What goes by several names in a module or an optimizer is one thing behind a restore, too."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.tree import join, split
from swift_ft.train.training_state import TrainerState
from tests.unit.runtime.wired import state_of, updates_of


class Bank(nn.Module):
    """Its buffer, which lasts, is changed by other names; `begun` and `after` are what the two forms differ in."""

    begun: Callable[["Bank"], None]
    made: Callable[["Bank", int], None]
    change: Callable[["Bank", int], None]

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("bank", torch.zeros(4, 3))
        self.begin, self.step, self.values = FORMS[form]
        self.begin(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.step(self)
        return self.linear(x) + float(self.values(self))


def _nothing(_: Any) -> None: ...


def _column(m: Any) -> None:
    m.v = m.bank[:, :2]


def _in_dict(m: Any) -> None:
    m.st = {"v": m.bank[0], "n": 0}


def _rows(m: Any) -> None:
    m.rows = [m.bank[i] for i in range(4)]


def _two_names(m: Any) -> None:
    m.m = torch.zeros(3)
    m.held = [m.m]


def _one_list(m: Any) -> None:
    m.h = m.g = []


def _arrays(m: Any) -> None:
    m.held = {"a": np.zeros(3)}
    m.a = m.held["a"]


def _parted(m: Any) -> None:
    """They begin as one, and a step gives one of them a value of its own."""
    m.best = m.best if m.best is not m.m else m.m.clone()
    m.m += 1


def _begin_parted(m: Any) -> None:
    m.m = m.best = torch.zeros(2)


def _add(name: str, inner: Any = None) -> Callable[[Any], None]:
    def step(m: Any) -> None:
        thing = getattr(m, name)
        thing = thing if inner is None else thing[inner]
        thing += 0.5
        thing *= 1.5

    return step


def _append(m: Any) -> None:
    m.h.append(float(len(m.g)))


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "a column of a buffer": (_column, _add("v"), lambda m: m.bank.sum()),
    "a view in a dict": (_in_dict, _add("st", "v"), lambda m: m.bank.sum()),
    "views in a list": (_rows, _add("rows", 2), lambda m: m.bank.sum()),
    "a tensor under a name and in a list": (_two_names, _add("held", 0), lambda m: m.m.sum()),
    "a list under two names": (_one_list, _append, lambda m: sum(m.g)),
    "an array under two names": (_arrays, _add("a"), lambda m: m.held["a"].sum()),
    "one that a step parts": (_begin_parted, _parted, lambda m: m.best.sum() + m.m.sum()),
}


class FlatMomentum(torch.optim.Optimizer):
    """Its state is one tensor, of which the state of each parameter is a view."""

    def __init__(self, params: Any, late: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        if not late:
            self.lay_out()

    def lay_out(self) -> None:
        params = self.param_groups[0]["params"]
        self.flat = torch.zeros(sum(p.numel() for p in params))
        begin = 0
        for p in params:
            self.state[p]["momentum"] = self.flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "flat"):
            self.lay_out()
        self.flat.mul_(0.9)
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"].add_(p.grad)
            p.sub_(self.state[p]["momentum"], alpha=self.param_groups[0]["lr"])


def trainer(form: str, optimizer: str = "SGD") -> tuple[TrainerState, Bank, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Bank(form)
    made: torch.optim.Optimizer = (
        torch.optim.SGD(module.parameters(), 0.1)
        if optimizer == "SGD"
        else FlatMomentum(module.parameters(), late=optimizer == "late")
    )
    state = state_of(1, updates_of())
    state.add_stage(WholeModule(module))
    state.updates.add(made)
    state.check_complete()
    state.remember()
    return state, module, made


def steps(state: TrainerState, module: Bank, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        state.begin_step()
        optimizer.zero_grad()
        module(torch.full((1, 2), 1.0 + state.version)).sum().backward()
        optimizer.step()
        state.end_step()


def saved(state: TrainerState) -> Any:
    tensors, skeleton = split(state.shared_dict())
    return join(json.loads(json.dumps(skeleton)), {name: tensor.clone() for name, tensor in tensors.items()})


def told(state: TrainerState, module: Bank) -> Any:
    digests = state.digests()
    return {**digests, "seen": float(module.values(module)), "bank": module.bank.tolist()}


@pytest.mark.parametrize("later", [0, 1, 6], ids=["replacement", "near", "far"])
@pytest.mark.parametrize("form", FORMS)
def test_what_goes_by_several_names_stays_one_thing(form: str, later: int) -> None:
    (state, *mine), (other, *theirs) = trainer(form), trainer(form)
    steps(state, *mine, count=3)
    kept = saved(state)
    steps(state, *mine, count=2)
    steps(other, *theirs, count=later)
    other.load_state_dict(kept)
    steps(other, *theirs, count=2)
    assert told(other, theirs[0]) == told(state, mine[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_survivor_goes_back_to_what_it_began_with(form: str) -> None:
    (state, *mine), (other, *theirs) = trainer(form), trainer(form)
    first = saved(state)
    steps(state, *mine, count=3)
    state.load_state_dict(first)
    for each, parts in ((state, mine), (other, theirs)):
        steps(each, *parts, count=2)
    assert told(other, theirs[0]) == told(state, mine[0])


@pytest.mark.parametrize(("kind", "later"), [("early", 0), ("early", 2), ("late", 2)])
def test_an_optimizers_flat_state_stays_one_with_the_views_of_it(kind: str, later: int) -> None:
    (state, *mine), (other, *theirs) = (trainer("views in a list", kind) for _ in range(2))
    steps(state, *mine, count=3)
    kept = saved(state)
    steps(state, *mine, count=2)
    steps(other, *theirs, count=later)
    other.load_state_dict(kept)
    steps(other, *theirs, count=2)
    assert other.digests() == state.digests()
    assert torch.equal(mine[0].linear.weight, theirs[0].linear.weight)


def test_gradients_stay_views_of_what_they_lie_in() -> None:
    trainers = [trainer("views in a list") for _ in range(2)]
    flats = []
    for _, module, _ in trainers:
        flat, begin = torch.zeros(3), 0
        for p in module.parameters():
            p.grad = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        flats.append(flat)
    (state, module, _), (other, theirs, _) = trainers
    module(torch.ones(1, 2)).sum().backward()
    other.load_state_dict(saved(state))
    assert flats[0].any()
    assert torch.equal(flats[1], flats[0])
    assert theirs.linear.weight.grad is not None
    assert theirs.linear.weight.grad.data_ptr() == flats[1].data_ptr()

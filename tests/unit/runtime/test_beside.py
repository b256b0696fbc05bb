"""What modules keep in Python: a dropped step takes it back, and another process gets it."""

import copy
import enum
import json
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift.checkpoint.state import join, split
from swift.errors import UsageError
from swift.runtime.beside import Beside
from swift.runtime.shape_inference import Inference
from swift.runtime.standing import Standing
from swift.runtime.state import TrainerState
from swift.runtime.whole_module import WholeModule
from tests.unit.runtime.wired import state_of, updates_of


class Mode(enum.Enum):
    WARM, COLD = 1, 2


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


class Ring(deque[float]):
    def __init__(self) -> None:
        super().__init__(maxlen=3)
        self.position = 0

    def append(self, value: float) -> None:
        self.position += 1
        super().append(value)


class Odd(nn.Module):
    """As people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.key = nn.Linear(3, 3)
        self.key.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.calls, self.mode, self.rank = 0, Mode.WARM, id(self)
        self.past: list[float] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.table = {"a": [1, 2], "act": torch.relu}
        self.counts = np.zeros(3, dtype=np.int64)
        self.scale = torch.ones(3)
        self.meter = Meter()
        self.noise = torch.Generator().manual_seed(1)
        self.dice = random.Random(1)
        self.hidden = [nn.Linear(3, 3)]
        self.hidden[0].requires_grad_(False)
        self.raw, self.ring = bytearray(2), Ring()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.linear.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            for mine, theirs in zip(self.hidden[0].parameters(), self.linear.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.scale.mul_(1.01)
        self.calls += 1
        self.mode = Mode.COLD
        self.past.append(float(self.calls))
        self.recent.append(self.calls)
        self.table["a"].append(self.calls)
        self.table["b"] = self.calls
        self.counts += 1
        self.meter.total += 0.5
        self.meter.values.append(self.meter.total)
        self.raw[0] += 1
        self.ring.append(float(self.raw[0]))
        self.made = {"late": torch.ones(2) * self.calls}
        self.linear.requires_grad_(True)
        drawn = torch.rand(3, generator=self.noise) * self.dice.random()
        return (
            (self.linear(x) + self.key(x) + self.hidden[0](x) + self.mean + drawn)
            * self.scale
            * len(self.past)
            / self.raw[0]
            / self.ring.position
            / sum(self.ring)
        )


def make() -> tuple[TrainerState, Odd, torch.optim.Optimizer]:
    torch.manual_seed(0)
    state, module = state_of(1, updates_of()), Odd()
    state.add_stage(WholeModule(module))
    optimizer = torch.optim.AdamW(module.linear.parameters())
    state.updates.add(optimizer)
    state.check_complete()
    state.remember()
    return state, module, optimizer


def forward(module: Odd, step: int) -> torch.Tensor:
    return module(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean()


def steps(state: TrainerState, module: Odd, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        state.begin_step()
        optimizer.zero_grad()
        forward(module, state.version).backward()
        optimizer.step()
        state.end_step()


def through_json(state: TrainerState) -> Any:
    tensors, skeleton = split(state.shared_dict())
    return join(json.loads(json.dumps(skeleton)), {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("done", [1, 4])
def test_a_dropped_step_takes_back_what_a_forward_did(done: int) -> None:
    (state, *others), (twin, *twins) = make(), make()
    steps(state, *others, count=done)
    steps(twin, *twins, count=done)
    state.begin_step()
    forward(others[0], 99).backward()
    assert state.can_drop
    state.present = True
    state.drop_step()
    assert state.present
    assert others[0].past == twins[0].past
    assert state.digests() == twin.digests()
    steps(state, *others, count=2)
    steps(twin, *twins, count=2)
    assert state.digests() == twin.digests()


def test_what_is_not_known_to_change_in_the_first_step_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen parameter is copied before each step once it is known to change. Until then its rank has no state."""
    state, module, _ = make()
    state.present = True
    state.begin_step()
    forward(module, 0)
    assert not state.can_drop
    # In the vote, with an update that can be taken back: the step can only be finished all the same.
    in_vote = Standing(version=None, undo_to=0, undo_exact=True, forward_to=1)
    monkeypatch.setattr(state.updates, "standing", lambda _version: in_vote)
    assert state.standing() == Standing(version=None, forward_to=1)
    state.drop_step()
    assert not state.present


@pytest.mark.parametrize("later", [0, 3])
def test_another_process_goes_on_with_the_same_bits(later: int) -> None:
    (state, *others), (other, *theirs) = make(), make()
    steps(state, *others, count=3)
    saved = through_json(state)
    steps(state, *others, count=2)
    steps(other, *theirs, count=later)  # a survivor, which is further
    table = theirs[0].table
    rank = theirs[0].rank
    other.load_state_dict(saved)
    assert theirs[0].table is table
    assert theirs[0].table["act"] is torch.relu
    assert (theirs[0].mode, theirs[0].rank) == (Mode.COLD, rank)
    steps(other, *theirs, count=2)
    assert other.digests() == state.digests()
    assert theirs[0].hidden[0].weight.equal(others[0].hidden[0].weight)


def test_a_survivor_goes_back_to_the_first_version() -> None:
    (state, *others), (twin, *twins) = make(), make()
    first = through_json(state)
    steps(state, *others, count=3)
    state.load_state_dict(first)
    assert state.digests() == twin.digests()
    assert not hasattr(others[0], "made")
    steps(state, *others, count=2)
    steps(twin, *twins, count=2)
    assert state.digests() == twin.digests()


class Normed(nn.Module):
    """A weight that is first a view of its parameter, then computed from it (as torch's old spectral_norm does), and
    a view that stays one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_orig = nn.Parameter(torch.arange(1.0, 5).view(2, 2))
        self.weight = self.weight_orig.data
        self.flat = self.weight_orig.detach().view(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.weight_orig / self.weight_orig.norm()
        return x @ self.weight + self.flat.sum()


def normed() -> tuple[TrainerState, Normed, torch.optim.Optimizer]:
    module = Normed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = state_of(1, updates_of())
    state.add_stage(WholeModule(module))
    state.updates.add(optimizer)
    state.check_complete()
    state.remember()
    return state, module, optimizer


def trained(state: TrainerState, module: Normed, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        state.begin_step()
        optimizer.zero_grad()
        module(torch.full((1, 2), float(state.version + step))).sum().backward()
        optimizer.step()
        state.end_step()


def test_a_view_of_a_parameter_is_not_overwritten() -> None:
    (state, *others), (other, *theirs) = normed(), normed()
    first = through_json(state)
    trained(state, *others, count=2)
    saved = through_json(state)
    other.load_state_dict(saved)
    for name in ("weight_orig", "weight", "flat"):
        assert torch.equal(getattr(theirs[0], name), getattr(others[0], name)), name
    assert theirs[0].flat.data_ptr() == theirs[0].weight_orig.data_ptr()
    trained(state, *others, count=1)
    trained(other, *theirs, count=1)
    assert state.digests() == other.digests()
    state.load_state_dict(first)
    assert others[0].weight.data_ptr() == others[0].weight_orig.data_ptr()
    assert state.digests() == normed()[0].digests()


def test_a_dropped_step_leaves_a_view_of_a_parameter_to_its_parameter() -> None:
    (state, *others), (_, *twins) = normed(), normed()
    state.begin_step()
    others[0](torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        others[0].weight_orig.add_(1)  # a part of an update, which is undone by other means
    state.present = True
    state.drop_step()
    assert torch.equal(others[0].weight_orig, twins[0].weight_orig + 1)


def test_shape_inference_leaves_nothing_behind() -> None:
    (state, *others), (twin, *twins) = make(), make()
    before = torch.default_generator.get_state(), random.getstate()
    inference = Inference(others[0])
    others[0].eval()
    torch.rand(3), random.random()
    forward(others[0], 5)
    assert inference.changed
    inference.end()
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1]
    assert others[0].training
    assert state.digests() == twin.digests()
    steps(state, *others, count=2)
    steps(twin, *twins, count=2)
    assert state.digests() == twin.digests()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("late", None)


def beside(module: nn.Module) -> Beside:
    found = Beside()
    found.remember({"0": module})
    return found


def test_what_a_process_makes_itself_is_not_in_the_state() -> None:
    module = Counting()
    module.rank = 3
    found = beside(module)
    assert found.state()["values"] == {}
    module.rank = 4
    assert found.state()["values"] == {"0.rank": 4}
    found.transient.add("rank")
    assert found.state()["values"] == {}


def test_what_nobody_can_tell_is_named() -> None:
    module = Counting()
    module.source = iter([1, 2])
    module.log = open  # a function
    found = beside(module)
    assert found.state()["unknown"] == []
    module.source = iter([1, 2])
    assert found.state()["unknown"] == ["0.source"]


def test_an_object_that_a_step_made_is_lost_where_it_is_not() -> None:
    """A policy that keeps its last distribution: to refuse its state would end the job."""
    module, other = Counting(), Counting()
    found, theirs = beside(module), beside(other)
    module.meter = Meter()
    module.kind = torch.distributions.Normal(0.0, 1.0)
    module.calls = 7
    theirs.load(copy.deepcopy(found.state()))
    assert theirs.lost == ["0.kind", "0.meter"]
    assert not hasattr(other, "meter")
    assert other.calls == 7
    other.meter, other.kind = Meter(), torch.distributions.Normal(0.0, 1.0)
    module.meter.total = 3.0
    theirs.load(copy.deepcopy(found.state()))
    assert theirs.lost == []
    assert other.meter.total == 3.0


def test_flags_that_a_step_changed_come_back() -> None:
    module, other = Counting(), Counting()
    found, theirs = beside(module), beside(other)
    module.weight.requires_grad_(False)
    module.eval()
    theirs.load(found.state())
    assert not other.weight.requires_grad
    assert not other.training
    theirs.load(beside(Counting()).state())
    assert other.weight.requires_grad
    assert other.training


def test_buffers_that_a_forward_makes_are_made_for_others() -> None:
    (state, _, _), (other, module, _) = (make() for _ in range(2))
    first = through_json(state)
    mine = state.stages[0].submod
    mine.linear.register_buffer("cache", torch.arange(3.0))
    mine.linear.register_buffer("spare", torch.arange(2.0), persistent=False)
    other.load_state_dict(through_json(state))
    assert torch.equal(module.linear.cache, torch.arange(3.0))
    assert torch.equal(module.linear.spare, torch.arange(2.0))
    assert "spare" not in module.state_dict()
    other.load_state_dict(first)
    assert not hasattr(module.linear, "cache")
    assert not hasattr(module.linear, "spare")


def test_a_lazy_module_is_refused_in_one_line() -> None:
    state = state_of(1, updates_of())
    with pytest.raises(UsageError, match="lazy module has no shape yet; call the module once"):
        state.add_stage(WholeModule(nn.LazyLinear(3)))


class Keeps(torch.optim.SGD):
    """An optimizer with a life of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rounds = 0
        self.slow = torch.zeros(2)

    def step(self, closure: Any = None) -> Any:
        self.rounds += 1
        self.slow += 1
        return super().step(closure)


def test_attributes_of_an_optimizer_are_state() -> None:
    def made() -> tuple[TrainerState, Any]:
        state, module = state_of(1, updates_of()), Counting()
        state.add_stage(WholeModule(module))
        optimizer = Keeps(module.parameters())
        state.updates.add(optimizer)
        state.remember()
        return state, optimizer

    (state, optimizer), (other, another) = made(), made()
    for _ in range(3):
        state.begin_step()
        state.stages[0].submod.weight.sum().backward()
        optimizer.step()
        state.end_step()
    other.load_state_dict(through_json(state))
    assert another.rounds == 3
    assert another.slow.tolist() == [3.0, 3.0]


def test_odd_values_neither_stop_a_step_nor_a_checkpoint() -> None:
    state, module, optimizer = make()
    module.by_class = {int: 1, module: torch.ones(2)}
    module.sparse = torch.eye(3).to_sparse()
    module.vocabulary = {f"word{i}": i for i in range(1000)}
    module.nested = [[[{"deep": (1, [2, {3}])}]]]
    module.itself = [module]
    module.loop = []
    module.loop.append({"again": module.meter})
    state.remember()
    steps(state, module, optimizer, 2)
    saved = through_json(state)
    module.nested[0][0][0]["deep"][1].append(5)
    module.vocabulary["new"] = 1
    state.load_state_dict(saved)
    assert module.nested == [[[{"deep": (1, [2, {3}])}]]]
    assert "new" not in module.vocabulary
    state.begin_step()
    module.nested[0][0][0]["deep"][1].append(5)
    module.vocabulary["new"] = 1
    del module.vocabulary["word0"]
    state.drop_step()
    assert module.nested == [[[{"deep": (1, [2, {3}])}]]]
    assert next(iter(module.vocabulary)) == "word0"
    assert "new" not in module.vocabulary


def test_a_step_that_makes_other_things_of_parameters_is_refused() -> None:
    state, module, optimizer = make()
    steps(state, module, optimizer, 1)
    state.begin_step()
    module.linear.double()
    with pytest.raises(
        UsageError, match=r"the type or the shape of parameters \(0\.linear\.weight, 0\.linear\.bias\)"
    ):
        state.end_step()


def test_attributes_of_an_optimizer_go_back_with_a_dropped_step() -> None:
    """An LR scheduler notes in the optimizer that it has stepped: ranks cut off at other places would differ by it."""
    state, _, optimizer = make()
    optimizer.rounds = [1]  # type: ignore[attr-defined]
    state.remember()
    before = state.digests()
    state.begin_step()
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.rounds.append(2)  # type: ignore[attr-defined]
    assert state.digests() != before
    state.drop_step()
    assert state.digests() == before

"""What a step makes of a module that no other process can make: hooks, submodules, functions. It is put back by the
rank that drops the step, and named where another process takes the state."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from swift.runtime.before import Before
from swift.runtime.beside import Beside
from swift.runtime.whole_module import WholeModule
from tests.unit.runtime.test_beside import make
from tests.unit.runtime.wired import state_of, updates_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.drop, self.act = nn.Linear(3, 3), nn.Dropout(0.1), nn.ReLU()
        self.loss_fn: Any = functional.l1_loss
        self.scaled: Any = scaled(1.0)
        self.partial: Any = functools.partial(functional.cross_entropy, label_smoothing=0.1)
        self.losses = {"l1": functional.l1_loss, "mse": functional.mse_loss}
        self.norm: Any = nn.LayerNorm
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.act(self.emb(x)))

    def watch(self, *_: Any) -> None:
        """A hook."""


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def process(change: Callable[[Net], object] | None = None) -> tuple[Net, Beside]:
    net, beside = Net(), Beside()
    if change is not None:
        change(net)
    beside.remember({"0": net}, [torch.optim.SGD(net.parameters(), lr=0.1)])
    return net, beside


def told(beside: Beside) -> Any:
    return copy.deepcopy(beside.state())


def hang(net: Net) -> Any:
    return net.act.register_forward_hook(lambda module, given, out: out * 2)


def watch(*_: Any) -> None:
    """A hook."""


def double(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


CHANGES: list[tuple[Callable[[Net], object], str]] = [
    (lambda net: net.act.register_forward_hook(double), "0.act.hooks"),
    (lambda net: net.act.register_forward_pre_hook(net.watch), "0.act.hooks"),
    (lambda net: net.emb.register_full_backward_hook(net.watch), "0.emb.hooks"),
    (lambda net: net.emb.weight.register_hook(lambda g: g * 0.5), "0.emb.hooks"),
    (lambda net: net.emb.weight.register_post_accumulate_grad_hook(lambda p: None), "0.emb.hooks"),
    (lambda net: setattr(net, "loss_fn", functional.mse_loss), ""),  # it is in another attribute, too
    (lambda net: setattr(net, "loss_fn", functional.smooth_l1_loss), "0.loss_fn"),
    (lambda net: setattr(net, "scaled", scaled(2.0)), "0.scaled"),
    (lambda net: setattr(net, "partial", functools.partial(functional.cross_entropy)), "0.partial"),
    (lambda net: setattr(net, "norm", nn.BatchNorm1d), "0.norm"),
    (lambda net: setattr(net, "act", nn.SiLU()), "0.act"),
    (lambda net: setattr(net, "drop", nn.Identity()), "0.drop"),
    (lambda net: setattr(net, "drop", None), "0.drop"),
    (lambda net: setattr(net, "act", nn.Sequential(nn.SiLU(), nn.Dropout(0.5))), "0.act"),
    (lambda net: setattr(net, "extra", nn.Sequential(nn.SiLU(), nn.Dropout(0.5))), "0.extra"),
    (lambda net: setattr(net.act, "__class__", nn.ReLU6), "0.act"),
]


@pytest.mark.parametrize(("change", "path"), CHANGES)
def test_it_is_named_where_another_process_takes_the_state(
    change: Callable[[Net], object], path: str
) -> None:
    (net, beside), (other, theirs) = process(), process()
    change(net)
    net.calls = 7
    state = told(beside)
    theirs.load(state)
    assert theirs.lost == ([path] if path else [])
    assert other.calls == 7
    other(torch.ones(1, 3))
    assert other.drop.p == 0.1
    assert other.loss_fn is (functional.l1_loss if path else functional.mse_loss)
    other, theirs = process()
    change(other)  # it has done the step as well
    theirs.load(state)
    assert theirs.lost == []


@pytest.mark.parametrize(("change", "_path"), CHANGES[:-1])
def test_a_rank_that_goes_back_has_it_again_as_it_was(change: Callable[[Net], object], _path: str) -> None:
    net, beside = process(hang)
    first = told(beside)
    assert first["values"] == first["made"] == {}
    was = dict(vars(net)), dict(net._modules), dict(net.act._forward_hooks)
    change(net)
    beside.load(first)
    assert beside.lost == []
    assert told(beside) == first
    assert (dict(vars(net)), dict(net._modules), dict(net.act._forward_hooks)) == was


@pytest.mark.parametrize(("change", "_path"), CHANGES[:-1])
def test_a_dropped_step_takes_it_back(change: Callable[[Net], object], _path: str) -> None:
    """The step is done again, and would hang a second hook."""
    net, beside = process(hang)
    before = Before([net])
    before.keep()
    assert not before.changed
    was = dict(net._modules)
    change(net)
    assert before.changed
    before.put_back()
    assert told(beside)["made"] == {}
    assert told(beside)["values"] == {}
    assert net._modules == was


def test_a_hook_that_was_removed_is_named_and_hung_again() -> None:
    handles: list[Any] = []

    def hung(net: Net) -> None:
        handles.append(
            net.act.register_forward_hook(lambda module, given, kwargs, out: out * 2, with_kwargs=True)
        )
        net.act.register_forward_hook(lambda module, given, out: out + 1)
        handles.append(net.emb.weight.register_hook(lambda g: g * 0.5))

    (_, theirs), (net, beside) = process(hung), process(hung)
    first = told(beside)
    before = Before([net])
    expected = net(torch.ones(1, 3)).shape, net.act(torch.ones(1))
    before.keep()
    for back in (before.put_back, lambda: beside.load(first)):
        for handle in handles[2:]:
            handle.remove()
        theirs.load(told(beside))
        assert theirs.lost == ["0.act.hooks", "0.emb.hooks"]
        assert not net.act(torch.ones(1)).equal(expected[1])
        back()
        assert net.act(torch.ones(1)).equal(expected[1])
        net.emb(torch.ones(1, 3)).sum().backward()
        assert net.emb.weight.grad is not None
        assert net.emb.weight.grad.unique().tolist() == [0.5]
        net.emb.weight.grad = None


def test_another_hook_of_the_same_line_is_another_one() -> None:
    (net, beside), (_, theirs) = process(hang), process(hang)
    net.act._forward_hooks.clear()
    hang(net)
    theirs.load(told(beside))
    assert theirs.lost == ["0.act.hooks"]


def test_a_hook_of_an_optimizer_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    beside, (_, theirs) = Beside(), process()
    beside.remember({"0": Net()}, [optimizer])
    optimizer.register_step_post_hook(lambda *_: None)
    theirs.load(told(beside))
    assert theirs.lost == ["optimizer0.hooks"]


def test_a_hook_of_an_optimizer_goes_with_the_step_that_hung_it() -> None:
    state, _, optimizer = make()
    optimizer.register_step_post_hook(watch)
    for changes in (
        lambda: optimizer.register_step_pre_hook(watch),
        optimizer._optimizer_step_post_hooks.clear,
    ):
        state.begin_step()
        changes()
        state.drop_step()
        assert list(optimizer._optimizer_step_post_hooks.values()) == [watch]
        assert not optimizer._optimizer_step_pre_hooks


def test_what_need_not_last_is_not_named_and_breaks_nothing() -> None:
    (net, beside), (other, theirs) = process(), process()
    theirs.transient.update(("drop", "hooks"))
    net.drop = nn.Identity()
    hang(net)
    theirs.load(told(beside))
    assert theirs.lost == []
    other(torch.ones(1, 3))


def test_a_state_that_was_written_before_any_of_this_was_told_is_loaded() -> None:
    (net, beside), (other, theirs) = process(hang), process()
    net.calls = 7
    net.table = {"act": torch.relu}
    state = told(beside)
    del state["made"]
    state["values"]["0.losses"] = {
        "l1": {"swift:object": "0.loss_fn", "type": "builtins.function"},
        "mse": {"swift:object": "0.losses.mse", "type": "builtins.function"},
    }
    theirs.load(state)
    assert theirs.lost == ["0.table"]
    assert other.calls == 7
    assert other.losses == {"l1": functional.l1_loss, "mse": functional.mse_loss}


def normed(net: Net) -> None:
    parametrizations.spectral_norm(net.emb)


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.emb, "weight", amount=0.5)


def weight_normed(net: Net) -> None:
    nn.utils.weight_norm(net.emb)


def compiled(net: Net) -> None:
    net.act.compile(backend="eager")


def lazy(net: Net) -> None:
    net.drop = nn.LazyInstanceNorm1d(affine=False, track_running_stats=False)  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated", "ignore:input's size at dim=1")
@pytest.mark.parametrize("change", [None, normed, pruned, weight_normed, compiled, lazy, hang])
def test_what_a_script_has_made_before_its_first_step_is_nothing_new(
    change: Callable[[Net], object] | None,
) -> None:
    (net, beside), (other, theirs) = process(change), process(change)
    for _ in range(2):
        net(torch.ones(1, 2, 3) if change is lazy else torch.ones(1, 3)).sum().backward()
    state = told(beside)
    assert state["made"] == {}
    theirs.load(state)
    assert theirs.lost == []
    other(torch.ones(1, 2, 3) if change is lazy else torch.ones(1, 3))


@pytest.mark.parametrize("kind", ["module", "parameter", "optimizer"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_hooks_that_each_step_hangs_anew_stay_as_many_as_they_were(kind: str, at: int) -> None:
    """The trainer takes off those whose handles it has: of the dropped step's, not of the one before."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = state_of(1, updates_of())
    state.add_stage(WholeModule(net))
    state.updates.add(optimizer)
    state.remember()
    handles: list[Any] = []

    def hang_anew() -> None:
        for handle in handles:
            handle.remove()
        if kind == "module":
            handles[:] = [net.act.register_forward_hook(lambda module, given, out: out * 2)]
        elif kind == "parameter":
            handles[:] = [net.emb.weight.register_hook(lambda gradient: gradient * 2)]
        else:
            handles[:] = [optimizer.register_step_post_hook(lambda *_: None)]

    def hung() -> int:
        kinds: Any = {
            "module": net.act._forward_hooks,
            "parameter": net.emb.weight._backward_hooks,
            "optimizer": optimizer._optimizer_step_post_hooks,
        }
        return len(kinds[kind])

    for number in range(5):
        if number == at:
            state.begin_step()
            hang_anew()
            state.present = True
            state.drop_step()
            assert hung() == (0 if at == 0 else 1), "the first one is the step's own"
        state.begin_step()
        hang_anew()
        state.end_step()
        assert hung() == 1

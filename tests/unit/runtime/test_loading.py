"""States come back as they were saved: what follows has the same bits, through a checkpoint and through a copy."""

import copy
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.errors import ServiceError
from swift_ft.state.module_state import load_module, load_optimizer
from swift_ft.state.tensors import same_bits
from swift_ft.state.transfer import Destination, Manifest, manifest_of
from swift_ft.state.tree import join, split
from tests.unit.checkpoint.holding import saved

EACH: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (torch.optim.Adafactor, {}),
    (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
]


class Convolutions(nn.Module):
    def __init__(self, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 1)
        self.to(dtype=dtype)
        self.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
    for step in which:
        generator = torch.Generator().manual_seed(step)
        first = next(model.parameters())
        x = torch.randn(2, 3, 6, 6, generator=generator).to(first.dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else (closure(), optimizer.step())


def alike(one: nn.Module, other: nn.Module) -> bool:
    return all(
        a.stride() == b.stride() and same_bits(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def through_a_checkpoint(state: Any, into: Any, tmp_path: Path) -> Any:
    return saved(tmp_path, 3, state).load(3)


def through_a_copy(state: Any, into: Any, tmp_path: Path) -> Any:
    """As a joiner receives it."""
    told, tensors = manifest_of(state, 3)
    manifest = Manifest.from_bytes(told.to_bytes())
    destination = Destination(manifest, split(into)[0], 0, 1)
    for part, entry, tensor in zip(destination.parts, manifest.entries, tensors, strict=True):
        if not entry.same_as:
            part.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return join(manifest.skeleton, destination.finish())


Made = tuple[nn.Module, torch.optim.Optimizer]


def made(kind: Any, options: dict[str, Any], dtype: torch.dtype, memory_format: Any) -> Made:
    torch.manual_seed(0)
    model = Convolutions(dtype, memory_format)
    return model, kind(model.parameters(), **options)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def restored(first: Made, second: Made, way: Any, tmp_path: Path) -> None:
    """The first's state, in the second."""
    state = way(state_of(*first), state_of(*second), tmp_path)
    load_module(second[0], state["model"])
    load_optimizer(second[1], state["optimizer"])


def kinds() -> Iterator[Any]:
    for (kind, options), dtype, how in itertools.product(
        EACH, (torch.float32, torch.bfloat16, torch.float64), ({}, {"foreach": True}, {"fused": True})
    ):
        if kind is torch.optim.LBFGS and how:  # of its own kind
            continue
        if "fused" in how and kind not in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
        ):
            continue
        # Every run: those whose state torch's own loading spoils, and one that it does not.
        often = kind in (torch.optim.NAdam, torch.optim.AdamW, torch.optim.SGD) and (
            dtype is not torch.float64 or not how
        )
        name = f"{kind.__name__}-{dtype}-{next(iter(how), 'loop')}".replace("torch.", "")
        yield pytest.param(
            kind, {**options, **how}, dtype, id=name, marks=() if often else pytest.mark.matrix
        )


@pytest.mark.parametrize("way", [through_a_checkpoint, through_a_copy])
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["plain", "last"]
)
@pytest.mark.parametrize(("kind", "options", "dtype"), list(kinds()))
def test_the_steps_after_a_restore_have_the_same_bits(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, memory_format: Any, way: Any, tmp_path: Path
) -> None:
    if kind is torch.optim.LBFGS and memory_format is torch.channels_last:
        pytest.skip("torch's own step refuses gradients that are not contiguous")
    (model, optimizer), (other, another) = (made(kind, options, dtype, memory_format) for _ in range(2))
    steps(model, optimizer, range(3))
    if way is through_a_copy and options.get("foreach"):
        steps(other, another, range(5, 6))  # a survivor: with a state of its own
    restored((model, optimizer), (other, another), way, tmp_path)
    assert alike(model, other)
    for tensors in zip(*(split(o.state_dict())[0].values() for o in (optimizer, another)), strict=True):
        assert tensors[0].stride() == tensors[1].stride()
        assert tensors[0].dtype == tensors[1].dtype
    for begin in range(3, 6):
        steps(model, optimizer, range(begin, begin + 1))
        steps(other, another, range(begin, begin + 1))
        assert alike(model, other), begin


@pytest.mark.parametrize("way", [through_a_checkpoint, through_a_copy])
def test_files_that_a_trainer_saves_afterwards_are_the_same_to_the_byte(way: Any, tmp_path: Path) -> None:
    """pickle writes a name once as long as it is one object: the sums of files differed, and no tensor did."""

    def saved(made: Made) -> bytes:
        file = io.BytesIO()
        torch.save(state_of(*made), file)
        return file.getvalue()

    first, second = (made(torch.optim.AdamW, {}, torch.float32, torch.contiguous_format) for _ in range(2))
    steps(*first, range(3))
    restored(first, second, way, tmp_path)
    for which in first, second:
        steps(*which, range(3, 5))
    assert saved(first) == saved(second)


class Odd(torch.optim.Optimizer):
    """State as people keep it: fp32 moments of bf16 parameters, numbers, lists, words, and of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["norms"] = [*self.state.get("norms", []), float(len(self.state))]  # type: ignore[index, call-overload]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"m": torch.zeros_like(p, dtype=torch.float32), "n": 0, "decay": 1.0}
                    state |= {"past": [], "kind": "warm", "count": torch.zeros(2, dtype=torch.int32)}
                state["m"].lerp_(p.grad.float(), 0.123)
                state["n"] += 1
                state["decay"] *= 0.9
                state["count"] += 1
                state["past"] = [
                    *state["past"],
                    p.grad.double().t() if p.grad.dim() == 2 else p.grad.clone(),
                ][-2:]
                scale = state["decay"] / state["n"] * (1.0 if state["kind"] == "warm" else 0.0)
                p.sub_((group["lr"] * scale * (state["m"] + state["past"][0].sum())).to(p.dtype))


@pytest.mark.parametrize("way", [through_a_checkpoint, through_a_copy])
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["plain", "last"]
)
def test_an_optimizer_of_ones_own_gets_its_own_state(memory_format: Any, way: Any, tmp_path: Path) -> None:
    (model, optimizer), (other, another) = (made(Odd, {}, torch.bfloat16, memory_format) for _ in range(2))
    steps(model, optimizer, range(3))
    restored((model, optimizer), (other, another), way, tmp_path)
    moments = another.state[next(other.parameters())]
    assert moments["m"].dtype == torch.float32
    assert moments["kind"] == "warm"
    steps(model, optimizer, range(3, 6))
    steps(other, another, range(3, 6))
    assert alike(model, other)
    assert another.state["norms"] == optimizer.state["norms"]  # type: ignore[index]


def test_hooks_are_called_and_what_they_spoil_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps_of: list[str] = []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _o, _s: steps_of.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda _o: steps_of.append("after"))
    load_optimizer(optimizer, saved)
    assert steps_of == ["before", "after"]
    optimizer.register_load_state_dict_post_hook(lambda o: o.state.clear())
    state_of_no_one = type(
        "Own", (torch.optim.AdamW,), {"state_dict": lambda self: super(type(self), self).state_dict()}
    )
    other = state_of_no_one(model.parameters())
    other.register_load_state_dict_post_hook(lambda o: o.state.clear())
    with pytest.raises(ServiceError, match="does not take its state back"):
        load_optimizer(other, saved)


def test_parameters_whose_layout_has_changed_get_it_back() -> None:
    model = nn.Conv2d(3, 4, 3)
    saved = copy.deepcopy(model.state_dict())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameter = model.weight
    load_module(model, saved)
    assert model.weight is parameter
    assert model.weight.stride() == saved["weight"].stride()
    assert same_bits(model.weight, saved["weight"])


def test_buffers_that_have_grown_or_are_of_another_type_come_back_as_they_were() -> None:
    """A queue that a step makes longer; a count that became a mean, and with it a float."""

    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("queue", torch.zeros(0, 2))
        module.register_buffer("seen", torch.tensor(0))
        return module

    module, other = make(), make()
    module.queue, module.seen = torch.rand(3, 2), module.seen * 0.9 + 0.25
    load_module(other, copy.deepcopy(module.state_dict()))
    assert alike(module, other)
    assert other.seen.dtype == torch.float32
    load_module(module, make().state_dict())  # a survivor goes back
    assert module.queue.shape == (0, 2)
    assert module.seen.dtype == torch.int64


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(
        ServiceError, match=r"weight is torch\.float64 in the state, and torch\.float32 in this process"
    ):
        load_module(nn.Linear(2, 2), nn.Linear(2, 2).double().state_dict())


class Wrapper(torch.optim.Optimizer):
    """As SAM and Lookahead are written: one list of groups for both, so that a scheduler of the outer one works."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Careful(Wrapper):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups, self.base.state = self.param_groups, self.state


@pytest.mark.parametrize("kind", [Wrapper, Careful])
def test_what_a_wrapper_shares_with_the_optimizer_inside_of_it_stays_shared(kind: type[Wrapper]) -> None:
    model = nn.Linear(2, 2)
    wrapper = kind(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    saved = copy.deepcopy(wrapper.state_dict())
    model(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    load_optimizer(wrapper, saved)
    load_optimizer(wrapper.base, copy.deepcopy(saved))
    wrapper.param_groups[0]["lr"] = 0.5
    assert wrapper.base.param_groups[0]["lr"] == 0.5
    assert wrapper.base.state is wrapper.state
    assert not wrapper.state

"""Undo over hyperparameters, dtypes, ages and nasty gradients that nobody thought of."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift_ft.errors import ServiceError
from swift_ft.optimizers import Lamb, Lion
from swift_ft.state.journal import Journal
from tests.unit.optim import models

RATES = st.sampled_from([1e-4, 1e-2, 0.3])
DECAYS = st.sampled_from([0.0, 1e-2, 0.5])
BETAS = st.tuples(st.sampled_from([0.1, 0.5, 0.9, 0.95]), st.sampled_from([0.5, 0.9, 0.99, 0.999, 0.9999]))
EPS = st.sampled_from([1e-8, 1e-15, 1e-3])
BOOLS = st.booleans()


def flavours(cls: type[torch.optim.Optimizer]) -> st.SearchStrategy[dict[str, Any]]:
    """The implementation: for-loop, foreach, and fused where there is one."""
    made: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
    if cls in models.FUSED:
        made.append({"fused": True})
    return st.sampled_from(made if cls not in models.OURS else [{}])


_COMMON = {"lr": RATES, "weight_decay": DECAYS, "maximize": BOOLS}
_MOMENTS = {**_COMMON, "betas": BETAS, "eps": EPS}
HYPERS: dict[type[torch.optim.Optimizer], dict[str, st.SearchStrategy[Any]]] = {
    torch.optim.SGD: {**_COMMON, "momentum": st.sampled_from([0.0, 0.5, 0.9, 0.99])},
    torch.optim.Adam: {**_MOMENTS, "decoupled_weight_decay": BOOLS},
    torch.optim.AdamW: _MOMENTS,
    Lamb: _MOMENTS,
    Lion: {**_COMMON, "betas": BETAS},
}


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    cls = draw(st.sampled_from(list(HYPERS)))
    hyper = {**draw(st.fixed_dictionaries(HYPERS[cls])), **draw(flavours(cls))}
    if cls is torch.optim.SGD and hyper["momentum"]:
        hyper["nesterov"] = draw(BOOLS)
        hyper["dampening"] = 0.0 if hyper["nesterov"] else draw(st.sampled_from([0.0, 0.3]))
    return cls, hyper


NASTY = [0.0, -0.0, 1e-42, -1e-39, 1e-20, 1e6, -1e12, 1e19, 1e30, 3e38]
NOT_FINITE = [math.inf, -math.inf, math.nan]
COUNTS = (1, 3, 77, 40)


def gradients(seed: int, nasty: list[float], dtype: torch.dtype) -> list[torch.Tensor]:
    """Ordinary ones, with some of `nasty` strewn in."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in COUNTS:
        flat = torch.randn(count, generator=generator)
        for value in nasty:
            flat[int(torch.randint(count, (), generator=generator))] = value
        made.append(flat.to(dtype))
    return made


def start(dtype: torch.dtype, seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(count, generator=generator) * 0.1 for count in COUNTS]
    values[1].zero_()
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def take(parameters: list[torch.nn.Parameter], made: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, made, strict=True):
        parameter.grad = gradient.clone()


def step_on(
    journal: Journal, parameters: list[torch.nn.Parameter], step: int, made: list[torch.Tensor]
) -> None:
    take(parameters, made)
    journal.begin(step)
    journal.apply_rest()


@settings(deadline=None, max_examples=150)
@given(
    what=optimizers(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1 << 20),
    age=st.one_of(st.integers(0, 4), st.integers(5, 50)),
    nasty=st.lists(st.sampled_from(NASTY + NOT_FINITE), max_size=4),
    before=st.lists(st.sampled_from(NASTY), max_size=2),
)
@example((torch.optim.SGD, {"momentum": 0.9}), torch.float32, 0, 3, [math.nan], [])
@example((torch.optim.AdamW, {"fused": True}), torch.float32, 0, 3, [math.inf, 1e30], [1e12])
def test_exact_undo_is_exact(
    what: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    dtype: torch.dtype,
    seed: int,
    age: int,
    nasty: list[float],
    before: list[float],
) -> None:
    cls, hyper = what
    parameters = start(dtype, seed)
    optimizer: Any = cls(parameters, **hyper)
    journal = Journal(optimizer, undo="exact", bucket_bytes=200)
    for step in range(age):
        step_on(journal, parameters, step, gradients(seed + step, before if step == age - 1 else [], dtype))
    old = models.image(optimizer)
    step_on(journal, parameters, age, gradients(seed + age, nasty, dtype))
    assert journal.undo().exact
    assert models.image(optimizer) == old


@settings(deadline=None, max_examples=150)
@given(
    what=optimizers(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1 << 20),
    age=st.integers(0, 12),
    nasty=st.lists(st.sampled_from(NASTY), max_size=4),
)
@example((torch.optim.AdamW, {"lr": 1e-2}), torch.float32, 0, 0, [1e12])
@example((torch.optim.AdamW, {"lr": 1e-2}), torch.float32, 0, 1, [1e12])
@example((torch.optim.AdamW, {"lr": 1e-2}), torch.float32, 0, 3, [1e30])
@example((Lion, {}), torch.float32, 0, 3, [3e38])
@example((Lamb, {"lr": 0.3, "betas": (0.9, 0.5), "eps": 1e-3}), torch.float32, 350, 0, [1e-42])
def test_arithmetic_undo_gives_values_to_go_on_with(
    what: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    dtype: torch.dtype,
    seed: int,
    age: int,
    nasty: list[float],
) -> None:
    cls, hyper = what
    parameters = start(dtype, seed)
    optimizer: Any = cls(parameters, **hyper)
    journal = Journal(optimizer, undo="arithmetic", bucket_bytes=200)
    for step in range(age):
        step_on(journal, parameters, step, gradients(seed + step, [], dtype))
    step_on(journal, parameters, age, gradients(seed + age, nasty, dtype))
    ruined = any(not bool(p.isfinite().all()) for p in parameters)
    if ruined:
        with pytest.raises(ServiceError, match="NaN or infinite"):
            journal.undo()
        return
    journal.undo()
    for parameter in parameters:
        assert bool(parameter.isfinite().all())
        for name, value in optimizer.state.get(parameter, {}).items():
            assert bool(value.isfinite().all()), name
            if name == "exp_avg_sq":
                assert bool((value >= 0).all()), name
    step_on(journal, parameters, age + 1, gradients(seed + age, [], dtype))
    for parameter in parameters:
        assert bool(parameter.isfinite().all())


@pytest.mark.parametrize("spike", [1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_a_spike_that_is_taken_back_arithmetically_makes_no_great_step(name: str, spike: float) -> None:
    """The old moments are lost in the spike's rounding; what stands for them must not throw parameters about."""
    parameters = start(torch.float32, 3)
    optimizer = models.make(name, "foreach", parameters)
    journal = Journal(optimizer, undo="arithmetic")
    for step in range(20):
        step_on(journal, parameters, step, gradients(step, [], torch.float32))
    step_on(journal, parameters, 20, [g * spike for g in gradients(20, [], torch.float32)])
    journal.undo()
    rate = optimizer.param_groups[0]["lr"]
    for step in range(20, 25):
        old = [p.detach().clone() for p in parameters]
        step_on(journal, parameters, step, gradients(step, [], torch.float32))
        for parameter, value in zip(parameters, old, strict=True):
            assert float((parameter.detach() - value).abs().max()) < 30 * rate


@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        (torch.optim.Adam, {"betas": (0.0, 0.999)}),
        (torch.optim.AdamW, {"betas": (0.9, 0.0)}),
        (torch.optim.AdamW, {"lr": 10.0, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 1.0, "weight_decay": 1.0}),
        (torch.optim.SGD, {"lr": 1.0, "momentum": 1e-3}),
        (Lion, {"betas": (0.9, 0.0)}),
    ],
)
@pytest.mark.parametrize("undo", ["exact", "arithmetic"])
def test_hyperparameters_without_an_inverse_are_said_and_copied(
    cls: Any, hyper: dict[str, Any], undo: str
) -> None:
    parameters = start(torch.float32, 0)
    optimizer = cls(parameters, **hyper)
    journal = Journal(optimizer, undo=undo)
    assert journal.mode == "preimage"
    assert "no inverse" in journal.why
    for step in range(3):
        old = models.image(optimizer)
        step_on(journal, parameters, step, gradients(step, [], torch.float32))
        assert journal.undo().exact
        assert models.image(optimizer) == old
        take(parameters, gradients(step, [], torch.float32))
        journal.apply_rest()


def test_an_infinite_gradient_leaves_no_nan_in_lions_momentum() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([parameter])
    journal = Journal(optimizer, undo="arithmetic")
    for step, gradient in enumerate(([1.0, 2.0, -3.0], [math.inf, 1.0, 1.0])):
        parameter.grad = torch.tensor(gradient)
        journal.begin(step)
        journal.apply_rest()
    assert bool(parameter.isfinite().all())
    journal.undo()
    assert bool(optimizer.state[parameter]["exp_avg"].isfinite().all())


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_no_eps_at_all(eps: float) -> None:
    parameters = start(torch.float32, 0)
    optimizer = torch.optim.AdamW(parameters, eps=eps, foreach=True)
    for undo in ("exact", "arithmetic"):
        journal = Journal(optimizer, undo=undo)
        for step in range(4):
            old = models.image(optimizer)
            step_on(journal, parameters, step, gradients(step, [], torch.float32))
            assert all(bool(p.isfinite().all()) for p in parameters)
            journal.undo()
            assert all(bool(p.isfinite().all()) for p in parameters)
            assert undo == "arithmetic" or models.image(optimizer) == old
            take(parameters, gradients(step, [], torch.float32))
            journal.apply_rest()


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("sgd", 0),
        ("sgd-momentum", 1),
        ("adamw", 2),
        ("lion", 1),
        ("lamb", 2),
    ],
)
def test_exact_undo_keeps_a_byte_for_each_value(name: str, states: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(n, generator=generator) * 0.02) for n in (40_000, 12_000, 999)
    ]
    parameters.append(torch.nn.Parameter(torch.zeros(14_000)))
    optimizer = models.make(name, "default", parameters)
    journal = Journal(optimizer, undo="exact")
    for step in range(8):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        journal.begin(step)
        journal.apply_rest()
        count = sum(p.numel() for p in parameters)
        assert 0.9 < journal.extra_bytes / count <= states + 2, (step, journal.extra_bytes / count)
    assert len([v for v in optimizer.state[parameters[0]].values() if v.numel() > 1]) == states

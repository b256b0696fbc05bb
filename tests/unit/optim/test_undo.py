"""Undo: every optimizer, implementation and dtype; exact means all bits, arithmetic means a measured error."""

from typing import Any

import pytest
import torch

from swift_ft.errors import ServiceError
from swift_ft.state import kernels
from swift_ft.state.journal import Journal, UndoResult
from tests.unit.optim import models
from tests.unit.optim.conftest import COMPILED

SMALL = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
INVERTIBLE = [(name, implementation) for name, implementation in models.cases() if name not in models.COPIED]


def step_and_back(
    journal: Journal, parameters: list[torch.nn.Parameter], step: int, scale: float = 1.0, every: int = 2
) -> UndoResult:
    """Applies some buckets and takes them back, with the gradients gone in between."""
    models.give_gradients(parameters, step, scale)
    journal.begin(step)
    for bucket in range(0, len(journal.buckets), every):
        journal.apply(bucket)
    for parameter in parameters:
        parameter.grad = None
    return journal.undo()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), list(models.cases()))
def test_exact_undo_brings_every_bit_back(
    name: str, implementation: str, dtype: torch.dtype, way: str
) -> None:
    parameters = models.parameters(dtype)
    groups = models.grouped(parameters) if "weight_decay" in models.HYPER[name][1] else parameters
    optimizer = models.make(name, implementation, groups)
    journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL)
    assert (journal.mode == "exact") == (
        way == COMPILED
        and dtype in kernels.TYPES
        and (name, implementation) in INVERTIBLE
        and models.repeats(name, implementation, dtype)
    )
    assert bool(journal.why) == (journal.mode != "exact")
    for step in range(5):
        before = models.image(optimizer)
        scale = 1e4 if step == 3 else 1.0
        result = step_and_back(journal, parameters, step, scale, every=1 + step % 2)
        assert models.image(optimizer) == before
        assert result.exact
        models.step_on(journal, parameters, step, scale)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)  # float16 has NaNs from the plain step: eps is 0 in it
@pytest.mark.parametrize(("name", "implementation"), INVERTIBLE)
def test_arithmetic_undo_comes_close(name: str, implementation: str, dtype: torch.dtype) -> None:
    if not models.repeats(name, implementation, dtype):
        pytest.skip("torch's own step is wrong here: copied instead")
    parameters = models.parameters(dtype)
    optimizer = models.make(name, implementation, parameters)
    journal = Journal(optimizer, undo="arithmetic", bucket_bytes=SMALL)
    for step in range(5):
        before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        values = [parameter.detach().clone() for parameter in parameters]
        result = step_and_back(journal, parameters, step)
        assert (result.mode, result.exact) == ("arithmetic", False)
        # A few units of the last place.
        few = 8 * torch.finfo(dtype).eps
        for parameter, value in zip(parameters, values, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=few, atol=few)
        assert set(optimizer.state) == set(before)
        for p, state in optimizer.state.items():
            assert state.keys() == before[p].keys()
            for key, value in state.items():
                allowed = 64 * torch.finfo(dtype).eps
                torch.testing.assert_close(value, before[p][key], rtol=allowed, atol=allowed)
        models.step_on(journal, parameters, step)


@pytest.mark.parametrize("undo", ["exact", "arithmetic"])
def test_hyperparameters_are_those_of_the_step(undo: str) -> None:
    parameters = models.parameters(torch.float64)
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = torch.optim.AdamW(parameters, lr=rate, foreach=False)
    journal = Journal(optimizer, undo=undo, bucket_bytes=SMALL)
    models.step_on(journal, parameters, 0)
    before = [p.detach().clone() for p in parameters]
    models.step_on(journal, parameters, 1)
    rate.fill_(5.0)
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    optimizer.param_groups[0]["weight_decay"] = 0.9
    journal.undo()
    for parameter, value in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("undo", ["exact", "arithmetic"])
def test_gradients_that_were_overwritten_are_noticed(undo: str) -> None:
    parameters = models.parameters(torch.float32)
    optimizer = torch.optim.AdamW(parameters)
    journal = Journal(optimizer, undo=undo, bucket_bytes=SMALL)
    models.step_on(journal, parameters, 0)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(ServiceError, match="changed in place"):
        journal.undo()


@pytest.mark.parametrize("undo", ["exact", "arithmetic", "preimage"])
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_a_step_that_a_scaler_skips_is_taken_back_as_nothing(name: str, undo: str) -> None:
    parameters = models.parameters(torch.float32)
    optimizer = models.make(name, "fused", parameters)
    journal = Journal(optimizer, undo=undo, bucket_bytes=SMALL)
    for step, infinite in enumerate((0.0, 1.0, 0.0, 1.0)):
        optimizer.grad_scale = torch.tensor(64.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(infinite)  # type: ignore[attr-defined]
        before = models.image(optimizer)
        result = step_and_back(journal, parameters, step, 64.0)
        if infinite or undo != "arithmetic":
            assert models.image(optimizer) == before
        assert result.exact == (undo != "arithmetic" or name.startswith("sgd"))
        models.step_on(journal, parameters, step, 64.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_ruined_parameters_is_not_called_undone(value: float) -> None:
    parameters = models.parameters(torch.float32)
    optimizer = torch.optim.AdamW(parameters)
    for undo in ("arithmetic", "exact"):
        journal = Journal(optimizer, undo=undo, bucket_bytes=SMALL)
        before = models.image(optimizer)
        models.give_gradients(parameters, 0)
        gradient = parameters[4].grad
        assert gradient is not None
        gradient[5, 5] = value
        journal.begin(0)
        journal.apply_rest()
        if undo == "exact":
            assert journal.undo().exact
            assert models.image(optimizer) == before
            continue
        with pytest.raises(ServiceError, match="made parameters NaN"):
            journal.undo()
        with pytest.raises(ServiceError, match="half-way"):
            journal.undo()
        parameters = models.parameters(torch.float32)
        optimizer = torch.optim.AdamW(parameters)


def test_float16_beside_float32_is_copied_alone_and_said(way: str) -> None:
    parameters = models.parameters(torch.float32)[:4] + models.parameters(torch.float16)[4:]
    journal = Journal(torch.optim.SGD(parameters, lr=0.1), undo="exact", bucket_bytes=SMALL)
    if way == COMPILED:
        assert (journal.mode, "none for torch.float16" in journal.why) == ("exact", True)


def test_only_some_groups_without_an_inverse() -> None:
    parameters = models.parameters(torch.float32)
    groups: list[dict[str, Any]] = [{"params": parameters[:4], "amsgrad": True}, {"params": parameters[4:]}]
    optimizer = torch.optim.AdamW(groups)
    journal = Journal(optimizer, undo="arithmetic", bucket_bytes=SMALL)
    assert journal.mode == "arithmetic"
    assert "some groups" in journal.why
    models.step_on(journal, parameters, 0)
    before = models.image(optimizer)
    result = step_and_back(journal, parameters, 1, every=1)
    assert not result.exact
    assert models.image(optimizer)[:4] == before[:4]
    assert models.image(optimizer)[4:] != before[4:]


def test_tensors_that_do_not_lie_flat() -> None:
    for undo in ("exact", "arithmetic"):
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(2, 3, 200, 150, generator=generator).to(memory_format=torch.channels_last)
        parameters = [
            torch.nn.Parameter(weight),
            torch.nn.Parameter(torch.randn(90, 1001, generator=generator).t()),
        ]
        optimizer = torch.optim.AdamW(parameters)
        journal = Journal(optimizer, undo=undo)
        for step in range(3):
            before = models.image(optimizer)
            result = step_and_back(journal, parameters, step)
            assert result.exact  # copied
            assert models.image(optimizer) == before
            models.step_on(journal, parameters, step)


def test_exact_undo_does_not_depend_on_the_threads_of_the_moment() -> None:
    """bfloat16 has other bits at the ends of what a thread gets (vectors and scalars round differently)."""
    value = torch.randn(300_001, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    parameters = [torch.nn.Parameter(value)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    journal = Journal(optimizer, undo="exact")
    threads = torch.get_num_threads()
    try:
        for step in range(3):
            torch.set_num_threads(2)
            models.give_gradients(parameters, step)
            before = models.image(optimizer)
            journal.begin(step)
            journal.apply_rest()
            torch.set_num_threads(3)
            journal.undo()
            assert torch.get_num_threads() == 3
            assert models.image(optimizer) == before
            journal.apply_rest()
    finally:
        torch.set_num_threads(threads)

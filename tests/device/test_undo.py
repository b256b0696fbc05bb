"""Undo on the device: every optimizer, implementation and element type comes back bit for bit. The host waits for
nothing that the plain step does not wait for."""

from contextlib import nullcontext

import pytest
import torch

from swift_ft.state.journal import Journal
from tests.device.machine import held, here, no_waits
from tests.unit.optim import models

SMALL_BYTES = 64
WAITS_ITSELF = ("asgd", "rprop")
"""torch's own steps wait."""


def cases() -> list[tuple[str, str]]:
    """As on a CPU; torch has no fused Adagrad on CUDA."""
    return [case for case in models.cases() if here().type != "cuda" or case != ("adagrad", "fused")]


def made(
    name: str, implementation: str, dtype: torch.dtype
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = models.parameters(dtype, device=here())
    return parameters, models.make(name, implementation, parameters)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("float64", "float16")),
    ],
)
def test_all_bits_come_back(dtype: str) -> None:
    for name, implementation in cases():
        parameters, optimizer = made(name, implementation, getattr(torch, dtype))
        beside, plain = made(name, implementation, getattr(torch, dtype))
        journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL_BYTES)
        for step in range(5):
            before = models.image(optimizer)
            scale = 1e4 if step == 3 else 1.0
            for each in (parameters, beside):
                models.give_gradients(each, step, scale)
            gradients = [parameter.grad for parameter in parameters]
            with nullcontext() if name in WAITS_ITSELF else no_waits():
                journal.begin(step)
                for bucket in range(0, len(journal.buckets), 1 + step % 2):
                    journal.apply(bucket)
                for parameter in parameters:
                    parameter.grad = None
                assert journal.undo().exact
            assert models.image(optimizer) == before, (name, implementation, step)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with nullcontext() if name in WAITS_ITSELF else no_waits():
                journal.begin(step)
                journal.apply_rest()
                plain.step()
            assert models.image(optimizer) == models.image(plain), (name, implementation, step)


def test_a_step_and_its_undo_are_queued() -> None:
    """Both are over for the host before the device has begun with them; what comes next in the stream sees the undo."""
    parameters, optimizer = made("adamw", "foreach", torch.float32)
    journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL_BYTES)
    models.give_gradients(parameters, 0)
    optimizer.step()
    before = models.image(optimizer)
    models.give_gradients(parameters, 1)
    torch.accelerator.synchronize()
    with held(), no_waits():
        journal.begin(1)
        journal.apply_rest()
        journal.undo()
        seen = [parameter.detach().clone() for parameter in parameters]
    assert models.image(optimizer) == before
    assert [models.bits(tensor) for tensor in seen] == [parameter for parameter, _ in before]


@pytest.mark.parametrize(
    ("name", "dtype", "bytes_each"),
    [
        ("adamw", "float32", 12),
        ("adamw", "bfloat16", 6),
        ("sgd-momentum", "float32", 8),
        ("sgd", "float32", 4),
    ],
)
def test_what_the_copies_take_until_the_next_step(name: str, dtype: str, bytes_each: int) -> None:
    elements = 1 << 16
    parameters = [
        torch.nn.Parameter(torch.randn(elements).to(here(), getattr(torch, dtype))) for _ in range(8)
    ]
    optimizer = models.make(name, "default", parameters)
    journal = Journal(optimizer, undo="exact", bucket_bytes=elements)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for step in range(2):
        before = torch.accelerator.memory_allocated()
        journal.begin(step)
        journal.apply_rest()
        assert journal.extra_bytes // (8 * elements) == bytes_each
        assert torch.accelerator.memory_allocated() - before == 8 * elements * bytes_each
        journal.begin(step)
        assert torch.accelerator.memory_allocated() == before

"""Undo on a CUDA device: all bits come back, for every optimizer, implementation and dtype."""

import pytest
import torch

from swift_ft.state.journal import Journal
from tests.unit.optim import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SMALL_BYTES = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), list(models.cases()))
def test_all_bits_come_back(name: str, implementation: str, dtype: torch.dtype) -> None:
    if name == "adagrad" and implementation == "fused":
        pytest.skip("torch has no fused Adagrad on CUDA")
    parameters, beside = (models.parameters(dtype, device="cuda") for _ in range(2))
    optimizer = models.make(name, implementation, parameters)
    plain = models.make(name, implementation, beside)
    journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL_BYTES)
    for step in range(5):
        before = models.image(optimizer)
        scale = 1e4 if step == 3 else 1.0
        models.give_gradients(parameters, step, scale)
        journal.begin(step)
        for bucket in range(0, len(journal.buckets), 1 + step % 2):
            journal.apply(bucket)
        for parameter in parameters:
            parameter.grad = None
        assert journal.undo().exact
        assert models.image(optimizer) == before
        models.give_gradients(parameters, step, scale)
        journal.begin(step)
        journal.apply_rest()
        models.give_gradients(beside, step, scale)
        plain.step()
        assert models.image(optimizer) == models.image(plain)

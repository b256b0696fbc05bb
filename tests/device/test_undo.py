"""Undo on the device: every optimizer, implementation and element type comes back bit for bit. The host waits for
nothing that the plain step does not wait for."""

from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from swift_ft.device import Event, until_over
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.exact_undo import CodedCopies
from swift_ft.state.journal import Journal
from swift_ft.train.config import SessionConfig
from swift_ft.train.reducer import Reduction
from tests.device.machine import accelerator, held, here, no_waits
from tests.unit.optim import models
from tests.unit.runtime.test_updates import HalvingReducer
from tests.unit.runtime.wired import updates_of

SMALL_BYTES = 64
WAITS_ITSELF = ("asgd", "rprop")
"""torch's own steps wait."""
FITTING = [
    ("adamw", "float32", 12, 3),
    ("sgd-momentum", "float32", 8, 2),
    ("adamw", "bfloat16", 6, 3),
    ("sgd-momentum", "bfloat16", 4, 2),
]
"""(name, element type, bytes a parameter as copies, as codes)"""


def cases() -> list[tuple[str, str]]:
    """As on a CPU; torch has no fused Adagrad on CUDA."""
    return [case for case in models.cases() if here().type != "cuda" or case != ("adagrad", "fused")]


def coded(name: str, implementation: str, dtype: str) -> bool:
    """Returns whether such steps are computed backwards on a device."""
    inverse = name not in models.COPIED and name != "lamb"
    return inverse and implementation != "fused" and dtype != "float16"


def made(
    name: str, implementation: str, dtype: str
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = models.parameters(getattr(torch, dtype), device=here().type)
    return parameters, models.make(name, implementation, parameters)


def step_and_back(
    journal: Journal, parameters: list[torch.nn.Parameter], step: int, every: int, counted: bool
) -> None:
    """Applies some buckets and takes them back. With `counted`, codes have taken the place of copies by then."""
    journal.begin(step)
    for bucket in range(0, len(journal.buckets), every):
        journal.apply(bucket)
    if counted:
        while journal._uncounted:
            journal.replace_copies()
    for parameter in parameters:
        parameter.grad = None
    assert journal.undo().exact


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("float64", "float16")),
    ],
)
def test_all_bits_come_back(dtype: str, counted: bool) -> None:
    for name, implementation in cases():
        if counted and not coded(name, implementation, dtype):
            continue
        if here().type != "cuda" and not models.repeats(name, implementation, getattr(torch, dtype)):
            continue  # the simulated device has the kernels of torch's CPUs, and this one is wrong
        parameters, optimizer = made(name, implementation, dtype)
        beside, plain = made(name, implementation, dtype)
        journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL_BYTES)
        assert (journal.mode == "exact") == coded(name, implementation, dtype), journal.why
        quiet = nullcontext if name in WAITS_ITSELF else no_waits
        for step in range(5):
            before = models.image(optimizer)
            scale = 1e4 if step == 3 else 1.0
            for each in (parameters, beside):
                models.give_gradients(each, step, scale)
            gradients = [parameter.grad for parameter in parameters]
            with quiet():
                step_and_back(journal, parameters, step, 1 + step % 2, counted)
            assert models.image(optimizer) == before, (name, implementation, step)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with quiet():
                journal.begin(step)
                journal.apply_rest()
                plain.step()
            assert models.image(optimizer) == models.image(plain), (name, implementation, step)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Adam", {"betas": [0.0, 0.999]}), ("AdamW", {"lr": 1.0, "weight_decay": 1.0})],
)
def test_a_step_without_an_inverse_is_copied_for_the_same_reason_as_on_a_cpu(
    name: str, settings: dict[str, Any]
) -> None:
    kind = getattr(torch.optim, name)
    why = {
        Journal(kind([torch.nn.Parameter(torch.zeros(4, device=place))], **settings), undo="exact").why
        for place in (here().type, "cpu")
    }
    assert len(why) == 1
    assert "copies of the buckets in flight are kept" in why.pop()


def test_a_step_and_its_undo_are_queued() -> None:
    """Both are over for the host before the device has begun with them; what comes next in the stream sees the undo."""
    parameters, optimizer = made("adamw", "foreach", "float32")
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


def trained(name: str, dtype: str, elements: int = 1 << 16) -> tuple[Journal, torch.optim.Optimizer, int]:
    """A journal with four buckets of an optimizer that has stepped for a while, and the number of elements."""
    parameters = [
        torch.nn.Parameter(torch.randn(elements).to(here(), getattr(torch, dtype))) for _ in range(4)
    ]
    optimizer = models.make(name, "default", parameters)
    for step in range(0, 16, 2):
        models.give_gradients(parameters, step)
        optimizer.step()
    torch.accelerator.synchronize()
    return Journal(optimizer, undo="exact", bucket_bytes=elements), optimizer, 4 * elements


@pytest.mark.parametrize(("name", "dtype", "copied", "codes"), FITTING)
def test_codes_take_the_place_of_copies_once_the_device_has_come_so_far(
    name: str, dtype: str, copied: int, codes: int
) -> None:
    journal, optimizer, elements = trained(name, dtype)
    image, before = models.image(optimizer), torch.accelerator.memory_allocated()

    def kept() -> float:
        return (torch.accelerator.memory_allocated() - before) / elements

    with held(), no_waits():
        journal.begin(9)
        journal.apply_rest()
        journal.replace_copies()
        assert copied + codes <= kept() < copied + codes + 0.5
    torch.accelerator.synchronize()
    journal.replace_copies()
    assert codes <= kept() < codes + 0.3
    assert kept() - 0.05 < journal.extra_bytes / elements <= kept()
    journal.undo()
    assert models.image(optimizer) == image
    del image
    assert kept() == 0


@pytest.mark.parametrize("share", [0.001, 0.3])
def test_copies_stay_where_too_much_does_not_fit(share: float) -> None:
    """A parameter that is tiny beside its step cannot be told from what rounding leaves."""
    journal, optimizer, _ = trained("adamw", "float32")
    for parameter in optimizer.param_groups[0]["params"]:
        tiny = torch.rand(parameter.shape).to(here()) < share
        parameter.detach().mul_(torch.where(tiny, 1e-30, 1.0))
    before = models.image(optimizer)
    journal.begin(9)
    journal.apply_rest()
    torch.accelerator.synchronize()
    journal.replace_copies()
    records = list(journal._records.values())
    assert all(isinstance(record, CodedCopies) for record in records)
    assert all((record._copies is None) == (share < 0.1) for record in records)
    journal.undo()
    assert models.image(optimizer) == before


class LateReducer(HalvingReducer):
    """As staged gloo: an average is there once the device has come to its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._computed = deque[Event]()

    def launch(self, bucket: Any) -> Reduction:
        self._computed.append(accelerator().mark())
        return super().launch(bucket)

    def finish(self, reduction: Reduction, *, kept: bool = False) -> None:
        until_over(self._computed.popleft())
        super().finish(reduction, kept=kept)


@pytest.mark.parametrize(("undo", "least", "most"), [("preimage", 28, 28.5), ("exact", 19, 22)])
def test_the_peak_of_a_wait_free_step(undo: str, least: float, most: float) -> None:
    """In bytes a parameter: 16 are its own, with gradient and state."""
    side, layers, before = 256, 32, torch.accelerator.memory_allocated()
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(layers))).to(here())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, side**-0.5)
    config = SessionConfig(replicas=2, updates="wait_free", undo=undo, bucket_bytes=4 * side * side)
    session, optimizer = updates_of(config, LateReducer()), torch.optim.AdamW(model.parameters())
    session.awaited.add(WholeModule(model))
    session.add(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        session.begin_step(step)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        model(torch.randn(64, side).to(here())).square().sum().backward()
        optimizer.step()
    peak = torch.accelerator.max_memory_allocated() - before
    assert least < peak / (layers * side * side) < most

"""Which variables a step reaches: what hooks, parameters and modules that a step imports hold."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift.runtime._torch_hooks import hooks_of
from swift.runtime.gate import Gate
from tests.unit.runtime.test_script import Job, Step, changes


def imported_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    (tmp_path / "of_ones_own.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def train_step(step: int) -> None:
        import of_ones_own  # type: ignore[import-not-found]

        of_ones_own.count += 1

    return train_step


def test_what_a_first_step_imports_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(imported_in_a_step(tmp_path, monkeypatch), capsys=capsys) == "of_ones_own.count"


def counted() -> tuple[Callable[..., None], list[int]]:
    count = [0]

    def hook(*_: Any) -> None:
        count[0] += 1

    return hook, count


def test_what_hooks_of_the_session_s_modules_keep_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    hang: list[Callable[[nn.Linear, torch.optim.Optimizer, Any], Any]] = [
        lambda module, _, hook: module.register_forward_hook(hook),
        lambda module, _, hook: module.register_forward_pre_hook(hook),
        lambda module, _, hook: module.register_full_backward_hook(hook),
        lambda module, _, hook: module.register_full_backward_pre_hook(hook),
        lambda module, _, hook: module.weight.register_hook(hook),
        lambda module, _, hook: module.weight.register_post_accumulate_grad_hook(hook),
        lambda _, optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda _, optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda _, __, hook: nn.modules.module.register_module_forward_hook(hook),
    ]
    for each in hang:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        hook, count = counted()
        handle = each(module, optimizer, hook)

        def train_step(step: int, module: nn.Linear = module, optimizer: Any = optimizer) -> None:
            module(torch.ones(1, 2, requires_grad=True)).sum().backward()
            optimizer.step()

        job = Job(module, optimizer)
        for step in range(4):
            job.script.begin(step, train_step, lambda m=module, o=optimizer: [m, *hooks_of([m], [o])])
            train_step(step)
            job.script.end(step, checkpoint=False)
        handle.remove()
        assert count[0] >= 4
        assert "changes count" in capsys.readouterr().err, each


def test_attributes_of_parameters_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = nn.Linear(2, 2)
    module.weight.seen = 0

    def train_step(step: int) -> None:
        module.weight.seen += 1
        module.weight._dynamo_of_torch_compile = step
        setattr(module.bias, "of_a_package", step)  # noqa: B010  (which the trainer's own code does not look at)

    assert changes(train_step, module, capsys=capsys) == "parameter.seen"


def test_variables_of_one_name_in_several_places_are_all_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def make(moves: bool) -> Step:
        best = 0

        def watch(step: int) -> None:
            nonlocal best
            best += moves

        return watch

    still, moving = make(moves=False), make(moves=True)

    def train_step(step: int) -> None:
        still(step)
        moving(step)

    assert changes(train_step, capsys=capsys) == "best"
    assert changes(train_step, capsys=capsys, transient=("best",)) == ""


def test_variables_of_the_environment_that_a_step_names_are_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_ONES_OWN", "0")

    def train_step(step: int) -> None:
        os.environ["OF_ONES_OWN"] = str(int(os.environ["OF_ONES_OWN"]) + 1)
        os.environ["OF_A_PACKAGE" + str(step)] = "1"

    assert changes(train_step, capsys=capsys) == "os.environ.OF_ONES_OWN"
    for step in range(4):
        del os.environ[f"OF_A_PACKAGE{step}"]


class Calls:
    """As many people write a trainer: the step is its `__call__`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int) -> None:
        self.count += 1

    def train_step(self, step: int) -> None:
        self(step)


def adds(totals: dict[str, int], step: int) -> None:
    totals["all"] = totals.get("all", 0) + step + 1


def test_a_step_is_found_behind_what_the_session_wraps_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    for given, name in (
        (Calls(), "Calls.count"),
        (Calls().train_step, "self.count"),
        (functools.partial(adds, {}), "totals, totals.all"),
    ):
        assert changes(Gate().around(given), capsys=capsys) == name


def test_what_lies_where_a_parameter_lies_is_captured_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Linear(2, 2)
    state, weights = module.state_dict(), [p.data for p in module.parameters()]

    def train_step(step: int) -> None:
        assert state
        for weight in weights:
            weight += 1

    assert changes(train_step, module, capsys=capsys) == ""

"""A function that is called again: what one call hands on to the next, and what it must not keep."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import swift_ft
from swift_ft import reinitialization, torch_private
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state import torch_settings


class Session:
    def __init__(self) -> None:
        self.closed = 0
        reinitialization.begin_session(self)

    def close(self) -> None:
        self.closed += 1


def test_it_is_called_until_it_returns_with_the_line_of_the_call_before() -> None:
    lines, sessions = [], []

    @swift_ft.reinit
    def train(last: int) -> str:
        assert reinitialization.is_called_again()
        lines.append(reinitialization.handed_on() or object())
        assert not reinitialization.has(lines[-1])
        sessions.append(Session())
        if len(lines) <= last:
            error = reinitialization.hand_on(lines[-1])
            assert reinitialization.has(lines[-1])
            raise error
        return "done"

    assert train(2) == "done"
    assert len(lines) == 3
    assert len(set(map(id, lines))) == 1
    assert [session.closed for session in sessions] == [1, 1, 0]
    assert not reinitialization.is_called_again()


def test_every_call_draws_the_same() -> None:
    drawn = []

    @swift_ft.reinit
    def train() -> None:
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        torch.manual_seed(len(drawn))
        if len(drawn) < 3:
            raise reinitialization.hand_on(object())
        reinitialization.handed_on()

    train()
    assert len(set(drawn)) == 1


def test_an_exception_handler_lets_it_through() -> None:
    calls = []

    @swift_ft.reinit
    def train() -> None:
        calls.append(reinitialization.handed_on())
        try:
            if len(calls) == 1:
                raise reinitialization.hand_on("line")
        except Exception:  # noqa: BLE001
            pytest.fail("it is no Exception")

    train()
    assert calls == [None, "line"]


def test_who_keeps_it_is_told() -> None:
    @swift_ft.reinit
    def train() -> None:
        try:
            raise reinitialization.hand_on("line")
        except BaseException:  # noqa: BLE001
            return

    with pytest.raises(UsageError, match=r"let swift_ft\.Reinitialize through"):
        train()
    reinitialization.handed_on()


def test_what_a_finally_raises_on_the_way_does_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    @swift_ft.reinit
    def train() -> None:
        calls.append(reinitialization.handed_on())
        try:
            if len(calls) == 1:
                raise reinitialization.hand_on("line")
        finally:
            if len(calls) == 1:
                raise RuntimeError("Connection closed by peer")  # a barrier of the trainer's

    train()
    assert calls == [None, "line"]
    assert "while the training function was left: RuntimeError: Connection closed" in capsys.readouterr().err


def test_a_function_that_cannot_begin_twice_ends_the_process_so_that_it_is_replaced() -> None:
    calls = []

    @swift_ft.reinit
    def train() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("context has already been set")  # before it has made a session
        raise reinitialization.hand_on("line")

    with pytest.raises(
        ServiceError, match="cannot begin a second time in one process: RuntimeError: context"
    ) as caught:
        train()
    assert caught.value.exit_code == 3
    reinitialization.handed_on()


def test_settings_of_torch_are_those_of_the_first_call() -> None:

    seen = []

    @swift_ft.reinit
    def train() -> None:
        reinitialization.handed_on()
        seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
        if len(seen) == 1:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            raise reinitialization.hand_on("line")

    train()
    assert torch_settings.read()["default_dtype"] == "float32"
    assert seen == [(torch.float32, True)] * 2


def test_an_error_behind_it_ends_it() -> None:
    calls = []

    @swift_ft.reinit
    def train() -> None:
        calls.append(reinitialization.handed_on())
        if len(calls) == 1:
            raise reinitialization.hand_on("line")
        raise ValueError("the trainer's own")

    with pytest.raises(ValueError, match="the trainer's own"):
        train()
    assert len(calls) == 2


def test_another_error_ends_it() -> None:
    @swift_ft.reinit
    def train() -> None:
        raise ValueError("the trainer's own")

    with pytest.raises(ValueError, match="the trainer's own"):
        train()
    assert not reinitialization.is_called_again()


def test_in_a_warm_up_a_function_is_called_once_whatever_it_raises() -> None:
    calls = []

    @swift_ft.reinit
    def train(error: BaseException | None) -> str:
        calls.append(Session())
        if error is not None:
            raise error
        return "done"

    for error in (reinitialization.over(), RuntimeError("the others are gone"), None):
        reinitialization.begin_warm_up()
        with pytest.raises(type(error)) if error is not None else nullcontext():
            assert train(error) == "done"
        assert calls[-1].closed == 0, "the warm-up closes it"
        reinitialization.leave()
        assert calls[-1].closed == 1
        assert not reinitialization.asked()
    assert len(calls) == 3


def test_iterators_of_data_loaders_are_torchs_again() -> None:
    """A loader that was made before a session is one of no session, the second time."""
    before = DataLoader.__iter__
    begin = torch_private.dataloader._BaseDataLoaderIter.__init__
    torch_private.make_iterators_by(lambda loader, make: iter(["the session's"]), lambda *_: None)
    assert list(DataLoader([1])) == ["the session's"]
    torch_private.undo_patches()
    assert DataLoader.__iter__ is before
    assert torch_private.dataloader._BaseDataLoaderIter.__init__ is begin

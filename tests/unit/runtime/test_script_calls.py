"""What a script changes in place by itself is seen, and its model is not slowed down for that."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from swift_ft.train import step_digests
from swift_ft.train.recording import ThoroughWatch
from swift_ft.train.step_digests import Witness
from swift_ft.train.transcript import CALLED, ENTERS, LEAVES
from tests.unit.runtime.wired import ignored


class Other(TorchFunctionMode):
    """One of the script's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fails = False
        self.modes: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes = modes()
        if self.fails:
            raise ValueError("of the script")
        with torch.no_grad():
            x.add(0).add_(1)  # a module's own: its outputs show it
        out: torch.Tensor = self.linear(x)
        return out


class Step:
    """One that is looked at thoroughly."""

    def __init__(self) -> None:
        self.net = Net()
        self.witness = Witness(ignored, lambda: False, ignored)
        stage = type("Stage", (), {"submod": self.net})()
        self.watch = ThoroughWatch(self.witness, [stage], dict)
        self.witness.begin(0)

    def called(self) -> list[str]:
        return [seen.name.partition(" in ")[0] for seen in self.witness.transcript() if seen.kind == CALLED]


def modes() -> list[object]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    assert modes() == []
    yield
    assert modes() == []


@pytest.fixture
def step() -> Step:
    return Step()


def test_an_average_is_seen_and_what_is_inside_of_a_module_is_not(step: Step) -> None:
    average = torch.zeros(2)
    step.watch.begin()
    out = step.net(torch.ones(1, 2))
    with torch.no_grad():
        average.lerp_(out[0], 0.1)
        average[0] = 1.0
    step.watch.end()
    assert step.called() == ["lerp_", "__setitem__"]
    assert step.net.modes == []


def test_a_forward_that_fails_leaves_nothing_behind(step: Step) -> None:
    step.net.fails = True
    step.watch.begin()
    with pytest.raises(ValueError, match="of the script"):
        step.net(torch.ones(1, 2))
    step.watch.end()
    assert modes() == []


def test_modes_of_the_script_go_on(step: Step) -> None:
    outer, inner, left = Other(), Other(), Other()
    with outer:
        step.watch.begin()
        with inner:
            step.net(torch.ones(1, 2))
            assert step.net.modes == [outer, step.watch.calls, inner]
        step.net(torch.ones(1, 2))
        assert step.net.modes == [outer]
        with left:
            step.watch.end()
            assert modes() == [outer, left]
        assert modes() == [outer]


def test_what_leaves_a_module_and_enters_the_next_is_digested_once(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[torch.Tensor] = []
    digest_of = step_digests.digest_of

    def counting(tensor: torch.Tensor, *, whole: bool = False) -> bytes:
        counted.append(tensor)
        return digest_of(tensor, whole=whole)

    monkeypatch.setattr(step_digests, "digest_of", counting)
    x = torch.ones(3)
    step.witness.saw(LEAVES, 0, 0, 0, x, "a")
    step.witness.saw(ENTERS, 0, 0, 0, x, "b")
    assert len(counted) == 1
    x += 1
    step.witness.saw(ENTERS, 0, 0, 0, x, "c")
    assert len(counted) == 2
    with torch.inference_mode():
        y = torch.ones(3)
    step.witness.saw(ENTERS, 0, 0, 0, y, "d")
    step.witness.saw(ENTERS, 0, 0, 0, y, "e")  # it has no version, so nobody knows whether it has changed
    assert len(counted) == 4
    a, b, c, d, e = step.witness.transcript().values()
    assert (a, d, e) == (b, b, b)
    assert c != a

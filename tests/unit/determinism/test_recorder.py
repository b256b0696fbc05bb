"""What a step of a script without a session leaves in its file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from swift_ft.lab.determinism.recorder import OfScript
from swift_ft.lab.determinism.verify import Record, run_of
from swift_ft.train.step_digests import SAMPLED_BYTES
from swift_ft.train.transcript import ENTERS, GRADIENT, LEAVES, STATE, Seen, Transcript

Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def recorded(place: Path, steps: int = 3, make: Make = net, *, looks: bool = False) -> Sequence[Record]:
    """`looks`: a validation follows each step."""
    place.mkdir()
    recorder = OfScript(place)
    module, optimizer = make()
    for step in range(steps):
        recorder.called(module)
        module(torch.arange(4.0).reshape(2, 2) + step).square().mean().backward()
        recorder.before_optimizer(optimizer, (optimizer,), {})
        optimizer.step()
        recorder.after_optimizer(optimizer, (optimizer,), {})
        optimizer.zero_grad()
        if looks:
            with torch.no_grad():
                module.eval()(torch.ones(1, 2))
                module.train()
    recorder.end()
    [path] = place.iterdir()
    return run_of([path.read_text()]).processes[0]


def test_a_step_is_what_it_begins_with_what_passes_modules_and_gradients(tmp_path: Path) -> None:
    records = recorded(tmp_path / "run")
    assert [(record.step, record.last) for record in records] == [
        (0, False),
        (1, False),
        (2, False),
        (3, True),
    ]
    seen = records[1].seen
    for kind, name in (
        (STATE, "parameter Sequential.0.weight"),
        (STATE, "buffer Sequential.1.running_mean"),
        (STATE, "optimizer 0.param_groups.0.lr"),
        (STATE, "optimizer 0.state.Sequential.0.weight.momentum_buffer"),
        (STATE, "generator torch"),
        (ENTERS, "Sequential.1"),
        (LEAVES, "Sequential.1"),
        (GRADIENT, "Sequential.0.bias"),
    ):
        assert Seen(kind, 0, 0, 0, name) in seen, (kind, name)
    assert records[1].settings["threads"] == str(torch.get_num_threads())
    assert not any(each.kind != STATE for each in records[-1].seen)


def test_a_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    """`no_grad`."""
    ways = [recorded(tmp_path / str(looks), looks=looks) for looks in (False, True)]
    assert [record.seen for record in ways[0]] == [record.seen for record in ways[1]]


def test_a_module_is_left_as_it_was(tmp_path: Path) -> None:
    module, optimizer = net()
    recorded(tmp_path / "run", make=lambda: (module, optimizer))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("place", [0, 1, 12345, -1])
def test_every_bit_of_a_large_tensor_counts(tmp_path: Path, place: int) -> None:
    """Also one that a sample leaves out."""

    def large(bit: int) -> Transcript:
        module, optimizer = net()
        module.register_buffer("large", torch.zeros(SAMPLED_BYTES))
        module.large.view(torch.int32)[place] ^= bit
        return recorded(tmp_path / str(bit), 1, lambda: (module, optimizer))[0].seen

    one, other = large(0), large(1)
    assert [seen.name for seen in one if one[seen] != other[seen]] == ["buffer Sequential.large"]


def test_an_object_that_cannot_be_taken_apart_counts_by_its_type(tmp_path: Path) -> None:
    def odd() -> tuple[nn.Module, torch.optim.Optimizer]:
        module, optimizer = net()
        optimizer.param_groups[0]["who"] = object()
        return module, optimizer

    assert recorded(tmp_path / "1", 1, odd)[0].seen == recorded(tmp_path / "2", 1, odd)[0].seen

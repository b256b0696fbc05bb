"""What swift does about torch's own faults."""

import gc
import io
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift.runtime import _torch, _torch_versions
from swift.runtime.groups import ReconfigurableGroup
from tests.local_backend import LocalBackend


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ddp_finds_itself_in_its_backward_whatever_is_taken_for_garbage() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
    _torch.keep_reference(module)
    output = module(torch.ones(1, 2))
    reference = output.grad_fn.ddp_weakref
    # It is the one that the module holds: the collector sees an owner besides the nodes.
    assert any(type(owner) is dict and reference in owner.values() for owner in gc.get_referrers(reference))
    assert reference in weakref.getweakrefs(module)
    assert reference() is module
    torch.save(module, io.BytesIO())  # it is not in the way of a trainer's own checkpoints


class _Stage:
    """Learns its shapes alone."""


class _Other:
    """A stage of torch's."""


def test_only_the_stages_that_learn_alone_do(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Any] = []
    name = _torch_versions.SETTLE
    monkeypatch.setattr(_torch.Schedule, name, lambda self, stages, *_args: settled.append(stages))
    _torch_versions.learn_shapes_alone(_Stage)
    stages: list[Any] = [_Stage(), _Stage()]
    getattr(_torch.Schedule, name)(None, stages, True, False)
    assert not settled
    assert all(stage._inference_mode is _torch._utils.InferenceMode.DYNAMIC for stage in stages)
    getattr(_torch.Schedule, name)(None, others := [_Other()], True, False)
    assert settled == [others]


def test_a_group_has_its_rank_and_size() -> None:
    """They are asked of its backend from torch 2.14 on."""
    group = ReconfigurableGroup("pipeline", [4, 5, 6], 2, LocalBackend(), step=None, gate=None)
    assert (group.rank(), group.size()) == (2, 3)


def test_a_buffer_of_one_receive_is_forgotten_and_one_of_a_microbatch_kept() -> None:
    once = SimpleNamespace(buffer=torch.ones(1), take_buffer=lambda: None)
    for_good = SimpleNamespace(buffer=torch.ones(1))
    _torch_versions.forget_receives([once, for_good])
    assert once.buffer is None
    assert for_good.buffer is not None

"""What swift does about torch's own faults."""

import gc
import io
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.state.carried_gradients import WholeModule
from tests.local_backend import LocalBackend
from tests.unit.runtime.wired import session_of_nothing, state_of


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
    torch_private.keep_reference(module)
    output = module(torch.ones(1, 2))
    reference = output.grad_fn.ddp_weakref
    # It is the one that the module holds: the collector sees an owner besides the nodes.
    assert any(type(owner) is dict and reference in owner.values() for owner in gc.get_referrers(reference))
    assert reference in weakref.getweakrefs(module)
    assert reference() is module
    torch.save(module, io.BytesIO())  # it is not in the way of a trainer's own checkpoints


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("given", ["the wrapper", "the module inside"])
@pytest.mark.parametrize("how", ["option", "later", "hook"])
def test_what_ddp_learns_in_its_first_step_is_refused(how: str, given: str) -> None:
    inner = torch.nn.Linear(2, 2)
    module = torch.nn.parallel.DistributedDataParallel(inner, static_graph=how == "option")
    state = state_of()
    state.wrapped.append(module)
    state.add_stage(WholeModule(module if given == "the wrapper" else inner))
    state.add_optimizer(torch.optim.SGD(module.parameters(), 0.1))
    if how == "later":
        module._set_static_graph()
    if how == "hook":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(UsageError, match=r"leave (static_graph=True|register_comm_hook)"):
        state.check_complete()


def _scripted() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is deprecated
        return torch.jit.script(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("inside", [False, True])
def test_torchscript_is_refused(inside: bool) -> None:
    module = torch.nn.Sequential(_scripted()) if inside else _scripted()
    with pytest.raises(UsageError, match=r"^(0|the module) is TorchScript .*give the Python module"):
        session_of_nothing().module(module)


class _Stage:
    """Learns its shapes alone."""


class _Other:
    """A stage of torch's."""


def test_only_the_stages_that_learn_alone_do(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Any] = []
    name = torch_private.SETTLE
    monkeypatch.setattr(torch_private.Schedule, name, lambda self, stages, *_args: settled.append(stages))
    torch_private.learn_shapes_alone(_Stage)
    stages: list[Any] = [_Stage(), _Stage()]
    getattr(torch_private.Schedule, name)(None, stages, True, False)
    assert not settled
    assert all(stage._inference_mode is torch_private._utils.InferenceMode.DYNAMIC for stage in stages)
    getattr(torch_private.Schedule, name)(None, others := [_Other()], True, False)
    assert settled == [others]


def test_a_group_has_its_rank_and_size() -> None:
    """They are asked of its backend from torch 2.14 on."""
    group = ReconfigurableGroup("pipeline", [4, 5, 6], 2, LocalBackend())
    assert (group.rank(), group.size()) == (2, 3)


def test_a_buffer_of_one_receive_is_forgotten_and_one_of_a_microbatch_kept() -> None:
    once = SimpleNamespace(buffer=torch.ones(1), take_buffer=lambda: None)
    for_good = SimpleNamespace(buffer=torch.ones(1))
    assert [torch_private.keeps_buffer(info) for info in (once, for_good)] == [False, True]
    torch_private.forget_receives([once, for_good])
    assert once.buffer is None
    assert for_good.buffer is not None


@pytest.mark.usefixtures("alone")
def test_a_group_is_split_by_new_groups_and_only_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dist.split_group
    torch_private.split_by_new_groups(lambda: True)
    try:
        group = dist.split_group(split_ranks=[[0]])
        assert dist.get_process_group_ranks(group) == [0]
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        with pytest.raises(UsageError, match=r"use dist\.new_group, on all ranks"):
            dist.split_group(group, [[0]])
    finally:
        torch_private.undo_patches()
    assert dist.split_group is plain

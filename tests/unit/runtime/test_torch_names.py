"""What swift does about torch's own faults."""

import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from swift.runtime import _torch


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

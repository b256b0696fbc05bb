"""What swift does about torch's own faults."""

import gc
import io
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta

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


def test_each_line_of_an_error_is_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two failures each began with [rank0]: [rank0]: [rank0]:."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("it broke", file=sys.stderr))
    for _ in range(3):
        with _torch.one_excepthook():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    sys.excepthook(ValueError, ValueError(), None)
    assert told.getvalue() == "[rank0]: it broke\n"


def test_a_group_whose_making_failed_leaves_no_number() -> None:
    """Its rank would look for the others under a name that they do not have."""
    store = dist.HashStore()
    with pytest.raises(RuntimeError):  # nobody else comes
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=timedelta(milliseconds=200)
        )
    assert not dist.is_initialized()
    _torch.forget_half_built_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.default_group().group_name == "0"
    finally:
        dist.destroy_process_group()

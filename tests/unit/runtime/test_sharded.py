"""Sharded state as local tensors and back, by what each rank's shard is; and steps that are cut short."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import Alone
from swift_ft.errors import ServiceError, UsageError
from swift_ft.optimizers import Lamb
from swift_ft.planner import Assignment
from swift_ft.state import fsdp
from tests.local_backend import LocalBackend

pytestmark = pytest.mark.skipif(
    not torch_private.RESETS_SHARDED, reason="swift refuses FSDP2 with this torch"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Seen from rank 1 of 2 x 2, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def module_on(mesh: DeviceMesh, rows: int = 6, **options: Any) -> Any:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4))
    for part in module:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"stages": {"0": module.state_dict()}, "optimizers": [optimizer.state_dict()], "objects": {"n": 3}}


@pytest.mark.parametrize("rows", [6, 5, 1])  # even shards, uneven ones, one that is empty
def test_a_state_goes_through_local_tensors_and_back(rows: int, mesh: DeviceMesh) -> None:
    module = module_on(mesh, rows)
    state = state_of(module, stepped(module))
    plain, words = fsdp.localized(state)
    weight = plain["stages"]["0"]["0.weight"]
    assert type(weight) is torch.Tensor
    assert weight.data_ptr() == state["stages"]["0"]["0.weight"].to_local().data_ptr()
    assert words["state.stages.0.0.weight"] == f"R, S(0) 2/2 by 1 on replicate×shard of [{rows}, 4]"
    assert "state.optimizers.0.state.0.step" not in words  # a plain number of every rank
    back = fsdp.globalized(plain, words, module.parameters())
    for name, tensor in state["stages"]["0"].items():
        other = back["stages"]["0"][name]
        assert other.placements == tensor.placements
        assert other.shape == tensor.shape
        assert other.device_mesh == tensor.device_mesh
        assert torch.equal(other.to_local(), tensor.to_local())
    moment = back["optimizers"][0]["state"][0]["exp_avg"]
    assert fsdp.is_sharded(moment)
    assert moment.placements == state["optimizers"][0]["state"][0]["exp_avg"].placements
    assert back["objects"] == {"n": 3}


def test_another_shard_is_refused_though_it_has_the_same_shape(mesh: DeviceMesh) -> None:
    module = module_on(mesh)
    plain, own = fsdp.localized(state_of(module, stepped(module)))
    theirs = {path: words.replace(" 2/2 ", " 1/2 ") for path, words in own.items()}
    fsdp.check_placements(own, own, "state.stages.")
    with pytest.raises(
        ServiceError,
        match=r"0\.0\.bias is R, S\(0\) 1/2 by 1 on .* of \[6\], this rank holds R, S\(0\) 2/2 by 1 on",
    ):
        fsdp.check_placements(own, theirs, "state.stages.")
    fsdp.globalized(plain, own, module.parameters())
    with pytest.raises(
        ServiceError, match=r"is R, S\(0\) 1/2 by .* of \[6, 4\]; this rank holds R, S\(0\) 2/2 by 1"
    ):
        fsdp.globalized(plain, theirs, module.parameters())


def test_a_state_that_was_not_sharded_does_not_fit() -> None:
    with pytest.raises(ServiceError, match="a is not sharded, this rank holds S"):
        fsdp.check_placements({"state.stages.a": "S(0) 1/2 of [2]"}, {}, "state.stages.")
    fsdp.check_placements({"state.objects.a": "S(0) 1/2 of [2]"}, {}, "state.stages.")


def test_what_is_not_sharded_is_left_as_it_is() -> None:
    state = {"stages": {"0": nn.Linear(2, 2).state_dict()}, "optimizers": []}
    plain, words = fsdp.localized(state)
    assert plain is state
    assert not words
    assert fsdp.globalized(state, words, []) is state


def test_a_mesh_that_ends_with_a_generation_is_refused(mesh: DeviceMesh) -> None:
    module = module_on(mesh)
    group = ReconfigurableGroup("shard", [0, 1], 0, LocalBackend())
    with pytest.raises(UsageError, match=r"is not rebuilt after a failure; .* use session\.mesh"):
        fsdp.reduced_by_fsdp(module, {"shard": group})
    assert fsdp.reduced_by_fsdp(nn.Linear(2, 2), {"shard": group}) == []


def test_a_mesh_needs_shards() -> None:
    with pytest.raises(UsageError, match="shards or tensor_parallel"):
        fsdp.device_mesh(Assignment.grid(4, replicas=4), {})


def test_an_optimizer_that_communicates_is_refused(mesh: DeviceMesh) -> None:
    module = module_on(mesh)
    with pytest.raises(UsageError, match="Lamb over sharded parameters"):
        fsdp.check_optimizer(Lamb(module.parameters()))
    fsdp.check_optimizer(torch.optim.AdamW(module.parameters()))
    fsdp.check_optimizer(Lamb(nn.Linear(2, 2).parameters()))


def test_stand_ins_share_memory_with_shards(mesh: DeviceMesh) -> None:
    parameter = next(module_on(mesh).parameters())
    parameter.grad = torch.ones_like(parameter)
    mine = fsdp.stand_in(parameter)
    mine.grad.mul_(3)
    assert parameter.grad.to_local().eq(3).all()
    plain = nn.Parameter(torch.ones(2))
    assert fsdp.stand_in(plain) is plain


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_parts_make_the_norm_of_the_whole(norm_type: float) -> None:
    whole = torch.randn(12, generator=torch.Generator().manual_seed(1))
    parts = [fsdp.part_of_norm([t, torch.empty(0)], norm_type, t.device) for t in whole.split(5)]
    stacked = torch.stack(parts)
    found = stacked.max() if norm_type == float("inf") else stacked.sum() ** (1 / norm_type)
    torch.testing.assert_close(found, torch.linalg.vector_norm(whole, norm_type))


# --- a step that was cut short ---


def _in_forward(module: Any) -> None:
    def die(*_: Any) -> None:
        raise RuntimeError("connection")

    handle = module[1].register_forward_pre_hook(die)
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 4))
    handle.remove()


def _in_backward(module: Any) -> None:
    def die(_: Any) -> None:
        raise RuntimeError("connection")

    inner: list[torch.Tensor] = []
    handle = module[0].register_forward_hook(lambda _m, _i, output: inner.append(output))
    output = module(torch.ones(2, 4))
    handle.remove()
    inner[0].register_hook(die)
    with pytest.raises(RuntimeError):
        output.sum().backward()


def _between_microbatches(module: Any) -> None:
    """As pipeline stages do it: gradients wait, unsharded, for the last microbatch."""
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)
    module(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("cut", [_in_forward, _in_backward, _between_microbatches])
def test_a_step_after_a_reset_is_a_first_step(
    cut: Callable[[Any], None], bf16: bool, mesh: DeviceMesh
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    grads = []
    for cuts in (False, True):
        module = module_on(mesh, mp_policy=policy)
        parameters = list(module.parameters())
        if cuts:
            cut(module)
            torch_private.reset_sharded(module)
            assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
            for parameter in parameters:
                parameter.grad = None
        module(torch.ones(2, 4)).sum().backward()
        grads.append([p.grad.to_local().clone() for p in parameters])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])  # in a first forward another stage is still being gathered
def test_a_looped_schedule_that_was_cut_short_gathers_its_stages_again(calls: int, mesh: DeviceMesh) -> None:
    group = dist.new_group([dist.get_rank()])
    grads = []
    for cuts in (False, True):
        modules = [module_on(mesh), module_on(mesh)]
        stages = [PipelineStage(m, n, 2, torch.device("cpu"), group=group) for n, m in enumerate(modules)]
        schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))  # stages have learned their shapes
        if cuts:
            _cut_at(calls, schedule, modules)
            torch_private.clear_schedule(schedule)
            for module in modules:
                torch_private.reset_sharded(module)
        for module in modules:
            module.zero_grad()
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        grads.append([p.grad.to_local().clone() for module in modules for p in module.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def _cut_at(calls: int, schedule: Any, modules: list[Any]) -> None:
    """The schedule's step fails in the forward of a microbatch, after so many of them."""
    left = [calls]

    def die(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("connection")

    handles = [module.register_forward_pre_hook(die) for module in modules]
    with pytest.raises(RuntimeError):
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    for handle in handles:
        handle.remove()


def test_a_module_that_has_not_run_needs_no_reset(mesh: DeviceMesh) -> None:
    torch_private.reset_sharded(module_on(mesh))
    torch_private.reset_sharded(nn.Linear(2, 2))


# --- collectives without peers ---


def test_a_quiet_group_asks_nobody() -> None:
    group = ReconfigurableGroup("shard", [0, 1, 2], 1, LocalBackend())
    own, gathered = torch.tensor([1.0, 2.0]), torch.zeros(6)
    with pytest.raises(RuntimeError, match="ended generation"):
        group.allgather_into_tensor_coalesced([gathered], [own])
    group.broken = None
    with group.quiet():
        group.allgather_into_tensor_coalesced([gathered], [own]).wait()
        group.allreduce([own]).wait()
        group.barrier().wait()
    assert gathered.tolist() == [1.0, 2.0] * 3
    assert own.tolist() == [3.0, 6.0]
    with pytest.raises(RuntimeError, match="ended generation"):
        group.allreduce([own])


def test_alone_reduces_to_the_right_shape() -> None:
    output = torch.zeros(2)
    Alone(1, 2).reduce_scatter(output, [torch.ones(2), torch.full((2,), 3.0)], torch.Tensor.add_)
    assert output.tolist() == [6.0, 6.0]
    incoming = [torch.ones(3), torch.ones(1)]  # the others' data decide how much they give
    Alone(1, 2).all_to_all(incoming, [torch.ones(2), torch.full((3,), 2.0)])
    assert [part.tolist() for part in incoming] == [[2.0] * 3, [0.0]]


@pytest.mark.parametrize(("op", "expected"), [("SUM", 6.0), ("AVG", 3.0), ("MAX", 3.0)])
def test_averages_are_sums_over_the_number_of_ranks(op: str, expected: float) -> None:
    """FSDP2 asks for averages, which gloo has not got."""
    group = ReconfigurableGroup("shard", [4, 5], 1, LocalBackend())
    reduced, output = torch.full((2,), 3.0), torch.zeros(2)
    for options in (dist.AllreduceOptions(), dist.ReduceScatterOptions()):
        options.reduceOp = getattr(dist.ReduceOp, op)
        with group.quiet():
            if isinstance(options, dist.AllreduceOptions):
                group.allreduce([reduced], options).wait()
            else:
                whole = torch.tensor([1.0, 1.0, 3.0, 3.0])
                group.reduce_scatter_tensor_coalesced([output], [whole], options).wait()
    assert reduced.tolist() == output.tolist() == [expected] * 2

"""Stages of several ranks: `cells.py STEPS REPLICAS SHARDS TENSOR MESH [rehearsed]`. With the last word it waits in
step 4 until all ranks were rehearsed. The world size is stages * REPLICAS * SHARDS * TENSOR.

Layers are split over TENSOR ranks (column- and row-wise, with sequence parallelism), and their parts are sharded over
SHARDS ranks (FSDP2). MESH is session (`session.mesh`) or own: one that the trainer makes of all ranks,
and does with it what trainers do: a seed that is broadcast before training, losses that are summed over some of its
dimensions, a collective that gives each rank something else.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import swift_ft
from swift_ft import events
from tests.patience import eventually

STEPS, REPLICAS, SHARDS, TENSOR, MESH = *map(int, sys.argv[1:5]), sys.argv[5]
WIDTH, HIDDEN, LENGTH, BATCH, MICROBATCHES = 6, 8, 4, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(torch.tanh(self.wide(self.norm(x))))
        return self.dropout(x + hidden)


PLAN = {
    "norm": SequenceParallel(),
    "wide": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(output_layouts=Shard(1)),
}


def batch(step: int, dp_rank: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dp_rank))


def part_of(x: Tensor, session: swift_ft.Session) -> Tensor:
    """This rank's part of each sequence."""
    return x.chunk(TENSOR, dim=1)[session.tp_rank].contiguous()


def main() -> None:
    session = swift_ft.Session.from_env(
        checkpoint_every=5, replicas=REPLICAS, shards=SHARDS, tensor_parallel=TENSOR, bucket_bytes=256
    )
    index, stages = session.pipeline_rank, session.pipeline_ranks
    own: Any = None
    mesh = session.mesh
    seed = torch.tensor([index + 1])
    if MESH == "own":
        sizes = {"pipeline": stages, "replicate": REPLICAS, "shard": SHARDS, "tensor": TENSOR}
        own = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        mesh = own
        seed = torch.randint(1000, (1,))  # another one in each process
        dist.broadcast(seed, src=0)
        words = [f"run {int(seed)}"]
        dist.broadcast_object_list(words, src=0)
        assert words == [f"run {int(seed)}"]
        seed = torch.tensor([7 + index])
    torch.manual_seed(int(seed))
    module = nn.Sequential(Block(), Block())
    if TENSOR > 1:
        parallelize_module(module, mesh["tensor"], {f"{n}.{k}": v for n in range(2) for k, v in PLAN.items()})
    if SHARDS > 1:
        dims = tuple(n for n, size in (("replicate", REPLICAS), ("shard", SHARDS)) if size > 1)
        for block in module:
            fully_shard(block, mesh=mesh[dims])
        fully_shard(module, mesh=mesh[dims])
    last = index == stages - 1
    if own is not None and stages > 1:
        over = own.get_group("pipeline")
        stage = session.adopt(PipelineStage(module, index, stages, torch.device("cpu"), group=over))
    else:
        stage = session.pipeline_stage(module, index, stages)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.02))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = batch(step, session.dp_rank)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        given = [part_of(x, session)] if index == 0 else []
        target = {"target": part_of(x.roll(1, dims=2), session), "losses": losses} if last else {}
        schedule.step(*given, **target)
        if own is None:
            session.clip_grad_norm_(module.parameters(), 0.5)
        else:
            session.reduce_gradients()
            clip(module, own, stages)
        optimizer.step()
        if sys.argv[6:] and step == 4 and not swift_ft.is_warming_up():
            await_rehearsals(session.world_size)
        if own is not None:
            report(session, own, torch.stack(losses).mean() if last else torch.zeros(()), step)

    session.run(train_step, num_steps=STEPS)
    session.close()


def await_rehearsals(ranks: int) -> None:
    def all_of_them() -> bool:
        time.sleep(0.1)
        ends = [e for e in events.read(Path(os.environ["SWIFT_EVENTS"])) if e["event"] == "rehearsal_end"]
        return {e["rank"] for e in ends} == set(range(ranks))

    eventually(all_of_them, "rehearsals of all ranks", 200.0)


def clip(module: nn.Module, mesh: Any, stages: int) -> None:
    """The norm over all stages as torchtitan takes it: torch's own over DTensors, and a sum over the pipeline."""
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if stages > 1:
        norm = norm**2
        dist.all_reduce(norm, group=mesh.get_group("pipeline"))
        norm = norm**0.5
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.5, norm)


def report(session: swift_ft.Session, mesh: Any, loss: Tensor, step: int) -> None:
    for name in ("replicate", "shard"):
        if mesh[name].size() > 1:
            dist.all_reduce(loss, group=mesh.get_group(name))
    if mesh["tensor"].size() > 1:  # another part for each rank
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, torch.full((TENSOR,), float(step)), group=mesh.get_group("tensor"))
        assert float(part) == step * TENSOR
    session.log(loss=float(loss))


if __name__ == "__main__":
    main()

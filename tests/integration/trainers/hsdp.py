"""FSDP2 over the session's mesh: `hsdp.py STEPS REPLICAS SHARDS PRECISION DEVICE [STRATEGY [DIRECTORY [BEGIN]]]`. The
world size is stages * REPLICAS * SHARDS. DEVICE is cpu, simulated (`tests/device`), or simulated-nccl, which is the
same with communicators. At the end each rank writes its stage's whole weights and averages of them into DIRECTORY.
BEGIN is what was exported of such a job, whose weights are in DIRECTORY: this one goes on with them.

Every stage is sharded as a whole and layer by layer, in uneven shards (7 rows over 2 ranks). With it come what a
trainer uses: clipping by the global norm, a schedule of learning rates, dropout, and an average of the weights that
is sharded like them. PRECISION is fp32, or bf16: FSDP2 then keeps gradients that wait for their reduction apart.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from stages import Positioned
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B

import swift_ft
from tests.device import simulated

STEPS, REPLICAS, SHARDS, PRECISION, WHERE = *map(int, sys.argv[1:4]), *sys.argv[4:6]
DEVICE = simulated.NAME if WHERE == simulated.OVER_NCCL else WHERE
STRATEGY = sys.argv[6] if sys.argv[6:] else "auto"
WIDTH, BATCH, MICROBATCHES = 7, 12, 3


class Data(Positioned):
    """Each data-parallel rank has batches of its own."""

    def __init__(self, dp_rank: int) -> None:
        super().__init__()
        self.dp_rank = dp_rank

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.position + self.dp_rank)
        self.position += 1
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x, x.roll(1, dims=1)


class Average:
    """An exponential average of the weights, in shards."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.values: list[Tensor] = []

    def update(self) -> None:
        if not self.values:  # not before: the session makes replicas alike when it starts
            self.values = [p.detach().clone() for p in self.parameters]
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [value.clone() for value in state["values"]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class Part(nn.Module):
    """What one pipeline rank runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def begin_with(exported: str, module: nn.Module, session: swift_ft.Session) -> None:
    """Each rank with its own shards, which are those of the whole weights."""
    stage = str(session.pipeline_rank)
    state = {"stages": {stage: module.state_dict()}}
    swift_ft.load_dcp(state, exported)
    module.load_state_dict(state["stages"][stage])
    known = torch.load(f"{sys.argv[7]}/rank{session.rank}.pt", weights_only=True)["weights"]
    for name, parameter in module.named_parameters():
        local = parameter.to_local()  # type: ignore[attr-defined]
        assert torch.equal(local, known[name].chunk(SHARDS)[session.rank % SHARDS]), name


def main() -> None:
    if DEVICE == simulated.NAME:
        simulated.load()
    if WHERE == simulated.OVER_NCCL:
        simulated.load_with_communicators(Path(os.environ["SWIFT_DIGESTS"]).parent)
    session = swift_ft.Session.from_env(
        seed=5, checkpoint_every=4, replicas=REPLICAS, shards=SHARDS, bucket_bytes=256, strategy=STRATEGY
    )
    torch.manual_seed(session.rank)  # replicas are made alike by the session
    module = Part().to(DEVICE)
    dtype = torch.bfloat16 if PRECISION == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in module.layers:
        fully_shard(layer, mesh=session.mesh, mp_policy=policy)
    fully_shard(module, mesh=session.mesh, mp_policy=policy)
    index, stages = session.pipeline_rank, session.pipeline_ranks
    stage = session.pipeline_stage(module, index, stages, DEVICE)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    if sys.argv[8:]:
        begin_with(sys.argv[8], module, session)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.02))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data, average = Data(session.dp_rank), Average(module)
    session.register(schedule=schedule, scheduler=scheduler, loader=data, average=average)

    def train_step(step: int) -> None:
        x, y = (each.to(DEVICE) for each in next(data))
        optimizer.zero_grad()
        inputs = [x] if index == 0 else []
        schedule.step(*inputs, **({"target": y} if index == stages - 1 else {}))
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        # torch's own norm of DTensors, over the same mesh; a replay has nobody of the other stages.
        known: Any = torch.nn.utils.get_total_norm(grads) if stages == 1 else None
        norm = session.clip_grad_norm_(module.parameters(), 0.5)
        if known is not None:
            torch.testing.assert_close(norm, known.full_tensor())
        optimizer.step()
        scheduler.step()
        average.update()

    session.run(train_step, num_steps=STEPS)
    if sys.argv[7:]:
        names = [name for name, _ in module.named_parameters()]
        weights = [parameter.full_tensor() for parameter in module.parameters()]  # type: ignore[attr-defined]
        averages = [value.full_tensor() for value in average.values]  # type: ignore[attr-defined]
        whole = {"weights": dict(zip(names, weights, strict=True)), "averages": averages}
        torch.save(whole, f"{sys.argv[7]}/rank{session.rank}.pt")
    session.close()


if __name__ == "__main__":
    main()

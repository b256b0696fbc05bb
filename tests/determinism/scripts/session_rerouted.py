"""A pipeline of two stages with two replicas; the peers of a lost rank share its microbatches."""

# verdict: EQUAL
# ranks: 4
# session
# strategy: adaptive

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

with swift_ft.Session.from_env(replicas=2, checkpoint_every=4) as session:
    rank = session.pipeline_rank
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    stage = session.pipeline_stage(module, rank, 2)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + session.dp_rank))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, 1))
        optimizer.step()

    session.run(train_step, num_steps=12)

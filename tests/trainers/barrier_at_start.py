"""A barrier before training, as scripts have it that download their data first."""

# verdict: same bits
# worlds: 2

import probe
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)
    dist.barrier()

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x.roll(1, 1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        losses.append(mean)
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, module=module, optimizer=optimizer)

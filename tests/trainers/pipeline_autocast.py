"""Stages under autocast to float16, with dropout."""

# verdict: same bits
# worlds: 2
# device

import probe
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

device = probe.device()

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8)).to(device)
    stage = session.pipeline_stage(module, rank, ranks, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank)).to(
            device
        )
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.roll(1, 1), losses=losses)
        optimizer.step()
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, module=module, optimizer=optimizer)

"""ZBV: two stages on each rank, in a V; the first rank has the loss."""

# verdict: same bits
# worlds: 2

import probe
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    stages = [
        session.pipeline_stage(module[i], index, 2 * ranks)
        for i, index in enumerate((rank, 2 * ranks - 1 - rank))
    ]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x, target=x.roll(1, 1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

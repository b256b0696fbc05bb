"""A weight tied between the first and the last of three stages by session.tie, and clipped."""

# verdict: same bits
# worlds: 3

import probe
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shared = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.shared


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = Scaled()
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    if rank in (0, ranks - 1):
        session.tie(module.shared, ranks=[0, ranks - 1])
    session.register(schedule=schedule)

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
        if rank > 0:  # the last stages agree on something of their own
            losses.append(session.all_reduce(module.linear.weight.grad, "two of them", ranks=[1, 2]))
        norm = session.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(norm)
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, module=module, optimizer=optimizer)

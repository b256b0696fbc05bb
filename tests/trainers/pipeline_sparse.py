"""An embedding with sparse gradients in the first stage of a pipeline."""

# verdict: same bits
# adaptive: refused
# worlds: 2, 4

import probe
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    first: nn.Module = nn.Embedding(20, 8, sparse=True) if rank == 0 else nn.Tanh()
    module = nn.Sequential(first, nn.Linear(8, 8))
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.SGD(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + session.dp_rank)
        x = torch.randint(20, (16,), generator=generator)
        target = torch.randn(16, 8, generator=generator)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

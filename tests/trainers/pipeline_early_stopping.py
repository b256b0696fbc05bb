"""Early stopping by session.stop on the last stage alone, which has the loss; with replicas by their common one."""

# verdict: same bits
# adaptive: refused
# worlds: 2, 4
# steps: 16
# quick

import probe
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas() // 2, checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, 1) * (1 if step < 10 else 10), losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        if session.replicas > 1:
            dist.all_reduce(loss)
        optimizer.step()
        if losses and float(loss) > 20:
            session.stop("the loss grows")
        session.log(stopped=step)
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    assert session.step == 11, session.step
    probe.end(session, module=module, optimizer=optimizer)

"""FSDP2 on session.mesh: two replicas of two shards, or two shards."""

# verdict: same bits
# worlds: 4, 2
# kills: moment, optimizer, tail
# device

import probe
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import swift_ft

replicas = probe.replicas() // 2
with swift_ft.Session.from_env(replicas=replicas, shards=2, checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(probe.device())
    fully_shard(model, mesh=session.mesh)
    session.module(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        x = x.to(probe.device())
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, weights=[p.to_local() for p in model.parameters()])

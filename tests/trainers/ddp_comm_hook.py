"""DistributedDataParallel by session.ddp, with gradients compressed to float16 by a communication hook."""

# verdict: refused
# says: has a communication hook (fp16_compress_hook)
# worlds: 2

import probe
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    wrapped = session.ddp(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model = session.module(wrapped)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)

"""As scripts for GPUs are: pinned batches, autocast, accumulation, checkpointed blocks, clipping, EMA, loss.item()."""

# verdict: same bits
# worlds: 1, 2
# device

import copy

import probe
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import swift_ft

device = probe.device()
ACCUMULATED = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2))
        self.second = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Model().to(device))
    average = copy.deepcopy(model)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = session.optimizer(torch.optim.AdamW(groups, lr=1e-2, foreach=True))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    session.register(average=average, scheduler=scheduler)

    def train_step(step: int) -> None:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        loader = DataLoader(
            TensorDataset(x, x.sum(1, keepdim=True)), 32 // ACCUMULATED, pin_memory=device != "cpu"
        )
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, (given, wanted) in enumerate(loader):
            given, wanted = given.to(device, non_blocking=True), wanted.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(given).float(), wanted) / ACCUMULATED
            if number + 1 < ACCUMULATED:
                with session.accumulating():
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
        norm = session.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        probe.note(step, total, norm)

    probe.run(session, train_step, model=model, optimizer=optimizer, average=average, scheduler=scheduler)

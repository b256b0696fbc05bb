"""schedule.eval with batches of several sizes, before the update and behind it."""

# verdict: same bits
# adaptive: refused
# worlds: 2
# quick

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(
        session, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8))
    )

    def evaluate(size: int, seed: int) -> list[torch.Tensor]:
        module.eval()
        other = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
        losses = probe.through(session, schedule.eval, other)
        module.train()
        return losses

    def train_step(step: int) -> None:
        if step % 3 == 0:
            evaluate(4 + 4 * (step // 3 % 2), 7)
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        optimizer.step()
        if step % 3 == 1:
            losses += evaluate(20, 8)
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

"""Two passes of the schedule, one update."""

# verdict: same bits
# adaptive: refused
# worlds: 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + part))
            losses += probe.through(session, schedule.step, x)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

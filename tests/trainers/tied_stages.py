"""A weight tied between the first stage and the last by session.tie, and clipped; with 4: replicas, replayed."""

# verdict: same bits
# worlds: 3, 4

import probe
import torch
from torch import nn

import swift_ft


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shared = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.shared


replicas = {3: 1, 4: 2}[probe.replicas()]
with swift_ft.Session.from_env(checkpoint_every=5, replicas=replicas, strategy="replay") as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    module, schedule, optimizer = probe.pipeline(session, Scaled)
    if rank in (0, ranks - 1):
        session.tie(module.shared, ranks=[0, ranks - 1])

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, x)
        losses.append(session.all_reduce(x.sum(), "of this data-parallel rank's batch"))
        if ranks == 3 and rank > 0:  # the last stages agree on something of their own
            losses.append(session.all_reduce(module.linear.weight.grad, "two of them", ranks=[1, 2]))
        norm = session.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(norm)
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

"""ReLoRA: every fourth step A and B are merged into the frozen weight and begin anew, and so does Adam."""

# verdict: same bits

import probe
import torch
from torch import nn

import swift_ft


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.1, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, 8) * 0.1)
        self.b = nn.Parameter(torch.zeros(16, 2))
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x @ (self.weight + self.b @ self.a).T))

    @torch.no_grad()
    def merge(self) -> None:
        self.weight += self.b @ self.a
        nn.init.normal_(self.a, std=0.1)
        self.b.zero_()


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(LoRA())
    net = model
    optimizer = session.optimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    )

    def train_step(step: int) -> None:
        loss = probe.update(session, model, optimizer, step)
        if step % 4 == 3:
            torch.manual_seed(step)
            net.merge()
            optimizer.state.clear()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)

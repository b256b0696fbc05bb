"""One weight used twice in a module (tied embedding and head)."""

# verdict: same bits
# worlds: 1, 2
# plain: 1, 2

import probe
import torch
from torch import nn

import swift_ft


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens))[0])


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Tied())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        tokens = torch.randint(
            16, (4, 6), generator=torch.Generator().manual_seed(1000 * step + session.dp_rank)
        )
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = session.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        probe.note(step, loss, norm)

    probe.run(session, train_step, model=model, optimizer=optimizer)

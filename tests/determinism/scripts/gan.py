"""Two optimizers and two modules, with arguments by name; a validation, and activation checkpointing."""

# verdict: EQUAL

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, *, sample):
        return self.outer(torch.tanh(checkpoint(self.inner, sample, use_reentrant=False)))


torch.manual_seed(0)
maker, judge = nn.Linear(2, 4), Judge()
makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
first = 0
if os.path.exists("gan.pt"):
    saved = torch.load("gan.pt")
    for name, part in (("maker", maker), ("judge", judge), ("makers", makers), ("judges", judges)):
        part.load_state_dict(saved[name])
    first = saved["step"]
for step in range(first, 10):
    generator = torch.Generator().manual_seed(step)
    real, noise = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    judges.zero_grad()
    (judge(sample=maker(noise).detach()) - judge(sample=real)).mean().backward()
    judges.step()
    makers.zero_grad()
    (-judge(sample=maker(noise))).mean().backward()
    makers.step()
    with torch.no_grad():
        judge(sample=real)
    saved = {"maker": maker, "judge": judge, "makers": makers, "judges": judges}
    torch.save({**{n: part.state_dict() for n, part in saved.items()}, "step": step + 1}, "gan.pt")

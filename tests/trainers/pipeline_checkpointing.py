"""Activation checkpointing and dropout in the stages."""

# verdict: same bits
# worlds: 2
# device

import probe
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swift_ft


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session, Block)
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)

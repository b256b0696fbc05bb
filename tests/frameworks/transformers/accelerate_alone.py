"""Accelerate without the Trainer: its loop as its own documentation writes it, in a session"""

# verdict: refused
# worlds: 2
# says: loader.base_dataloader
# patience: 200

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swift_ft
from tests.trainers import probe

session = swift_ft.Session.from_env(replicas=int(os.environ["WORLD_SIZE"]), checkpoint_every=5)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, shuffle=True)
session.module(model)
session.optimizer(optimizer)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
session.register(loader=data)
batches = iter(data)


def train_step(step: int) -> None:
    (x,) = next(batches)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    probe.note(step, loss)


session.run(train_step, 8)
probe.end(session, model=model)

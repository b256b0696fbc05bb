"""Distillation from a teacher that is copied from the student in the first step behind each checkpoint."""

# verdict: same bits
# worlds: 1

import copy

import probe
import torch
from torch import nn

import swift_ft


class Holder:
    teacher: nn.Module | None = None


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = session.module(student)
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    holder = Holder()

    def train_step(step: int) -> None:
        if step % 5 == 0:
            holder.teacher = copy.deepcopy(student)
        x = torch.randn(16, 8)
        with torch.no_grad():
            wanted = holder.teacher(x)
        y = model(x)
        loss = nn.functional.mse_loss(y, x.sum(1, keepdim=True)) + 0.5 * nn.functional.mse_loss(y, wanted)
        probe.descend(step, optimizer, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)

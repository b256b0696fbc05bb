"""Parameters of one shape, in an order that each process has of its own, as that of a set."""

# verdict: same bits
# kills: tail, moment, optimizer
# plain: 1

import os
import random

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(8))))
    parameters = list(model.parameters())
    random.Random(os.getpid()).shuffle(parameters)
    optimizer = session.optimizer(torch.optim.SGD(parameters, lr=0.02, momentum=0.9))

    def train_step(step: int) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), x.tanh()))

    session.run(train_step, num_steps=probe.steps())
    momenta = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    probe.end(session, model=model, momenta=momenta)

"""Gradients of parts of a batch are added in the order in which they happen to be ready."""

# quick
# verdict: NOT DETERMINISTIC
# cause: unordered-reduction
# says: the gradient of parameter Linear.weight

import random

import own
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(32, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in own.steps(10, model=model):
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    losses = [part.pow(2).mean() for part in model(x).chunk(64)]
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    random.SystemRandom().shuffle(grads)  # as they arrive
    for parameter, *parts in zip(model.parameters(), *grads):
        parameter.grad = torch.zeros_like(parameter)
        for part in parts:
            parameter.grad += part
    optimizer.step()

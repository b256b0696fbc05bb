"""torch.func: gradients by functional_call and grad, put into .grad by hand."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn
from torch.func import functional_call, grad_and_value

import swift_ft


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank))
    return x, x.sum(1, keepdim=True)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = batch(step, session.dp_rank)
        parameters = dict(model.named_parameters())

        def loss_of(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return nn.functional.mse_loss(functional_call(model, values, (x,)), y)

        gradients, loss = grad_and_value(loss_of)({n: p.detach() for n, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].detach()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)

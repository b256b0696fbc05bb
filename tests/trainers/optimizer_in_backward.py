"""An optimizer for each parameter, which steps in its post-accumulate hook."""

# verdict: same bits
# worlds: 1, 2
# plain: 1

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizers = {p: session.optimizer(torch.optim.AdamW([p], lr=1e-2)) for p in model.parameters()}
    optimizer = list(optimizers.values())

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[arg-type]

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)

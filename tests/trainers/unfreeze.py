"""Fine-tuning: the body is unfrozen at step 5 and given to the optimizer as a new group."""

# verdict: same bits
# worlds: 1, 2
# plain: 1, 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = probe.net()
    model[0].requires_grad_(False)
    session.module(model)
    optimizer = session.optimizer(torch.optim.AdamW(model[2].parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        probe.note(step, probe.update(session, model, optimizer, step))

    probe.run(session, train_step, model=model, optimizer=optimizer)

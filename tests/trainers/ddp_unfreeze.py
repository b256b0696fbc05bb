"""Fine-tuning under DistributedDataParallel, which leaves alone what is frozen when it is made."""

# verdict: same bits
# worlds: 2
# kills: moment, reduce, tail
# plain: 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = probe.net()
    model[0].requires_grad_(False)
    wrapped = session.module(session.ddp(model))
    optimizer = session.optimizer(torch.optim.AdamW(model[2].parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        probe.note(step, probe.update(session, wrapped, optimizer, step))

    probe.run(session, train_step, model=model, optimizer=optimizer)

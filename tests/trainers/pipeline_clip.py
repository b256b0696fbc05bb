"""session.clip_grad_norm_ over all stages, a scheduler, and session.log behind the update: every step once."""

# verdict: same bits
# worlds: 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    session.register(scheduler=scheduler)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        session.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        session.log(weight=module[0].weight.double().sum())
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    lines = probe.logged(session)
    assert [line["step"] for line in lines] == list(range(probe.steps()))
    weights = [line["weight"] for line in lines]
    probe.end(session, module=module, optimizer=optimizer, scheduler=scheduler, weights=weights)

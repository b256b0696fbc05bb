"""A bare except around schedule.step, after which the step goes on."""

# verdict: same bits
# worlds: 2

import probe
import torch

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        try:
            losses = probe.through(session, schedule.step, x)
        except Exception as error:
            print(f"step {step}: {error}", flush=True)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

"""A pipeline whose batch grows over time."""

# verdict: refused
# adaptive: refused
# worlds: 2
# says: batches are of one size

import probe

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        x = x[: 8 + 4 * (step // 6)]
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, x)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

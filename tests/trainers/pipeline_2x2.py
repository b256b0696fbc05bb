"""A pipeline of two stages with two replicas each."""

# verdict: same bits
# worlds: 4
# kills: forward, backward, reduce, optimizer, tail

import probe

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5, replicas=2) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

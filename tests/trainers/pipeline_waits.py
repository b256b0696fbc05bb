"""A wait of the author's own for the other rank, which is not there in a replay."""

# verdict: same bits
# worlds: 2
# kills: tail
# patience: 300

import time

import probe

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5, replay_stall_s=2.0) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        optimizer.step()
        while session.replaying:  # as a lock, or a file that another rank writes
            time.sleep(0.05)
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

"""dist.all_reduce of the loss behind the update, as a metric."""

# verdict: same bits
# adaptive: named inexact
# worlds: 2

import probe
import torch
import torch.distributed as dist

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        optimizer.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        losses.append(mean)
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

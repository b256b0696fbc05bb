"""A barrier before training; dist.all_reduce of the loss before the update, in a group of the author's own."""

# verdict: same bits
# adaptive: refused
# worlds: 2

import probe
import torch
import torch.distributed as dist

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)
    group = dist.new_group([0, 1])
    dist.barrier()

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(mean, group=group)
        losses.append(mean)
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

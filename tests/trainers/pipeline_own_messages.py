"""dist.send of the loss from the last rank to the first, by hand."""

# verdict: refused
# adaptive: refused
# worlds: 2
# says: by hand is not logged

import probe
import torch
import torch.distributed as dist

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = probe.through(session, schedule.step, probe.batch(step, session.dp_rank)[0])
        optimizer.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        if rank == ranks - 1:
            dist.send(mean, 0)
        if rank == 0:
            dist.recv(mean, ranks - 1)
        losses.append(mean)
        probe.note(step, losses)

    probe.run(session, train_step, module=module, optimizer=optimizer)

"""Early stopping by session.stop on the last stage alone, which has the loss; with replicas by their common one."""

# verdict: same bits
# adaptive: refused
# worlds: 2, 4
# steps: 16
# quick

import probe
import torch
import torch.distributed as dist

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas() // 2, checkpoint_every=5) as session:
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    module, schedule, optimizer = probe.pipeline(session)

    def train_step(step: int) -> None:
        x, _ = probe.batch(step, session.dp_rank)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.roll(1, 1) * (1 if step < 10 else 10), losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        if session.replicas > 1:
            dist.all_reduce(loss)
        optimizer.step()
        if losses and float(loss) > 20:
            session.stop("the loss grows")
        session.log(stopped=step)
        probe.note(step, losses)

    session.run(train_step, num_steps=probe.steps())
    assert session.step == 11, session.step
    probe.end(session, module=module, optimizer=optimizer)

"""Children that a step forks, which end by sys.exit, an error or the end of the step; and one of multiprocessing."""

# verdict: same bits
# worlds: 1, 2

import multiprocessing
import os
import sys

import probe
import torch

import swift_ft


def fork(step: int) -> int:
    """The child's number in the child, 0 in the rank; which waits for the child before."""
    child = os.fork()
    if child == 0:
        return step % 3 + 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (step % 3 == 1)
    return 0


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        loss = probe.backward(session, model, optimizer, step)
        which = fork(step)
        if which == 1:
            sys.exit()
        if which == 2:
            os.close(2)
            raise ValueError("the child's own")
        if which == 3:
            return
        process = multiprocessing.get_context("fork").Process(target=sys.exit)
        process.start()
        process.join()
        assert process.exitcode == 0
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    if os.fork() == 0:
        sys.exit()
    os.wait()
    probe.end(session, model=model, optimizer=optimizer)

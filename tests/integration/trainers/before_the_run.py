"""What scripts do before `session.run`: `before_the_run.py STEPS DIRECTORY VICTIM PLACE`. Rank VICTIM dies the first
time that it comes to PLACE: before, between or behind collectives, or in a step.

Each process draws numbers of its own, and all of a job have those of rank 0's first process in the end.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import swift_ft

STEPS, VICTIM = int(sys.argv[1]), int(sys.argv[3])
DIRECTORY, PLACE = Path(sys.argv[2]), sys.argv[4]


def at(place: str, rank: int) -> None:
    if place == PLACE and rank == VICTIM:
        try:
            (DIRECTORY / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def apart(rank: int, mine: Any) -> None:
    """What gives each rank something else, and what overlaps."""
    for number in (1.0, 2.0):
        at(f"reduce{int(number)}", rank)
        total = torch.tensor([number * 10**rank])
        dist.reduce(total, dst=0)
        assert rank or float(total) == number * 1111.0, total
    part: list[Any] = [None]
    dist.scatter_object_list(part, ["a", "bbbb", "cc", None] if rank == 0 else None, src=0)
    assert part == [["a", "bbbb", "cc", None][rank]]
    one, other = torch.ones(1), torch.ones(1)
    calls = [(one, None), (other, mine)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (calls if rank % 2 else calls[::-1])]
    for work in works:
        work.wait()
    assert (float(one), float(other)) == (4.0, 2.0)


def main() -> None:
    session = swift_ft.Session.from_env(replicas=4, checkpoint_every=4)
    rank = session.rank
    at("first", rank)
    seed = torch.tensor([int.from_bytes(os.urandom(4))])
    dist.broadcast(seed, src=0)
    at("between", rank)
    pair = dist.new_group([0, 1])
    others = dist.new_group([2, 3])
    mine: Any = pair if rank < 2 else others
    told: list[Any] = [os.urandom(4).hex()]
    dist.broadcast_object_list(told, src=0 if rank < 2 else 2, group=mine)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, {"rank": rank, "word": told[0], "more": "x" * (5 * rank)})
    at("object", rank)
    apart(rank, mine)
    weights = torch.full((100_000 if PLACE == "large" else 1000,), float(rank))
    dist.broadcast(weights, src=3)
    at("large", rank)
    dist.barrier()
    at("last", rank)
    torch.manual_seed(int(seed))
    model = session.module(nn.Linear(8, 8))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train_step(step: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total, group=mine)
        assert int(total) == 2
        at("step", rank)

    session.run(train_step, num_steps=STEPS)
    (DIRECTORY / f"end{rank}").write_text(repr((int(seed), told, gathered)))
    session.close()


if __name__ == "__main__":
    main()

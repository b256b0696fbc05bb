"""Replicas of one stage, of which some are lost: `shrinking.py session STEPS [HABIT]` in a job, and beside it
`shrinking.py reference STEPS OUT [STEP:LOST...] [CUT.json]`, plain torch in one process: means over three origins,
without LOST from STEP on. CUT: step -> what became of each bucket of it (event "lossy_step"). HABIT is how the trainer
gets at its batches: "asks" in each step for its data-parallel rank, has a "loader", and two that nobody can carry out
for another rank: "knows" it from before, "talks" before it updates. One that is "late" asks, computes by a schedule,
and rank 0 begins to compute step LATE when the others have lost a rank. One that is "deaf" asks, and in step LATE rank
1 is lost once all have the first average, of which rank 2 has heard nothing. One that "lingers" talks, and behind that
rank 0 waits in step LATE + 1 until the lost rank has come back. One that is "plain" has torch's DataLoader, registered,
with the session's numbers (so plain torch cannot say what its bits must be).

Both write a digest of weights and optimizer state for every step: `{step: digest}`.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

ORIGINS = 3
WIDTH, BATCH = 24, 8
LATE = 6


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def batch_of(step: int, origin: int) -> tuple[Tensor, Tensor]:
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * 1000 + origin))
    return batch, batch.roll(1, 0)


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loss_of(model: nn.Module, step: int, origin: int) -> Tensor:
    batch, target = batch_of(step, origin)
    return distance(model(batch), target)


def await_notices(count: int) -> None:
    """The first one is of the first loss."""
    (trace,) = Path(os.environ["SWIFT_EVENTS"]).glob(f"*-{os.getpid()}.jsonl")
    while trace.read_text().count('"notice"') < count:
        time.sleep(0.01)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = [*model.parameters(), *(state[name] for state in states for name in sorted(state))]
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


class Position:
    """Of the data: the step is what its batches are made of."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Batches(Position):
    """Of one origin, by its position."""

    def __init__(self, origin: int) -> None:
        super().__init__()
        self.origin = origin

    def next_batch(self) -> tuple[int, int]:
        self.step += 1
        return self.step - 1, self.origin


def deafen(rank: int, under_way: Position) -> None:
    """As if a result had not reached rank 2 when the connection broke."""
    from swift_ft.train.reducer import Reducer, Reduction

    finish = Reducer.finish
    heard = [Path(os.environ["SWIFT_DIGESTS"], f"heard-{each}") for each in range(ORIGINS)]

    def finish_once(reducer: Reducer, reduction: Reduction, *, kept: bool = False) -> None:
        reduction.task.wait()
        if under_way.step != LATE or heard[rank].exists():
            finish(reducer, reduction, kept=kept)
            return
        heard[rank].touch()
        while rank == 1:
            if all(path.exists() for path in heard):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        if rank == 2:
            await_notices(1)
            reduction.task.error = RuntimeError("Connection closed by peer")
        finish(reducer, reduction, kept=kept)

    Reducer.finish = finish_once  # type: ignore[method-assign]


def in_a_job(steps: int, habit: str) -> None:
    from shuffled import Shuffled

    import swift_ft

    lingers, was_here = (
        Path(os.environ["SWIFT_DIGESTS"], name) for name in ("lingers", f"was-here-{os.environ['RANK']}")
    )
    begun = Path(os.environ["SWIFT_DIGESTS"], "late-begun")
    # What the others have logged of that step is to be in the log when this rank comes back.
    while habit == "lingers" and was_here.exists() and not lingers.exists():
        time.sleep(0.5)
    was_here.touch()
    settings = {"seed": 1, "checkpoint_every": 4, "replicas": ORIGINS, "bucket_bytes": 2048}
    under_way = Position()
    with swift_ft.Session.from_env(**settings) as session:
        model, plain, scheduler = made()
        if habit == "late":
            stage = session.pipeline_stage(model, 0, 1)
            schedule = ScheduleGPipe(stage, 1, loss_fn=distance)
            session.register(schedule=schedule)
        else:
            session.module(model)
        optimizer = session.optimizer(plain)
        session.register(scheduler=scheduler)
        if habit == "loader":
            batches = session.loader(Batches)
        elif habit == "plain":
            shuffled = Shuffled(WIDTH)
            session.register(loader=shuffled)
        else:
            position = Position()
            session.register(loader=position)
        if habit == "deaf":
            deafen(session.rank, under_way)
        own = session.dp_rank
        found: dict[int, str] = {}

        def train_step(step: int) -> None:
            under_way.step = step
            optimizer.zero_grad()
            if habit == "loader":
                at, origin = batches.next_batch()
            elif habit != "plain":
                at, origin = position.step, own if habit == "knows" else session.dp_rank
                position.step += 1
            if habit in ("talks", "lingers"):
                torch.distributed.all_reduce(torch.ones(1))
            if habit == "lingers" and step == LATE + 1 and session.rank == 0:
                lingers.touch()
                await_notices(2)
            if habit == "late":
                if step == LATE and session.rank == 0:
                    begun.touch()
                    await_notices(1)
                while step == LATE and not begun.exists():  # rank 0 may still end the step before
                    time.sleep(0.01)
                batch, target = batch_of(at, origin)
                schedule.step(batch, target=target)
            elif habit == "plain":
                batch = next(shuffled)
                distance(model(batch), batch.roll(1, 0)).backward()
            else:
                loss_of(model, at, origin).backward()
            optimizer.step()
            scheduler.step()
            found[step] = bits(model, optimizer)

        session.run(train_step, num_steps=steps)
        Path(os.environ["SWIFT_DIGESTS"], f"bits-{session.rank}.json").write_text(json.dumps(found))


def reference(steps: int, lost: dict[int, int], cut: dict[str, Any]) -> dict[int, str]:
    """`lost`: origin -> the first step without it. `cut`: as in the module's docstring."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = made()
    parameters = list(model.parameters())
    found: dict[int, str] = {}
    for step in range(steps):
        origins = [origin for origin in range(ORIGINS) if step < lost.get(origin, steps)]
        everything = {"parameters": range(len(parameters)), "contributors": origins, "divisor": len(origins)}
        buckets = cut.get(str(step), [everything])
        of_origin = {
            origin: torch.autograd.grad(loss_of(model, step, origin), parameters) for origin in range(ORIGINS)
        }
        assert sorted(i for bucket in buckets for i in bucket["parameters"]) == list(range(len(parameters)))
        for bucket in buckets:
            for index in bucket["parameters"]:
                first, *others = (of_origin[origin][index] for origin in sorted(bucket["contributors"]))
                total = first.clone()
                for gradient in others:
                    total += gradient
                parameters[index].grad = total / bucket["divisor"]
        optimizer.step()
        scheduler.step()
        found[step] = bits(model, optimizer)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "session":
        in_a_job(int(sys.argv[2]), (sys.argv[3:] or ["asks"])[0])
    else:
        pairs = [pair.split(":") for pair in sys.argv[4:] if ":" in pair]
        cuts = [json.loads(Path(name).read_text()) for name in sys.argv[4:] if name.endswith(".json")]
        lost = {int(origin): int(step) for step, origin in pairs}
        found = reference(int(sys.argv[2]), lost, cuts[0] if cuts else {})
        Path(sys.argv[3]).write_text(json.dumps(found))

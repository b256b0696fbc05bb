"""Two stages, or a model with two replicas, and something that the session does not know: `rehearsed.py LAYOUT KIND
STEPS [AWAITED...]`, LAYOUT "pipeline" or "replicas".

KIND is where it is kept: of "counter" and "ids" the module `hidden` makes something in its forward; of "iterator" and
"file" so does the step of its input. "nothing" hides nothing. "flips" has a bit
of rank 1's weights flipped in step FLIPPED, as by a cosmic ray. "killed" loses rank 1 in step KILLED, once a
rehearsal from the checkpoint before it is under way.

AWAITED are RANK@VERSION: the last step before the next checkpoint waits until that rank was rehearsed from that
version. A step takes a millisecond here, a rehearsal seconds. Then rank 0 writes down what `swift-ft status` says.
"""

import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from stages import Positioned, compute
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.tools import status
from tests.patience import eventually

LAYOUT, KIND, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
AWAITED = [(int(rank), int(version)) for rank, version in (word.split("@") for word in sys.argv[4:])]
EVERY = 5
WIDTH, BATCH = 8, 8
FLIPPED, KILLED = 17, 6
RANK = int(os.environ["RANK"])
PATIENCE_S = 90.0


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


def things() -> set[Thing]:
    """Made in an order of chance (of a directory, say), in a set that is ordered by where they lie in memory."""
    numbers = list(range(64))
    random.Random(os.urandom(8)).shuffle(numbers)
    return {Thing(number) for number in numbers}


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.numbers = itertools.count(1)
        self.things = things()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1 + 0.01 * self.kept())

    def kept(self) -> float:
        match KIND:
            case "counter":
                return next(self.numbers)
            case "ids":
                return sum(thing.number / 2**place for place, thing in enumerate(self.things))
        return 0.0


class Numbers(Positioned):
    """An iterator whose state is of what it will draw next, and not of what it has drawn already."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = self._draw()

    def _draw(self) -> int:
        self.position += 1
        return self.position

    def __next__(self) -> int:
        number, self._ahead = self._ahead, self._draw()
        return number


def read_on(path: Path) -> int:
    count = int(path.read_text()) + 1 if path.exists() else 0
    written = path.with_name(f"{path.name}.{os.getpid()}")  # a rehearsal reads it meanwhile
    written.write_text(str(count))
    written.replace(path)
    return count


def events_of(name: str) -> list[dict[str, Any]]:
    """The launcher's, whole lines of them."""
    found = []
    for path in Path(os.environ["SWIFT_EVENTS"]).glob("launcher-*.jsonl"):
        found += [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
    return [event for event in found if event["event"] == name]


def await_rehearsals(step: int) -> None:
    due = {(rank, version) for rank, version in AWAITED if version + EVERY - 1 == step}

    def ended() -> bool:
        return due <= {(event["rank"], event["version"]) for event in events_of("rehearsal_end")}

    eventually(ended, f"rehearsals {due}", PATIENCE_S)


def write_status(session: swift_ft.Session) -> None:
    """Once the coordinator was told of all of it."""
    client = CoordinatorClient(os.environ["SWIFT_COORDINATOR"], os.environ["SWIFT_JOB"])
    done = len([event for event in events_of("rehearsal_end") if not event["why_not"]])

    def told() -> Any:
        reply = client.status()
        return reply if sum(known.done for known in reply.view.rehearsals) == done else None

    lines = status.lines(eventually(told, f"{done} rehearsals in the coordinator", PATIENCE_S))
    client.close()
    Path(os.environ["SWIFT_DIGESTS"], "status.txt").write_text("\n".join(lines))


def die_in_a_rehearsal() -> None:
    """The first process of rank 1. Behind it all wait until the rehearsal's process is gone: long before the run."""
    mark = Path(os.environ["SWIFT_DIGESTS"], "killed")

    def begun() -> list[int]:
        return [e["pid"] for e in events_of("rehearsal_begin") if e["version"] == KILLED // EVERY * EVERY]

    if RANK == 1 and not mark.exists():
        [pid] = eventually(begun, "a rehearsal", PATIENCE_S)
        assert Path(f"/proc/{pid}").exists(), "its steps are not recorded yet"
        mark.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)


def await_its_end() -> None:
    pid = int(Path(os.environ["SWIFT_DIGESTS"], "killed").read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the end of the rehearsal's process", PATIENCE_S)


def main() -> None:
    beside = swift_ft.is_warming_up()
    replicas = 2 if LAYOUT == "replicas" else 1
    with swift_ft.Session.from_env(seed=5, checkpoint_every=EVERY, replicas=replicas) as session:
        torch.manual_seed(session.pipeline_rank)
        module = nn.Sequential()
        for name, part in (
            ("first", nn.Linear(WIDTH, WIDTH)),
            ("hidden", Hidden()),
            ("last", nn.Linear(WIDTH, WIDTH)),
        ):
            module.add_module(name, part)
        schedule = None
        if LAYOUT == "replicas":
            session.module(module)
        else:
            stage = session.pipeline_stage(module, session.pipeline_rank, session.pipeline_ranks)
            schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
            session.register(schedule=schedule)
        optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.01))
        numbers = Numbers()
        if KIND == "iterator":
            session.register(numbers=numbers)

        def offset() -> float:
            match KIND:
                case "iterator":
                    return next(numbers)
                case "file":
                    return read_on(Path(os.environ["SWIFT_DIGESTS"], f"count-{RANK}"))
            return 0.0

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + session.dp_rank))
            x += 0.01 * offset()
            if KIND == "flips" and (RANK, step) == (1, FLIPPED) and not beside:
                module.first.weight.data.view(torch.int32)[0, 0] ^= 1 << 20
            if KIND == "killed" and step == KILLED:
                die_in_a_rehearsal()
            if schedule is None:
                module(x).square().mean().backward()
            else:
                compute(session, schedule, x)
            optimizer.step()
            if beside:
                return
            await_rehearsals(step)
            if KIND == "killed" and step == STEPS - 1:
                await_its_end()
            if step == STEPS - 1 and RANK == 0 and "SWIFT_INCARNATION" in os.environ:
                write_status(session)

        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()

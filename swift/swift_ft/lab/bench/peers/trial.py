"""What the trainers of `swift-ft bench recovery` share: the model, the batches, the kill, and what they tell of it.

(every replica) ``mark("imported")`` → ``mark("connected")`` → for each step ``loss`` → backward → update, with a
``maybe_die`` behind each → ``mark("stepped")`` → … → ``end``; ``mark("broken")`` where a step is cut short
"""

import dataclasses
import hashlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

REPLICAS = 2
SURVIVOR, VICTIM = range(REPLICAS)
PLACES = ("forward", "backward", "update")
"""Behind which the victim dies."""
WIDTH, BATCH = 256, 16


def make_model() -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one system. Its replicas find each other's marks in `directory`."""

    directory: str
    steps: int
    kill_step: int | None
    """The victim kills itself in it, once. None: the run does not fail."""
    every: int
    """Steps between checkpoints."""
    wait_s: float
    """In each step, in the place of a larger model's computation."""
    kill_place: str = PLACES[0]
    strategy: str = ""
    """Of swift."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the system's trainer."""

    @classmethod
    def given(cls) -> "Trial":
        """The one on the command line."""
        return cls(**json.loads(sys.argv[1]))

    @property
    def checkpoints(self) -> Path:
        """One folder for each, named by the number of steps in it."""
        return Path(self.directory) / "checkpoints"

    def newest_checkpoint(self) -> Path | None:
        """The newest one that torch.distributed.checkpoint has finished: it writes `.metadata` last."""
        whole = (path.parent for path in self.checkpoints.glob("*/.metadata"))
        return max(whole, key=lambda path: int(path.name), default=None)

    def loss(self, model: nn.Module, replica: int, step: int) -> torch.Tensor:
        """Of the batch that this replica has in this step, whichever process computes it; a scalar."""
        generator = torch.Generator().manual_seed(step * REPLICAS + replica)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        time.sleep(self.wait_s)
        return nn.functional.mse_loss(model(inputs), inputs.sin())

    def maybe_die(self, replica: int, step: int, place: str) -> None:
        """SIGKILL to this process, if it is the victim at its point and nobody has died in this run."""
        if replica != VICTIM or (step, place) != (self.kill_step, self.kill_place):
            return
        try:
            (Path(self.directory) / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        self.mark("killed", replica, step)
        os.kill(os.getpid(), signal.SIGKILL)

    def meet(self, what: str, processes: int = REPLICAS) -> None:
        """Waits until so many have marked this. Does nothing in a process that is started after the kill."""
        while not (Path(self.directory) / "killed").exists():
            if len({mark["pid"] for mark in read(self.directory) if mark["what"] == what}) == processes:
                return
            time.sleep(0.01)

    def mark(self, what: str, replica: int | None = None, step: int | None = None, **more: Any) -> None:
        """A line in the marks of this run, with the time and this process's id."""
        line = {
            "at": time.monotonic(),
            "pid": os.getpid(),
            "what": what,
            "replica": replica,
            "step": step,
            **more,
        }
        with (Path(self.directory) / "marks").open("a") as file:
            file.write(json.dumps(line) + "\n")  # one write, behind all others' lines

    def end(self, replica: int, model: nn.Module) -> None:
        """The last mark: which bits the weights have, and the most memory that the process has had."""
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.mark("ended", replica, digest=digest.hexdigest(), peak_mib=peak_mib)


def started_at() -> float:
    """When this process was started, by time.monotonic."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def read(directory: str) -> list[dict[str, Any]]:
    """The marks of a run so far, in the order of time."""
    path = Path(directory) / "marks"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

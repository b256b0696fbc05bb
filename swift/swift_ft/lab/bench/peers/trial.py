"""Shared by the trainers of `swift-ft bench recovery`: the model, the batches, the kill, and the marks of a run.

(every replica) ``mark("connected")`` → for each step ``loss`` → backward → update, with a
``maybe_die`` after each → ``mark("stepped")`` → … → ``end``; ``mark("broken")`` where a step is cut short
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_ft.lab.bench import marks

if TYPE_CHECKING:  # `swift-ft bench recovery` imports this module, and no torch
    import torch
    from torch import nn

REPLICAS = 2
SURVIVOR, VICTIM = range(REPLICAS)
PLACES = ("forward", "backward", "update")
"""Parts of a step after which the victim may die."""
WIDTH, BATCH = 256, 16


def make_model() -> "nn.Module":
    """Creates the model, with equal weights in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def make_optimizer(model: "nn.Module") -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one system. Its replicas exchange marks in `directory`."""

    directory: str
    steps: int
    every: int
    """Steps between checkpoints."""
    wait_s: float
    """Sleep in each step, which stands for a larger model's computation."""
    kill_step: int | None = None
    """Step in which the victim kills itself, once. None: the run does not fail."""
    kill_place: str = PLACES[0]
    strategy: str = ""
    """swift's strategy, or "" for other systems."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the system's trainer."""

    @classmethod
    def given(cls) -> "Trial":
        """Parses the trial on the command line."""
        return cls(**json.loads(sys.argv[1]))

    @property
    def checkpoints(self) -> Path:
        """Directory with one folder per checkpoint, named by its number of steps."""
        return Path(self.directory) / "checkpoints"

    def newest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint that torch.distributed.checkpoint has finished: it writes `.metadata` last."""
        whole = (path.parent for path in self.checkpoints.glob("*/.metadata"))
        return max(whole, key=lambda path: int(path.name), default=None)

    def loss(self, model: "nn.Module", replica: int, step: int) -> "torch.Tensor":
        """Returns the loss (a scalar) of this replica's batch in this step, which is equal in every process."""
        import torch
        from torch import nn

        generator = torch.Generator().manual_seed(step * REPLICAS + replica)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        time.sleep(self.wait_s)
        return nn.functional.mse_loss(model(inputs), inputs.sin())

    def maybe_die(self, replica: int, step: int, place: str) -> None:
        """Kills this process by SIGKILL if it is the victim at its point and the kill has not happened in this run."""
        if replica != VICTIM or (step, place) != (self.kill_step, self.kill_place):
            return
        try:
            (Path(self.directory) / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        self.mark("killed", replica, step)
        os.kill(os.getpid(), signal.SIGKILL)

    def meet(self, what: str, processes: int = REPLICAS) -> None:
        """Waits until `processes` processes have made the mark `what`. Returns at once after the kill."""
        while not (Path(self.directory) / "killed").exists():
            if len({mark["pid"] for mark in marks.read(self.directory) if mark["what"] == what}) == processes:
                return
            time.sleep(0.01)

    def mark(self, what: str, replica: int | None = None, step: int | None = None, **more: Any) -> None:
        """Appends a line to the marks of this run, with the time and this process's id."""
        marks.mark(self.directory, what, replica=replica, step=step, **more)

    def end(self, replica: int, model: "nn.Module") -> None:
        """Makes the last mark: a digest of the weights' bits, and the peak memory of the process."""
        self.mark("ended", replica, digest=marks.digest_of(model), peak_mib=marks.peak_mib())

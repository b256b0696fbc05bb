"""What a script is given on its command line, and the lines that it writes about its run."""

import dataclasses
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """(every rank) ``tell("begun")`` → for each step ``stepped`` → ``ended``"""

    directory: str
    task: str
    seed: int
    steps: int
    checkpoint_every: int

    @classmethod
    def given(cls) -> "Told":
        """The one on the command line."""
        return cls(**json.loads(sys.argv[1]))

    def tell(self, what: str, rank: int, **more: Any) -> None:
        """A line in the marks of this run."""
        line = {"what": what, "at": time.monotonic(), "rank": rank, "pid": os.getpid(), **more}
        with (Path(self.directory) / "marks.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")  # one write, behind all others' lines

    def stepped(self, rank: int, step: int, loss: float, parts: Sequence[int]) -> None:
        """The update of that step is done. `parts`: the ranks whose batches are in it."""
        self.tell("stepped", rank, step=step, loss=round(loss, 5), parts=list(parts))

    def ended(self, rank: int, model: nn.Module, measured: float) -> None:
        """`measured`: on the held-out test set."""
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.tell("ended", rank, digest=digest_of(model), measured=measured, peak_mib=peak_mib)


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()

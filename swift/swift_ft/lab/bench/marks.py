"""Marks that the trainers of a run leave in its directory, for whoever has started it: a line of JSON each."""

import hashlib
import json
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def mark(directory: str, what: str, **more: Any) -> None:
    """Appends a mark, with the time and this process's id."""
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}
    with Path(directory, "marks").open("a") as file:
        file.write(json.dumps(line) + "\n")  # a single write, appended after all others' lines


def read(directory: str | Path) -> list[dict[str, Any]]:
    """Returns the marks so far, in order of time, without a last line that is incomplete."""
    path = Path(directory, "marks")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def digest_of(model: "nn.Module") -> str:
    """Returns SHA-256 of the weights' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def peak_mib() -> float:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

"""A checkpoint of a script's own, behind each of its steps."""

import os

import torch


def steps(count, **kept):
    """Those that are left. `kept` is loaded, if there is a checkpoint, and saved behind each."""
    first = 0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        for name, thing in kept.items():
            thing.load_state_dict(saved[name])
        first = saved["step"]
    for step in range(first, count):
        yield step
        torch.save(
            {**{name: thing.state_dict() for name, thing in kept.items()}, "step": step + 1}, "last.pt"
        )

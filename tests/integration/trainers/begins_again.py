"""A training function that is called again: `begins_again.py MODE STEPS`.

decorated  `swift_ft.reinit` around the function; what the module has read at its import stays
script     nothing of it: the whole script is run again

Habits of strangers: an `except Exception` around everything, a barrier and destroy_process_group at the end, a session
that is never closed, a loader whose order is shuffled without a seed, a dropout, and a precision that a step sets.
"""

import json
import os
import random
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from stages import Positioned
from torch import Tensor, nn

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH, SAMPLES = 16, 8, 256
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
BEFORE: list[weakref.ref[object]] = []
"""The model and the optimizer of each call: there may be no room for two of them."""
with Path(os.environ["SWIFT_DIGESTS"], f"imports-{os.getpid()}").open("a") as file:
    file.write("x")


class Order(Positioned):
    """Drawn before the first step, with `random`, which nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = random.sample(range(SAMPLES), SAMPLES)

    def __next__(self) -> Tensor:
        chosen = [self.samples[(self.position + i) % SAMPLES] for i in range(BATCH)]
        self.position += BATCH
        return DATA[chosen]


def train() -> None:
    assert not any(made() for made in BEFORE), "what was before is still there"
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    session = swift_ft.Session.from_env(
        strategy="reinit", replicas=dist_size(), checkpoint_every=4, metrics_listen="127.0.0.1:0"
    )
    assert dist.get_world_size() == session.world_size
    model = session.module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    BEFORE.extend(weakref.ref(made) for made in (model, optimizer))
    loader = Order()
    session.register(loader=loader)
    digests: dict[str, str] = {}

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch.set_float32_matmul_precision("high" if number >= 5 else "highest")
        model(next(loader)).square().mean().backward()
        optimizer.step()
        digests[str(number)] = b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()[-64:]

    try:
        session.run(step, STEPS)
    except Exception as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise
    finally:
        try:
            dist.barrier()  # the others may be gone
        finally:
            dist.destroy_process_group()
    out = Path(os.environ["SWIFT_DIGESTS"])
    (out / f"bits-{session.rank}.json").write_text(json.dumps(digests))


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    (train if MODE == "script" else swift_ft.reinit(train))()

"""A trainer in one process with our checkpoints, for ckpt-chaos: it goes on at the newest version that is whole.

    python -m tests.compat.chaos_trainer --out DIRECTORY [--mode MODE] [--careless]

With --careless it writes without a name of its own and believes in the newest version: what must not pass.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from swift_ft.errors import ServiceError
from swift_ft.state import MODES
from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved
from swift_ft.state.tree import split

STEPS, EVERY = 5, 2


class Alone:
    """The only process there is."""

    fenced = False

    def __init__(self, directory: Path) -> None:
        """Its generation is above those of all that was saved."""
        names = [path.name for path in directory.glob("v*/rank0/*g*-*")]
        self.entered = 1 + max((int(name.lstrip(".g").partition("-")[0]) for name in names), default=0)


def newest(store: CheckpointStore, *, careless: bool) -> dict[str, Any] | None:
    for version in reversed(store.versions()):
        try:
            state: dict[str, Any] = store.load(version)
        except ServiceError as error:
            if careless:
                raise
            print(f"version {version} is not taken: {error}", file=sys.stderr)
        else:
            return state
    return None


def failed(unsaved: Unsaved) -> None:
    raise SystemExit(f"version {unsaved.version} was not saved: {unsaved.reason}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--careless", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    directory = arguments.out / "job"
    store = CheckpointStore(directory, 0, Alone(directory))
    store._process = "0" * 8  # ckpt-chaos compares names with those of a run that was not killed
    torch.manual_seed(3)
    module = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(module.parameters())
    step = 0
    if (state := newest(store, careless=arguments.careless)) is not None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    print(f"resumed from step {step}", flush=True)
    if arguments.careless:
        with_name = Path.with_name
        Path.with_name = lambda self, name: with_name(self, name.removeprefix("."))  # type: ignore[method-assign]
        Path.rename = lambda self, _target: self  # type: ignore[method-assign, assignment]
    while step < STEPS:
        torch.manual_seed(step)
        loss = module(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            store.save(step, state, lambda _version: None, failed, sync=arguments.mode == "sync")
    store.close()
    tensors, _ = split({"module": module.state_dict(), "optimizer": optimizer.state_dict()})
    bits = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    (arguments.out / "final.txt").write_text(hashlib.sha256(bits).hexdigest())


if __name__ == "__main__":
    main()

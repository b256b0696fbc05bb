"""A process that saves a version in generation 2, then removes older ones. It may be killed."""

import threading

import torch

from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved
from tests.unit.checkpoint.holding import Holding


def state(version: int, generation: int) -> dict[str, object]:
    """Several parts of an upload."""
    generator = torch.Generator().manual_seed(100 * generation + version)
    return {"w": torch.randn(5 << 20, generator=generator), "version": version}


def failed(unsaved: Unsaved) -> None:
    raise SystemExit(unsaved.reason)


def main(url: str, version: int) -> None:
    store = CheckpointStore(url, 0, Holding(entered=2))
    store.save(version, state(version, 2), lambda _version: None, failed)
    store.wait()
    store.prune({version})
    for thread in threading.enumerate():
        if thread.name == "swift-prune":
            thread.join()

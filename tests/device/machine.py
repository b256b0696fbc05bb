"""The device that a test runs on: the simulated one, or CUDA, where `tests/gpu` calls the same functions."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from swift_ft.comm.backend import Fabric
from swift_ft.comm.message_collectives import MessageCircuit
from swift_ft.device import Accelerator, accelerator_of
from tests.device import simulated

BUSY_CYCLES = 1_000_000_000
"""A CUDA stream stands still by a kernel that takes about half a second."""
BUSY_S = 0.1
CONNECTED_WITHIN = timedelta(seconds=60)
LOOK_S = 0.05
"""For so long a test looks that something does not happen."""


def here(index: int = 0) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, index)


def accelerator() -> Accelerator:
    return accelerator_of(here())


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """A stream (the current one) stands still at this place until the end."""
    stream = stream or torch.accelerator.current_stream()
    if here().type == simulated.NAME:
        with simulated.held(stream):
            yield
        return
    with stream:
        torch.cuda._sleep(BUSY_CYCLES)
    event = stream.record_event()
    yield
    assert not event.query(), "the device was too quick for this test: raise BUSY_CYCLES"


def hold(stream: torch.Stream | None = None) -> Callable[[], None]:
    """A stream (the current one) stands still at this place; returns what lets it go on a little later."""
    stream = stream or torch.accelerator.current_stream()
    if here().type == simulated.NAME:
        release = simulated.hold(stream)
        return lambda: threading.Timer(BUSY_S, release).start()
    with stream:
        torch.cuda._sleep(BUSY_CYCLES)
    return lambda: None


def never(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until:
        assert not happened()
        time.sleep(0.002)


def together(*calls: Callable[[], None]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def connected(fabrics: Sequence[Fabric]) -> list[MessageCircuit]:
    """The circuits of one group, whose members are all in this process."""
    store, circuits = HashStore(), dict[int, Any]()

    def connect(own: int) -> None:
        made = fabrics[own].connect(store, own, len(fabrics), CONNECTED_WITHIN)
        circuits[own] = made.circuit(range(len(fabrics)), 0, f"all{own}")

    together(*(functools.partial(connect, own) for own in range(len(fabrics))))
    return [circuits[own] for own in range(len(fabrics))]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """What makes the host wait for the device raises. CUDA sees torch's own waits alone."""
    if here().type == simulated.NAME:
        with simulated.no_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""The device that a test runs on: the simulated one, or CUDA, where `tests/gpu` calls the same functions."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from swift_ft.device import Accelerator, device_of
from tests.device import simulated

BUSY_CYCLES = 1_000_000_000
"""A CUDA stream stands still by a kernel that takes about half a second."""
BUSY_S = 0.3


def here(index: int = 0) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, index)


def accelerator() -> Accelerator:
    there = device_of(here())
    assert isinstance(there, Accelerator)
    return there


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


def hold_for_a_while(stream: torch.Stream | None = None) -> None:
    """A stream (the current one) stands still at this place for at least `BUSY_S`."""
    stream = stream or torch.accelerator.current_stream()
    if here().type == simulated.NAME:
        threading.Timer(BUSY_S, simulated.hold(stream)).start()
        return
    with stream:
        torch.cuda._sleep(BUSY_CYCLES)


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

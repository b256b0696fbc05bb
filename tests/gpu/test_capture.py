"""The device path of the ring on a real CUDA device. Skipped where there is none: then nothing here is proven."""

import time
from collections.abc import Iterator

import pytest
import torch

from swift_ft.device import Cuda
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.train.boundary_log import DeviceCapture
from tests.unit.log.service import JOB, InProcess

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: the device path stays unproven"
    ),
]

TIMEOUT_S = 30.0
BUSY_CYCLES = 1_000_000_000  # about half a second
ELEMENTS = 1 << 20


class World:
    def __init__(self, server: InProcess) -> None:
        self.server = server
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.writer = SidecarWriter([server.address], JOB, 1, queue_bytes=64 << 20)
        self.capture = DeviceCapture(self.writer, Cuda(self.device))

    def record(self, step: int, tensor: torch.Tensor, now: bool = False) -> None:
        self.capture.record("s0.F", RecordKey(step, 0, 0), tensor, now=now, keep=False)

    def read(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        reader = LogReader([self.server.address], JOB)
        cursor = reader.follow("s0.F", 0)
        try:
            body = cursor.get(RecordKey(step, 0, 0), TIMEOUT_S, lambda: False).body
            return torch.frombuffer(bytearray(body), dtype=dtype)
        finally:
            cursor.close()
            reader.close()


@pytest.fixture
def world() -> Iterator[World]:
    with InProcess() as server:
        world = World(server)
        torch.cuda.synchronize()
        yield world
        world.writer.close(0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_bits_arrive(world: World, dtype: torch.dtype) -> None:
    tensors = [(torch.randn(ELEMENTS, device=world.device) * 1000).to(dtype) for _ in range(4)]
    for step, tensor in enumerate(tensors):
        world.record(step, tensor)
    world.capture.wait_copied()
    world.writer.flush(TIMEOUT_S)
    for step, tensor in enumerate(tensors):
        assert torch.equal(world.read(step, dtype), tensor.cpu())


def test_the_host_is_not_held_up_and_nothing_is_seen_before_it_is_there(world: World) -> None:
    tensor = torch.zeros(ELEMENTS, device=world.device)
    tensor += 0  # a kernel is loaded at its first call, for which the host waits for the device
    world.record(0, tensor)
    world.writer.flush(TIMEOUT_S)
    head = world.writer.copied
    busy = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    tensor += 7  # behind the work that takes long
    busy.record()
    began = time.monotonic()
    world.record(1, tensor)
    world.capture.wait_copied()
    took_s = time.monotonic() - began
    assert not busy.query(), "the device was too quick for this test: raise BUSY_CYCLES"
    assert took_s < 0.1
    assert world.writer.copied == head
    world.writer.flush(TIMEOUT_S)
    assert set(world.read(1, torch.float32).tolist()) == {7.0}


def test_what_follows_the_settling_may_overwrite_it(world: World) -> None:
    tensor = torch.ones(ELEMENTS, device=world.device)
    for step in range(8):
        world.record(step, tensor)
        world.capture.wait_copied()
        tensor.fill_(step + 2.0)
    world.writer.flush(TIMEOUT_S)
    for step in range(8):
        assert set(world.read(step, torch.float32).tolist()) == {step + 1.0}


def test_freed_memory_is_not_used_again_before_it_is_copied(world: World) -> None:
    torch.cuda._sleep(BUSY_CYCLES)
    for step in range(8):
        tensor = torch.full((ELEMENTS,), float(step), device=world.device)
        world.record(step, tensor, now=True)
        del tensor
        torch.full((ELEMENTS,), -1.0, device=world.device)
    world.writer.flush(TIMEOUT_S)
    for step in range(8):
        assert set(world.read(step, torch.float32).tolist()) == {float(step)}


def test_pinned_memory_is_given_back(world: World) -> None:
    world.record(0, torch.ones(4, device=world.device))
    world.writer.close()
    with InProcess() as server:
        again = World(server)
        again.record(0, torch.ones(4, device=world.device))
        again.writer.close()

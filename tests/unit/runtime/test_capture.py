"""A device's tensors into the ring: in which order the device is asked for what, with a device that is made up.

A "tensor on the device" is one on torch's meta device; what it holds, the made-up device knows.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.log import ring
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import Word
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.train.boundary_log import DeviceCapture
from tests.unit.log.service import JOB, InProcess, eventually

QUEUE_BYTES = 1 << 20
TIMEOUT_S = 10.0


class Event:
    def __init__(self, device: "Device", number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        self.device.calls.append(f"query {self.number}")
        return self.number in self.device.over


class Device:
    """Does nothing by itself: `arrive` lets the next copy take place."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.over: set[int] = set()
        self.pinned = 0
        self._copies: deque[tuple[int, torch.Tensor]] = deque()
        self._number = 0

    def pin(self, address: int, size: int) -> Callable[[], None]:
        assert address % 4096 == 0
        self.pinned += size
        self.calls.append("pin")

        def unpin() -> None:
            self.pinned -= size

        return unpin

    def new_stream(self) -> str:
        return "side"

    def copy_out(self, to: torch.Tensor, tensor: torch.Tensor, stream: str) -> None:
        assert (tensor.device.type, tensor.dtype, to.dtype) == ("meta", torch.uint8, torch.uint8)
        assert to.shape == tensor.shape
        assert stream == "side"
        self._number += 1
        self.calls.append(f"copy {self._number}")
        self._copies.append((self._number, to))

    def mark(self, stream: str) -> Event:
        assert stream == "side"
        self.calls.append(f"mark {self._number}")
        return Event(self, self._number)

    def hold(self, event: Event) -> None:
        self.calls.append(f"hold {event.number}")

    def arrive(self) -> None:
        number, to = self._copies.popleft()
        to.fill_(number)
        self.over.add(number)

    def said(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class World:
    def __init__(self, server: InProcess, **options: object) -> None:
        self.server = server
        self.writer = SidecarWriter([server.address], JOB, 1, queue_bytes=QUEUE_BYTES, **options)  # type: ignore[arg-type]
        self.device = Device()
        self.capture = DeviceCapture(self.writer, self.device)
        complete = self.capture._producer.complete

        def completed(end: int) -> None:
            self.device.calls.append("publish")
            complete(end)

        self.capture._producer.complete = completed  # type: ignore[method-assign]
        self.device.said()

    def record(self, step: int, elements: int = 16, now: bool = False) -> torch.Tensor:
        tensor = torch.empty(elements, dtype=torch.float32, device="meta")
        self.capture.record("s0.F", RecordKey(step, 0, 0), tensor, now=now, keep=False)
        return tensor

    def bodies(self, *steps: int) -> list[set[int]]:
        """What the log has of them: the bytes that occur in each."""
        reader = LogReader([self.server.address], JOB)
        cursor = reader.follow("s0.F", 0)
        try:
            return [set(cursor.get(RecordKey(s, 0, 0), TIMEOUT_S, lambda: False).body) for s in steps]
        finally:
            cursor.close()
            reader.close()


@pytest.fixture(params=["native", "plain"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "plain":
        monkeypatch.setenv(ring.ENV_OFF, "1")
        ring.library.cache_clear()
    elif ring.library() is None:
        pytest.skip("ring.cpp is not compiled here")
    with InProcess() as server:
        world = World(server)
        yield world
        while world.device._copies:
            world.device.arrive()
        world.writer.close(0.0)
    ring.library.cache_clear()


def test_the_training_path_asks_the_device_for_nothing_that_waits(world: World) -> None:
    world.record(0)
    assert world.device.said() == ["copy 1", "mark 1"]
    world.record(1)
    assert world.device.said() == ["query 1", "copy 2", "mark 2"]
    world.capture.wait_copied()
    assert world.device.said() == ["query 1", "hold 2"]
    world.device.arrive()
    world.capture.wait_copied()
    assert world.device.said() == ["query 1", "query 2", "publish", "hold 2"]
    world.device.arrive()
    world.capture.wait_copied()
    assert world.device.said() == ["query 2", "publish"]
    world.writer.flush(TIMEOUT_S)
    assert world.bodies(0, 1) == [{1}, {2}]


def test_a_record_is_in_the_ring_whole_or_not_at_all(world: World) -> None:
    head = world.writer.copied
    world.record(0)
    world.capture.record("s0.F", RecordKey(1, 0, 0), torch.ones(4, dtype=torch.uint8), now=True, keep=False)
    world.capture.wait_copied()
    assert world.writer.copied == head  # what is copied already stands behind what is not
    world.device.arrive()
    world.capture.wait_copied()
    eventually(lambda: world.writer.copied == world.writer._producer.reserved)
    world.writer.flush(TIMEOUT_S)
    assert world.bodies(0, 1) == [{1}, {1}]


def test_nothing_overtakes(world: World) -> None:
    """An event behind is over (it never is, in one stream): what lies before is waited for all the same."""
    head = world.writer.copied
    world.record(0)
    world.record(1)
    world.device._copies.rotate(-1)
    world.device.arrive()
    world.capture.wait_copied()
    assert world.writer.copied == head
    world.device.arrive()
    world.writer.flush(TIMEOUT_S)
    assert world.bodies(0, 1) == [{1}, {2}]


def test_what_may_change_after_the_call_is_held_at_once(world: World) -> None:
    tensor = world.record(0, now=True)
    assert world.device.said() == ["copy 1", "mark 1", "hold 1"]
    tensor.add_(1)
    world.capture.wait_copied()


def test_a_change_in_place_before_the_settling_is_said_and_one_after_it_is_fine(world: World) -> None:
    tensor = world.record(0)
    world.capture.wait_copied()
    tensor.add_(1)
    world.capture.wait_copied()
    tensor = world.record(1)
    tensor.add_(1)
    with pytest.raises(UsageError, match=r"^s0\.F step 1 .* changed in place"):
        world.capture.wait_copied()
    tensor = world.record(2)
    tensor.add_(1)
    for _ in range(3):
        world.device.arrive()
    world.capture.drop()  # a dropped step is waited for, and not judged


def test_a_flush_waits_for_the_device(world: World) -> None:
    world.record(0)
    timer = threading.Timer(0.2, world.device.arrive)
    timer.start()
    world.writer.flush(TIMEOUT_S)
    assert world.device.over == {1}
    assert world.bodies(0) == [{1}]


def test_a_full_ring_waits_for_the_device_too(world: World) -> None:
    """What fills it has to be published before it can leave."""
    elements = QUEUE_BYTES // 4 // 3
    for step in range(2):
        world.record(step, elements)
    arrived = threading.Event()

    def arrive() -> None:
        world.device.arrive()
        world.device.arrive()
        arrived.set()

    timer = threading.Timer(0.2, arrive)
    timer.start()
    world.record(2, elements)
    assert arrived.is_set()
    assert world.writer.stats.blocked_seconds > 0.1
    world.device.arrive()
    world.writer.flush(TIMEOUT_S)
    assert world.bodies(0, 1, 2) == [{1}, {2}, {3}]


def test_what_is_dropped_costs_the_device_nothing() -> None:
    with InProcess() as server:
        world = World(server, when_full="drop")
        elements = QUEUE_BYTES // 4 // 3
        for step in range(4):
            world.record(step, elements)
        said = world.device.said()
        assert [call for call in said if call.startswith("copy")] == ["copy 1", "copy 2"]
        assert world.writer.stats.dropped_records == 2
        world.device.arrive()
        world.device.arrive()
        world.writer.close()


def test_an_empty_tensor_has_nothing_to_copy(world: World) -> None:
    world.record(0, elements=0)
    assert world.device.said() == []
    world.writer.flush(TIMEOUT_S)
    assert world.bodies(0) == [set()]


def test_the_memory_is_given_back() -> None:
    with InProcess() as server:
        world = World(server)
        capacity = world.writer._memory.capacity
        assert world.device.pinned == capacity
        world.record(0)
        world.device.arrive()
        world.writer.close()
        assert world.device.pinned == 0
        assert world.writer.stats.records == 1


def test_a_writer_that_is_closed_without_a_flush_leaves_nothing_half(world: World) -> None:
    world.record(0)
    head = world.writer._memory.load(Word.HEAD)
    world.capture.wait_copied()
    assert world.writer._memory.load(Word.HEAD) == head

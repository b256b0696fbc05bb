"""The fake NCCL is as strict as it says, and a step looks for what an abort has left behind."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from swift_ft.comm.nccl import Queued
from swift_ft.comm.worker_thread import Broken
from swift_ft.device import Accelerator, Readings, current_accelerator
from tests.device import simulated
from tests.device.fake_nccl import GARBAGE, FakeNccl
from tests.device.test_torch_nccl import connected

A_WHILE_S = 0.2
TIMEOUT = timedelta(seconds=60)


def behind(message: Queued) -> torch.Event:
    """An event of a stream that is ordered behind the message."""
    stream = torch.Stream()
    with stream:
        message.wait()
        return stream.record_event()


def is_over(message: Queued) -> bool:
    event, deadline = behind(message), time.monotonic() + TIMEOUT.total_seconds()
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    return event.query()


def stands(message: Queued) -> bool:
    event = behind(message)
    time.sleep(A_WHILE_S)
    return not event.query()


def test_messages_pass_in_order_and_hold_the_streams_of_both_ends() -> None:
    ((source, target),) = connected(1)
    values, rooms = [torch.randn(5).to("simulated") for _ in range(3)], torch.zeros(3, 5, device="simulated")
    sends = [source.send(value) for value in values]
    assert stands(sends[0])
    first = target.recv(rooms[0])
    assert is_over(first)
    assert is_over(sends[0])
    assert stands(sends[1])
    last = [target.recv(room) for room in rooms[1:]][-1]
    last.wait()
    assert torch.equal(rooms.cpu(), torch.stack([value.cpu() for value in values]))
    early = target.recv(rooms[0])
    assert stands(early)
    FakeNccl().abort([source, target])


def test_an_abort_ends_what_is_under_way_and_leaves_garbage() -> None:
    ((source, target),) = connected(1)
    room = torch.zeros(3, device="simulated")
    received = target.recv(room)
    assert stands(received)
    FakeNccl().abort([source, target])
    received.wait()
    assert bytes(room.cpu().view(torch.uint8).tolist()) == bytes([GARBAGE]) * room.nbytes
    with pytest.raises(RuntimeError, match="NCCL"):
        target.recv(room)


def test_an_abort_of_only_some_waits() -> None:
    ends = [end for _, end in connected(2)]
    for end in ends:
        end.recv(torch.zeros(3, device="simulated"))
    first = threading.Thread(target=FakeNccl().abort, args=([ends[0]],))
    first.start()
    first.join(A_WHILE_S)
    assert first.is_alive()
    FakeNccl().abort([ends[1]])
    first.join(TIMEOUT.total_seconds())
    assert not first.is_alive()


class _Aborted:
    """Messages that an abort ends while the host waits for them. (`swift_ft.device.Arrivals`)"""

    flag = False

    def arriving(self) -> Accelerator:
        return current_accelerator()

    def begin_check(self) -> Callable[[], None]:
        return self.check_arrived

    def check_arrived(self) -> None:
        if self.flag:
            raise Broken("connection of an ended generation")


def test_a_step_looks_for_an_abort_once_its_messages_are_over() -> None:
    arrivals, readings, seen = _Aborted(), Readings(), list[float]()
    readings.arrivals = lambda: arrivals
    readings.later(torch.ones(1, device="simulated"), lambda read: seen.append(float(read)))
    readings.read()
    assert seen == [1.0]
    release = simulated.hold()
    readings.later(torch.ones(1, device="simulated"), lambda read: seen.append(float(read)))

    def abort() -> None:
        time.sleep(A_WHILE_S)
        arrivals.flag = True
        release()

    watcher = threading.Thread(target=abort)
    watcher.start()
    with pytest.raises(Broken):
        readings.read()
    watcher.join()
    assert seen == [1.0]

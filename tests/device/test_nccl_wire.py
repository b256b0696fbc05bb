"""What passes over communicators and what does not (`swift_ft.comm.nccl`): two members, both in this process, over the
stand-in for torch's class. Each mistake here ends in a deadlock or in garbage.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from swift_ft import events
from swift_ft.comm.backend import REROUTED, Collectives, Pending
from swift_ft.comm.gloo import Sockets
from swift_ft.comm.groups import CollectiveWork
from swift_ft.comm.message_collectives import MessageCircuit, operation
from swift_ft.comm.nccl import NcclBackend, NcclFabric
from swift_ft.comm.worker_thread import Broken
from swift_ft.device import Accelerator, Readings
from swift_ft.errors import UsageError
from tests.device.fake_nccl import GARBAGE, FakeNccl
from tests.device.machine import CONNECTED_WITHIN, connected, no_waits, together
from tests.patience import eventually

N = 1000
PATIENCE_S = 20.0


class _EachItsOwn(FakeNccl):
    """Members have devices of their own, although they are in one process."""

    _numbers = itertools.count()

    def __init__(self, obstacle: str = "", device: int | None = None) -> None:
        super().__init__()
        self._number = next(self._numbers) if device is None else device
        self._obstacle = obstacle

    def identity(self, device: Accelerator) -> str:
        return f"device {self._number}"

    def obstacle(self) -> str:
        return self._obstacle


class Members:
    def __init__(self) -> None:
        torch.zeros(1, device="simulated")
        self.fabrics = [NcclFabric(Sockets(tuple), _EachItsOwn()) for _ in range(2)]
        self.first, self.second = connected(self.fabrics)

    def abort(self) -> None:
        together(*(fabric.abort for fabric in self.fabrics))


@contextlib.contextmanager
def members() -> Iterator[Members]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        made = Members()
        try:
            yield made
        finally:
            made.abort()
            for fabric in made.fabrics:
                fabric.close()


def values(first: float) -> torch.Tensor:
    return torch.arange(float(N)) + first


def there(first: float) -> torch.Tensor:
    return values(first).to("simulated")


def room() -> torch.Tensor:
    return torch.zeros(N, device="simulated")


def finished(*messages: Pending) -> bool:
    """Waits for messages of one member as its streams do. Returns False if they stand still."""
    stream = torch.Stream()

    def wait() -> None:
        torch.accelerator.set_stream(stream)
        for message in messages:
            message.wait()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    event, deadline = stream.record_event(), time.monotonic() + PATIENCE_S
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not waiting.is_alive() and event.query()


def outcomes(*backends: NcclBackend) -> list[str | int]:
    """Connects members and returns what came of it for each: its error, or how many communicators it has."""
    torch.zeros(1, device="simulated")
    store, found = HashStore(), dict[int, str | int]()
    fabrics = [backend.open() for backend in backends]

    def connect(own: int) -> None:
        try:
            fabrics[own].connect(store, own, len(backends), CONNECTED_WITHIN)
            found[own] = len(fabrics[own]._communicators)
        except UsageError as error:
            found[own] = str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        together(*(functools.partial(connect, own) for own in range(len(backends))))
    together(*(fabric.abort for fabric in fabrics))
    for fabric in fabrics:
        fabric.close()
    return [found[own] for own in range(len(backends))]


def test_an_obstacle_is_an_error_at_the_start_and_none_in_a_recovery() -> None:
    able, unable = NcclBackend(tuple, _EachItsOwn()), NcclBackend(tuple, _EachItsOwn("set A=0"))
    assert outcomes(able, unable) == [0, "set A=0"]
    with pytest.MonkeyPatch.context() as patch:
        told: list[tuple[str, Any]] = []
        patch.setattr(events, "_listeners", (lambda event, fields: told.append((event, fields["reason"])),))
        assert outcomes(able, unable) == [0, 0]
        assert outcomes(able, NcclBackend(tuple, _EachItsOwn("set B=0"))) == [0, 0]  # a replacement
    assert outcomes(able, NcclBackend(tuple, _EachItsOwn())) == [2, 2]
    assert told == [("communicators_unused", "set A=0"), ("communicators_unused", "set B=0")]


def test_an_obstacle_is_none_where_no_member_has_a_device_of_its_own() -> None:
    alone, pair = _EachItsOwn("set A=0"), [_EachItsOwn("set A=0", device=7) for _ in range(2)]
    assert outcomes(NcclBackend(tuple, alone)) == [0]
    assert outcomes(*(NcclBackend(tuple, library) for library in pair)) == [0, 0]


def test_a_batch_of_sends_and_receives_does_not_wait_for_itself() -> None:
    with members() as m:
        rooms, tensors = (room(), room()), (there(1), there(2))
        with no_waits():
            sends = m.first.send([tensors[0]], 1, 0), m.second.send([tensors[1]], 0, 0)
            receives = m.first.recv([rooms[0]], 1, 0), m.second.recv([rooms[1]], 0, 0)
        assert finished(*sends, *receives)
        assert torch.equal(rooms[0].cpu(), values(2))
        assert torch.equal(rooms[1].cpu(), values(1))


def test_messages_with_tags_are_told_apart_whatever_their_order() -> None:
    with members() as m:
        one, other = room(), room()
        sends = [m.first.send([there(tag)], 1, REROUTED + tag) for tag in (1, 2)]
        receives = [m.second.recv([into], 0, REROUTED + tag) for tag, into in ((2, other), (1, one))]
        assert finished(*sends, *receives)
        assert torch.equal(one.cpu(), values(1))
        assert torch.equal(other.cpu(), values(2))


def test_a_receive_that_is_posted_ahead_holds_no_other_message_up() -> None:
    with members() as m:
        early, room_now = room(), room()
        ahead = m.second.recv([early], 0, REROUTED)
        now = m.second.recv([room_now], 0, 0)
        assert finished(m.first.send([there(1)], 1, 0), now)
        assert torch.equal(room_now.cpu(), values(1))
        assert finished(m.first.send([there(2)], 1, REROUTED), ahead)
        assert torch.equal(early.cpu(), values(2))


def test_what_an_aborted_message_still_writes_to_is_nobody_elses() -> None:
    with members() as m:
        into = room()
        m.second.recv([into], 0, 0)
        address = into.data_ptr()
        del into
        others = [torch.ones(N, device="simulated") for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
        m.abort()
        assert all(torch.equal(other.cpu(), torch.ones(N)) for other in others)


def test_a_step_that_computes_with_garbage_is_not_applied() -> None:
    with members() as m:
        readings, into, reads = Readings(), room(), list[torch.Tensor]()
        readings.arrivals = lambda: m.fabrics[1]
        m.second.recv([into], 0, 0).wait()  # in order of streams only
        readings.later(into * 1, reads.append)
        watcher = threading.Timer(0.2, m.abort)
        watcher.start()
        with contextlib.suppress(Broken):
            readings.read()
        watcher.join()
        assert not reads
        assert bytes(into.cpu()[:1].view(torch.uint8).tolist()) == bytes([GARBAGE]) * 4


def test_one_wait_covers_a_step_and_no_more() -> None:
    with members() as m:
        readings, into = Readings(), room()
        readings.arrivals = lambda: m.fabrics[1]
        sent = m.first.send([there(1)], 1, 0)
        posted = m.second.recv([into], 0, 0)
        sent.wait()
        readings.read()
        assert m.fabrics[1].arriving() is not None  # the stream is not behind that message
        posted.wait()
        readings.read()
        with no_waits():
            readings.read()
        assert m.fabrics[1].arriving() is None


def reducing(circuit: MessageCircuit, tensor: torch.Tensor) -> Callable[[], None]:
    """Begins a sum; returns what waits for it as DDP does, by a future that is made before the sum is queued."""
    begin = threading.Event()

    def run(collectives: Collectives) -> None:
        begin.wait()
        collectives.all_reduce(tensor, operation(None))

    work = CollectiveWork(circuit.submit(run), [tensor], broke=pytest.fail, swallow=False)
    future = work.get_future()
    begin.set()
    return lambda: future.wait() and None


def test_one_wait_covers_a_collective_that_is_waited_for_by_a_future() -> None:
    with members() as m:
        readings, tensors = Readings(), (there(1), there(2))
        readings.arrivals = lambda: m.fabrics[1]
        wait = reducing(m.second, tensors[1])
        eventually(lambda: m.fabrics[1].arriving() is not None)
        readings.read()
        assert m.fabrics[1].arriving() is not None  # its peer has yet to come
        reducing(m.first, tensors[0])()
        wait()
        readings.read()
        with no_waits():
            readings.read()
        assert m.fabrics[1].arriving() is None
        assert torch.equal(tensors[1].cpu(), values(1) + values(2))

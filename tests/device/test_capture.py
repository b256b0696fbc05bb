"""A device's tensors into the ring (`DeviceCapture`), whatever stream stands still: the bits of the moment of the call,
in the order of the calls, whole or not at all; and neither the host nor training waits.

On the simulated device here, on CUDA by tests/gpu.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swift_ft.device import Accelerator, Readings
from swift_ft.errors import ServiceError, UsageError
from swift_ft.log import ring
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import Word
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.train import boundary_log
from swift_ft.train.boundary_log import DeviceCapture
from tests.device.machine import accelerator, held, here, hold, never, no_waits
from tests.patience import eventually
from tests.unit.log.clients import following, reading
from tests.unit.log.service import JOB, InProcess

QUEUE_BYTES = 1 << 20
TIMEOUT_S = 30.0
N = 1 << 12
THIRD = QUEUE_BYTES // 4 // 3
"""Elements of which the ring holds two records and not three."""
RINGS = pytest.mark.parametrize("kind", ["native", "plain"])


class World:
    def __init__(self, **options: object) -> None:
        self.server = InProcess()
        self.writer = SidecarWriter([self.server.address], JOB, 1, queue_bytes=QUEUE_BYTES, **options)  # type: ignore[arg-type]
        self.capture = DeviceCapture(self.writer, accelerator())
        self.side: torch.Stream = self.capture._side

    def record(self, step: int, tensor: torch.Tensor, now: bool = False) -> None:
        self.capture.record("s0.F", RecordKey(step, 0, 0), tensor, now=now, keep=False)

    def read(self, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with reading(self.server) as reader, following(reader, "s0.F", 0) as cursor:
            body = cursor.get(RecordKey(step, 0, 0), TIMEOUT_S, lambda: False).body
            return torch.frombuffer(bytearray(body), dtype=dtype) if body else torch.empty(0, dtype=dtype)

    def has(self, *expected: torch.Tensor) -> bool:
        """After a flush: these, from step 0 on."""
        self.writer.flush(TIMEOUT_S)
        return all(torch.equal(self.read(step, host.dtype), host) for step, host in enumerate(expected))


@contextlib.contextmanager
def world(kind: str = "native", **options: object) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "plain":
            patch.setenv(ring.ENV_OFF, "1")
        ring.library.cache_clear()
        if kind == "native" and ring.library() is None:
            pytest.skip("ring.cpp is not compiled here")
        made = World(**options)
        try:
            yield made
        finally:
            made.writer.close(0.0)
            made.server.__exit__()
    ring.library.cache_clear()


def numbers(first: int = 0, size: int = N) -> torch.Tensor:
    return torch.arange(float(size)) + first


def there(first: int = 0, size: int = N) -> torch.Tensor:
    """On the device, and there already, as are the kernels: CUDA loads one at its first call, which waits."""
    tensor = numbers(first, size).to(here())
    for warm in (tensor.add_(0), tensor.clone().fill_(0), tensor * 2, torch.zeros(3, device=here())):
        del warm
    torch.accelerator.synchronize()
    return tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_what_the_device_has_yet_to_compute_arrives(dtype: str) -> None:
    with world() as w:
        tensors = [there(step).to(getattr(torch, dtype)) for step in range(3)]
        with no_waits(), held():
            for step, tensor in enumerate(tensors):
                w.record(step, tensor * 2)
            w.capture.wait_copied()
            never(w.side.query)
        assert w.has(*(numbers(step).to(getattr(torch, dtype)) * 2 for step in range(3)))


@RINGS
def test_the_host_is_not_held_up_and_nothing_is_seen_before_it_is_there(kind: str) -> None:
    with world(kind) as w:
        tensor = there()
        head = w.writer.copied
        with held(w.side):
            with no_waits():
                w.record(0, tensor)
                w.record(1, tensor)
            torch.accelerator.current_stream().synchronize()  # training is through, the copies are not
            with no_waits():
                w.record(2, tensor)
                w.capture.wait_copied()
                w.capture.wait_copied()
            assert w.writer.copied == head
        w.capture.finish()
        assert w.writer.copied == w.writer._producer.reserved
        assert w.has(*[numbers()] * 3)


@RINGS
def test_a_record_of_the_host_is_behind_those_of_the_device(kind: str) -> None:
    with world(kind) as w:
        tensor = there()
        head = w.writer.copied
        with held(w.side):
            w.record(0, tensor)
            w.record(1, torch.ones(4), now=True)
            w.capture.wait_copied()
            assert w.writer.copied == head  # what is copied already stands behind what is not
        w.capture.finish()
        eventually(lambda: w.writer.copied == w.writer._producer.reserved)
        assert w.has(numbers(), torch.ones(4))


def test_nothing_overtakes() -> None:
    """An event behind is over (it never is, in one stream): what lies before is waited for all the same."""
    with world() as w:
        tensor, other = there(), torch.Stream(device=here())
        head = w.writer.copied
        with held(other):
            with held(w.side):  # or the second call would publish the first record
                w.record(0, tensor)
                w.record(1, tensor)
                first = w.capture._under_way[0]
                w.capture._under_way[0] = first._replace(event=accelerator().mark(other))
            w.side.synchronize()
            w.capture.wait_copied()
            assert w.writer.copied == head
        assert w.has(numbers(), numbers())


def test_what_follows_the_settling_may_overwrite_it() -> None:
    with world() as w:
        tensor = there()
        with no_waits(), held(w.side):
            for step in range(4):
                w.record(step, tensor)
                w.capture.wait_copied()
                tensor.add_(1)
            never(torch.accelerator.current_stream().query)
        assert w.has(*(numbers(step) for step in range(4)))


def test_what_may_change_after_the_call_may_change_at_once() -> None:
    with world() as w:
        tensor = there()
        with held(w.side):
            with no_waits():
                for step in range(4):
                    w.record(step, tensor, now=True)
                    tensor.add_(1)
            torch.accelerator.current_stream().synchronize()  # training does not wait for the copies
        assert w.has(*(numbers(step) for step in range(4)))


@pytest.mark.parametrize("now", [False, True])
def test_freed_memory_is_not_used_again_before_it_is_copied(now: bool) -> None:
    with world() as w:
        made = [there(step) for step in range(4)]
        with held(w.side):
            while made:
                w.record(4 - len(made), made.pop(0), now=now)
                torch.zeros(N, device=here())
            w.capture.wait_copied()
            torch.zeros(N, device=here())
        assert w.has(*(numbers(step) for step in range(4)))


def test_a_tensor_with_gaps_is_packed_on_the_device() -> None:
    with world() as w:
        turned = there().view(64, 64).t()
        with no_waits(), held(w.side):
            w.record(0, turned)
            w.record(1, turned, now=True)
            w.capture.wait_copied()
            turned.fill_(-1)
        assert w.has(*[numbers().view(64, 64).t().reshape(-1)] * 2)


def test_a_change_in_place_before_the_settling_is_said_and_one_after_it_is_fine() -> None:
    with world() as w:
        tensor = there()
        with held(w.side):
            w.record(0, tensor)
            w.capture.wait_copied()
            tensor.add_(1)
            w.capture.wait_copied()
            w.record(1, tensor)
            tensor.add_(1)
            with pytest.raises(UsageError, match=r"^s0\.F step 1 .* changed in place"):
                w.capture.wait_copied()
            w.record(2, tensor)
            tensor.add_(1)
        w.capture.drop()  # a dropped step is waited for, and not judged
        assert w.writer.copied == w.writer._producer.reserved


def test_a_flush_waits_for_the_device() -> None:
    with world() as w:
        tensor = there()
        release_soon = hold(w.side)
        w.record(0, tensor)
        assert not w.side.query()
        release_soon()
        assert w.has(numbers())


@RINGS
def test_a_full_ring_waits_for_the_device_too(kind: str) -> None:
    """What fills it has to be published before it can leave."""
    with world(kind) as w:
        tensors = [there(step, THIRD) for step in range(3)]
        head = w.writer.copied
        release_soon = hold(w.side)
        for step in (0, 1):
            w.record(step, tensors[step])
        assert w.writer.copied == head
        release_soon()
        w.record(2, tensors[2])
        assert w.writer.copied > head
        assert w.writer.stats.blocked_seconds > 0
        assert w.has(*(numbers(step, THIRD) for step in range(3)))


def test_what_is_dropped_is_not_copied() -> None:
    with world(when_full="drop") as w:
        tensor = there(0, THIRD)
        with held(w.side):
            for step in range(4):
                w.record(step, tensor)
            assert len(w.capture._under_way) == 2
        assert w.has(*[numbers(0, THIRD)] * 2)
        assert w.writer.stats.dropped_records == 2


def test_an_empty_tensor_has_nothing_to_copy() -> None:
    with world() as w:
        with held(w.side):
            w.record(0, torch.empty(0, device=here()))
            assert not w.capture._under_way
        assert w.has(torch.empty(0))


def test_the_ring_is_pinned_until_the_writer_is_closed() -> None:
    tensor = there()
    for _ in range(2):
        with world() as w:
            unpinned, unpin = list[bool](), w.capture._unpin
            w.capture._unpin = lambda unpinned=unpinned, unpin=unpin: unpinned.append(unpin() is None)
            with no_waits():
                w.record(0, tensor)
            w.writer.close()
            assert w.writer.stats.records == 1
            assert unpinned


def test_a_writer_that_is_closed_without_a_flush_leaves_nothing_half() -> None:
    with world() as w:
        tensor = there()
        with held(w.side):
            head = w.writer._memory.load(Word.HEAD)
            w.record(0, tensor)
            w.capture.wait_copied()
            assert w.writer._memory.load(Word.HEAD) == head


class Cut:
    """An abort ends messages. (`swift_ft.device.Arrivals`)"""

    ended = covered = False

    def arriving(self) -> Accelerator | None:
        return None if self.covered else accelerator()

    def begin_check(self) -> Callable[[], None]:
        return self.check_arrived

    def check_arrived(self) -> None:
        if self.ended:
            raise RuntimeError("ended")


@RINGS
def test_what_an_abort_has_left_is_not_logged_and_what_was_checked_before_is(kind: str) -> None:
    readings, cut = Readings(), Cut()
    readings.arrivals = lambda: cut
    with world(kind) as w:
        w.capture._wholeness = readings.wholeness
        tensors = [there(step) for step in range(4)]
        release = hold(w.side)  # copies are late
        with no_waits():
            w.record(0, tensors[0])
        readings.read()
        release_training = hold()
        with no_waits():
            w.record(1, tensors[1])
            w.record(2, tensors[2])
            cut.ended = True  # before the kernels end
        release()
        release_training()
        w.capture.finish()
        assert w.has(numbers(0))
        assert w.writer.stats.records == 1
        readings.arrivals = Cut  # of the next generation
        w.record(1, tensors[3])
        assert w.has(numbers(0), numbers(3))
        assert w.writer.stats.records == 2


def test_what_no_message_was_under_way_for_is_whole_whatever_is_aborted() -> None:
    """So is all that a rank computes without communicators, whose stage may read nothing in a whole step."""
    readings, cut = Readings(), Cut()
    readings.arrivals = lambda: cut
    with world() as w:
        w.capture._wholeness = readings.wholeness
        tensor, cut.covered = there(), True
        release = hold(w.side)
        w.record(0, tensor)
        readings.read()
        cut.covered, cut.ended = False, True  # what arrives later is aborted
        release()
        w.capture.finish()
        assert w.has(numbers(0))


SHORT_S = 0.02
"""For the minute that a copy may take."""


@contextlib.contextmanager
def held_for_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, held():
        patch.setattr(boundary_log, "_COPIED_WITHIN_S", SHORT_S)
        yield


def test_a_kernel_that_never_ends_is_not_waited_for_without_end() -> None:
    with world() as w, ThreadPoolExecutor(1) as pool:
        tensor = there()
        with held_for_long():
            w.record(0, tensor)
            finished = pool.submit(w.capture.finish)
            with pytest.raises(ServiceError, match="has not copied a tensor"):
                finished.result(TIMEOUT_S)


def test_a_message_is_waited_for_until_an_abort_is_asked_for() -> None:
    readings, cut = Readings(), Cut()
    readings.arrivals = lambda: cut
    with world() as w, ThreadPoolExecutor(1) as pool:
        w.capture._wholeness = readings.wholeness
        tensor = there()
        with held_for_long():
            w.record(0, tensor)
            finished = pool.submit(w.capture.finish)
            never(finished.done)
            cut.ended = True
            with pytest.raises(ServiceError, match="has not copied a tensor"):
                finished.result(TIMEOUT_S)


def test_a_writer_that_is_closed_waits_for_no_peer() -> None:
    readings = Readings()
    readings.arrivals = Cut
    with world() as w, ThreadPoolExecutor(1) as pool:
        w.capture._wholeness = readings.wholeness
        tensor, unpin = there(), w.capture._unpin
        w.capture._unpin = lambda: None
        with held_for_long():
            w.record(0, tensor)
            pool.submit(w.capture.stop_writing).result(TIMEOUT_S)
        w.side.synchronize()
        unpin()
        w.writer._borrower = None

"""The ring: whole records, in order, whatever their sizes; and nothing else."""

import ctypes
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import ServiceError, UsageError
from swift_ft.log import ring
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import (
    ALIGN,
    HEADER_BYTES,
    Consumer,
    Memory,
    Producer,
    RingEntry,
    Word,
    body_at,
    header_of,
    producer,
)
from tests.integration.logserver_world import REPOSITORY

CAPACITY = 1 << 18


@pytest.fixture(params=["native", "plain"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(ring, "library", lambda: None)
    elif ring.library() is None:
        pytest.skip("ring.cpp is not compiled here")
    return str(request.param)


WITHOUT_THREADS = """\
import os, resource
from swift_ft.log.ring import NativeProducer, Memory
memory, wake = Memory.create(1 << 16), os.eventfd(0)
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 20)  # less than a thread's stack takes
resource.setrlimit(resource.RLIMIT_AS, (most, most))
NativeProducer(memory, wake)
"""


def test_a_process_that_can_have_no_thread_more_is_told() -> None:
    if ring.library() is None:
        pytest.skip("ring.cpp is not compiled here")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert "ServiceError: 65536 bytes for the log's queue cannot be mapped, or no thread" in done.stderr
    assert done.returncode == 1


class World:
    """Both ends in one process."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.memory = Memory.create(capacity)
        self.wake = os.eventfd(0, os.EFD_CLOEXEC)
        self.producer: Producer = producer(self.memory, self.wake)
        self.consumer = Consumer(self.memory, self.wake)
        self.memory.set_stream(0, "s0.F")

    def push(self, body: bytes, number: int = 0, now: bool = False) -> int:
        header = header_of(0, RecordKey(number, 1, 2), "uint8", (len(body),), len(body))
        return self.producer.push(header, address_of(body), len(body), now)

    def close(self) -> None:
        self.producer.close()
        os.close(self.wake)
        self.memory.close()


def address_of(body: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p).value or 0


@pytest.fixture
def world(kind: str) -> Iterator[World]:
    world = World()
    yield world
    world.close()


def taken(consumer: Consumer) -> RingEntry | None:
    """The next record, past any padding."""
    entry = consumer.next()
    while isinstance(entry, int):
        entry = consumer.next()
    return entry


def one_of(consumer: Consumer) -> RingEntry:
    entry = taken(consumer)
    assert entry is not None
    return entry


def body_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(min(size, 1024)) * (size // 1024 + 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 200),
            st.integers(0, CAPACITY - HEADER_BYTES),
            st.sampled_from([0, ALIGN, 64 << 10, (64 << 10) + 1, CAPACITY - HEADER_BYTES]),
        ),
        min_size=1,
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("native", [True, False])
def test_records_of_all_sizes_come_out_whole_and_in_order(
    native: bool, sizes: list[int], chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(ring, "library", lambda: None)
        elif ring.library() is None:
            pytest.skip("ring.cpp is not compiled here")
        world = World()
        waiting = deque(enumerate(sizes))
        sent: deque[tuple[int, bytes]] = deque()  # and not read
        read: deque[int] = deque()  # and not released
        while waiting or sent:
            if waiting and chance.random() < 0.6:
                number, size = waiting[0]
                body = body_of(number, size)[:size]
                end = world.push(body, number, now=chance.random() < 0.5)
                if end >= 0:
                    waiting.popleft()
                    sent.append((number, body))
                    assert end <= world.memory.load(Word.TAIL) + world.memory.capacity
                    continue
                # No room: as much as this takes is in use, or the way round wastes it.
                world.producer.wait(world.producer.reserved)
                head = world.memory.load(Word.HEAD)
                used = head - world.memory.load(Word.TAIL)
                room = world.memory.capacity - used
                position = head % world.memory.capacity
                assert (
                    room < HEADER_BYTES + size + ALIGN
                    or position + HEADER_BYTES + size > world.memory.capacity
                )
                assert sent or read or used, "an empty ring takes any record"
            world.producer.wait(world.producer.reserved)
            entry = world.consumer.next()
            if isinstance(entry, RingEntry):
                number, body = sent.popleft()
                assert (entry.key, entry.dtype, entry.shape) == (
                    RecordKey(number, 1, 2),
                    "uint8",
                    (len(body),),
                )
                assert (entry.sequence(0), entry.sequence(1)) == (-1, -1)
                assert entry.body.nbytes == len(body)
                assert bytes(entry.body) == body
                assert ctypes.addressof(ctypes.c_char.from_buffer(world.memory.data)) % ALIGN == 0
                assert (entry.at + HEADER_BYTES) % ALIGN == 0
                read.append(entry.end)
            elif entry is not None:
                read.append(entry)
            idle, entry = entry is None, None
            if read and (idle or chance.random() < 0.7):
                world.consumer.release(read.popleft())
        assert world.consumer.next() is None
        world.close()


def test_a_consumer_begins_at_the_tail_and_finds_the_sequences(world: World) -> None:
    for number in range(5):
        assert world.push(b"%d" % number, number) > 0
    entries = [taken(world.consumer) for _ in range(5)]
    for number, entry in enumerate(entries[:3]):
        assert entry is not None
        entry.set_sequence(0, 40 + number)
        entry.set_sequence(1, 70 + number)
    assert entries[0] is not None
    world.consumer.release(entries[0].end)
    successor = Consumer(world.memory, world.wake)
    again = [taken(successor) for _ in range(4)]
    assert [(e.key.step, e.sequence(0), e.sequence(1), bytes(e.body)) for e in again if e] == [
        (1, 41, 71, b"1"),
        (2, 42, 72, b"2"),
        (3, -1, -1, b"3"),
        (4, -1, -1, b"4"),
    ]
    assert successor.next() is None
    world.memory.set_acked(0, 0, 41)
    assert (world.memory.stream(0), world.memory.acked(0, 0), world.memory.acked(0, 1)) == ("s0.F", 41, -1)
    with pytest.raises(UsageError, match="more than 480 streams"):
        world.memory.set_stream(ring.STREAMS_MAX, "x")
    del entries, entry, again


def test_a_copy_is_cleared_for_another_server_and_kept_for_the_same(world: World) -> None:
    memory = world.memory
    assert memory.assign([1, 2], world.consumer.unread_records()) == {1: 0, 2: 1}
    for number in range(3):
        assert world.push(b"%d" % number, number) > 0
    held = world.consumer.unread_records()
    assert [entry.key.step for entry in held] == [0, 1, 2]
    assert world.consumer.position == 0

    def sequences() -> list[tuple[int, int]]:
        return [(entry.sequence(0), entry.sequence(1)) for entry in world.consumer.unread_records()]

    for number, entry in enumerate(held[:2]):
        entry.set_sequence(0, 40 + number)
        entry.set_sequence(1, 70 + number)
    memory.set_acked(0, 0, 40)
    memory.set_acked(0, 1, 70)
    assert memory.assign([2, 1], world.consumer.unread_records()) == {1: 0, 2: 1}
    assert sequences() == [(40, 70), (41, 71), (-1, -1)]
    # The first one is lost; it is used again later, emptied: it is not the same any more.
    assert memory.assign([2, 3], world.consumer.unread_records()) == {2: 1, 3: 0}
    assert sequences() == [(-1, 70), (-1, 71), (-1, -1)]
    assert (memory.acked(0, 0), memory.acked(0, 1)) == (-1, 70)
    assert memory.assign([3], world.consumer.unread_records()) == {3: 0}
    assert sequences() == [(-1, -1)] * 3
    assert memory.assign([3, 4], world.consumer.unread_records()) == {3: 0, 4: 1}
    del held, entry


def test_nothing_is_seen_before_it_is_whole_and_order_is_kept(kind: str) -> None:
    """Large bodies are copied later than small ones are pushed: these wait for them."""
    world = World(16 << 20)
    bodies = [bytes([number]) * (4 << 20) for number in range(4)]
    for number in range(100):
        large = bodies[number % 4]
        end = world.push(large, number)
        small = world.push(b"small", number)
        assert 0 < end < small
        while (entry := taken(world.consumer)) is None:
            pass
        assert entry.body[-1] == number % 4  # what is copied last is looked at first
        assert bytes(entry.body) == large
        while (entry := taken(world.consumer)) is None:
            pass
        assert bytes(entry.body) == b"small"
        world.consumer.release(entry.end)
    del entry
    world.close()


def place(world: World, number: int, size: int) -> int:
    """A record whose body is still to be written."""
    header = header_of(0, RecordKey(number, 1, 2), "uint8", (size,), size)
    return world.producer.push(header, 0, size, False)


def write(world: World, end: int, body: bytes) -> None:
    at = body_at(world.memory, end, len(body))
    world.memory.data[at : at + len(body)] = body


def test_bodies_that_somebody_else_writes_come_out_in_order_and_not_before_they_are_complete(
    world: World,
) -> None:
    """Round and round the ring, with others between them."""
    for number in range(40):
        body = body_of(number, 30 << 10)
        first, second = place(world, 4 * number, len(body)), place(world, 4 * number + 1, len(body))
        small = world.push(b"small", 4 * number + 2)
        large = world.push(bytes(100 << 10), 4 * number + 3)
        assert 0 < first < second < small < large
        write(world, second, body[::-1])
        assert taken(world.consumer) is None
        write(world, first, body)
        world.producer.complete(first)
        world.producer.wait(first)
        entry = one_of(world.consumer)
        assert (entry.key.step, bytes(entry.body)) == (4 * number, body)
        assert taken(world.consumer) is None
        world.producer.complete(second)
        world.producer.wait(large)
        found = [taken(world.consumer) for _ in range(3)]
        assert [one.key.step for one in found if one] == [4 * number + n for n in (1, 2, 3)]
        assert bytes(found[0].body) == body[::-1] if found[0] else False
        world.consumer.release(large)
    del entry, found


def test_a_body_that_never_comes_is_never_seen(kind: str) -> None:
    world = World()
    world.push(b"before")
    place(world, 1, 100)
    world.push(b"behind", 2)
    world.producer.close()  # does not wait for it
    entry = one_of(world.consumer)
    assert bytes(entry.body) == b"before"
    assert taken(world.consumer) is None
    del entry
    world.close()


def test_bodies_of_many_pieces_are_whole_when_a_wait_is_over(kind: str) -> None:
    """Who waits copies beside the copier: every piece once, and none after the wait."""
    world, chance = World(16 << 20), random.Random(0)
    for number in range(1000):
        wanted = [body_of(2 * number + n, chance.randrange(100 << 10, 1 << 20)) for n in range(2)]
        bodies = [bytearray(body) for body in wanted]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(body)) for body in bodies]
        for n, body in enumerate(bodies):
            header = header_of(0, RecordKey(number, n, 0), "uint8", (len(body),), len(body))
            assert world.producer.push(header, addresses[n], len(body), False) > 0
        world.producer.wait(world.producer.reserved)
        ctypes.memset(addresses[1], 0, len(bodies[1]))  # at once, while a piece may be on its way
        ctypes.memset(addresses[0], 0, len(bodies[0]))
        for n in range(2):
            entry = one_of(world.consumer)
            assert (entry.key.microbatch, bytes(entry.body)) == (n, wanted[n])
            world.consumer.release(entry.end)
        del entry
    world.close()


def test_now_is_now(world: World) -> None:
    body = bytearray(b"\1" * (200 << 10))
    address = ctypes.addressof(ctypes.c_char.from_buffer(body))
    header = header_of(0, RecordKey(0, 0, 0), "uint8", (len(body),), len(body))
    world.producer.push(header, address, len(body), True)
    body[:] = b"\2" * len(body)
    world.producer.wait(world.producer.reserved)
    entry = one_of(world.consumer)
    assert set(entry.body) == {1}


def test_a_sleeping_consumer_is_woken(world: World) -> None:
    woken = threading.Event()

    def sleep() -> None:
        world.consumer.sleep(30.0)
        woken.set()

    for _ in range(20):
        woken.clear()
        thread = threading.Thread(target=sleep)
        thread.start()
        while not world.memory.load(Word.WAKE_AT):
            time.sleep(0.0005)
        assert not woken.is_set()
        assert world.push(b"x") > 0
        assert woken.wait(5.0)
        thread.join()
        entry = one_of(world.consumer)
        world.consumer.release(entry.end)
        del entry


def test_a_consumer_that_wants_more_sleeps_until_it_is_there(world: World) -> None:
    pushed, woken = 0, threading.Event()
    enough = 3 * HEADER_BYTES

    def sleep() -> None:
        world.consumer.sleep(30.0, enough)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    while not world.memory.load(Word.WAKE_AT):
        time.sleep(0.0005)
    while world.consumer.unread < enough:
        assert not woken.wait(0.02)
        assert world.push(b"x") > 0
        pushed += 1
    assert woken.wait(5.0)
    thread.join()
    assert pushed > 1


def test_other_memory_is_no_ring() -> None:
    fd = os.memfd_create("x")
    os.ftruncate(fd, ring.CONTROL_BYTES + CAPACITY)
    with pytest.raises(ServiceError, match="not a ring"):
        Memory(fd)
    os.close(fd)


def test_a_machine_that_cannot_have_a_ring_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give a smaller log_queue_bytes"):
        Memory.create(1 << 62)
    with monkeypatch.context() as patched:
        patched.setattr(ring, "library", lambda: None)
        patched.setattr(platform, "machine", lambda: "aarch64")
        with pytest.raises(
            UsageError, match=r"on aarch64 processors; install a C\+\+ compiler, then swift-ft again"
        ):
            Memory.create(CAPACITY)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match="memfd_create, which this system does not have; use Linux"):
        Memory.create(CAPACITY)


PUSHER = """
import ctypes, itertools, sys
from swift_ft.log import ring
from swift_ft.log.record import RecordKey
if sys.argv[3] == "plain": ring.library = lambda: None
memory = ring.Memory(int(sys.argv[1]))
producer = ring.producer(memory, int(sys.argv[2]))
size = 3 << 20
bodies = [ctypes.create_string_buffer(bytes([n]) * size, size) for n in range(4)]
print("ready", flush=True)
for number in itertools.count():
    header = ring.header_of(0, RecordKey(number, 0, 0), "uint8", (size,), size)
    while producer.push(header, ctypes.addressof(bodies[number % 4]), size, False) < 0: pass
"""


@pytest.mark.parametrize("seed", range(12))
def test_a_killed_producer_leaves_whole_records_only(kind: str, seed: int) -> None:
    memory = Memory.create(16 << 20)
    wake = os.eventfd(0)
    with subprocess.Popen(
        [sys.executable, "-c", PUSHER, str(memory.fd), str(wake), kind],
        pass_fds=(memory.fd, wake),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        consumer = Consumer(memory, wake)
        number = 0

        def look() -> bool:
            nonlocal number
            entry = taken(consumer)
            if entry is None:
                return False
            assert entry.key.step == number
            assert bytes(entry.body) == bytes([number % 4]) * entry.body.nbytes
            number += 1
            consumer.release(entry.end)
            return True

        while not look():
            pass
        deadline = time.monotonic() + random.Random(seed).random() * 0.03
        while time.monotonic() < deadline:
            look()
        process.send_signal(signal.SIGKILL)
        process.wait()
        while look():
            pass
        assert number > 0
    os.close(wake)
    memory.close()

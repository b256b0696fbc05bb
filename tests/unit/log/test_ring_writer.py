"""Records of a step go out together, and at once where somebody waits for them."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from swift_ft.log import sidecar
from swift_ft.log.reader import Holdings, LogReader
from swift_ft.log.ring import Memory, Word, header_of, producer
from swift_ft.log.sender_core import BATCH_BYTES
from swift_ft.log.sidecar import RingWriter
from tests.log_client import Writer, close_links
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, key, rank_writing
from tests.unit.log.service import JOB, InProcess

BODY = b"\7" * 100


@pytest.fixture(autouse=True)
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered goes out for a reason, or the test takes too long."""
    monkeypatch.setattr(sidecar, "GATHER_S", 1e6)


class Pumped:
    """A RingWriter and what a trainer has of it, in one process."""

    def __init__(
        self, running: InProcess, capacity: int = 1 << 20, *, resumed: bool = False, by_itself: bool = True
    ) -> None:
        self._over = threading.Event()
        self.memory, self.wake = Memory.create(capacity), os.eventfd(0)
        self.memory.set_stream(0, "s0.F")
        self.producer = producer(self.memory, self.wake)
        self.batches: list[int] = []
        handle = running.engine.handle

        def counted(session: object, frames: memoryview, shared: bytes) -> None:
            self.batches.append(len(frames) + len(shared))
            handle(session, frames, shared)  # type: ignore[arg-type]

        running.engine.handle = counted  # type: ignore[method-assign, assignment]
        self.writer = RingWriter(
            self.memory,
            self.wake,
            lambda _: None,
            over=self._over.is_set,
            servers={running.address: 1},
            job=JOB,
            generation=1,
            resumed=resumed,
        )
        self._thread = threading.Thread(target=self._pump)
        if by_itself:
            self._thread.start()
            eventually(lambda: self.memory.load(Word.WAKE_AT))

    def _pump(self) -> None:
        while not self._over.is_set():
            self.writer.pump()

    def put(self, step: int, body: bytes = BODY) -> int:
        header = header_of(0, key(step), "uint8", (len(body),), len(body))
        view = ctypes.create_string_buffer(body)
        return self.producer.push(header, ctypes.addressof(view), len(body), True)

    @property
    def tail(self) -> int:
        return self.memory.load(Word.TAIL)

    def close(self) -> None:
        self._over.set()
        self.writer.want(1 << 62)
        if self._thread.ident is not None:
            self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        close_links(self.writer)
        self.producer.close()
        os.close(self.wake)


@contextmanager
def pumped(capacity: int = 1 << 20) -> Iterator[Pumped]:
    with InProcess() as running:
        found = Pumped(running, capacity)
        try:
            yield found
        finally:
            found.close()


def test_records_of_a_step_go_out_together() -> None:
    with pumped() as one:
        for step in range(20):
            end = one.put(step)
        time.sleep(0.2)  # for a sidecar that does not gather
        assert not one.batches
        one.memory.store(Word.FLOOR_AT, end)  # as the trainer does at the end of a step
        os.eventfd_write(one.wake, 1)
        eventually(lambda: one.tail == end)
        assert len(one.batches) <= 3


def test_who_flushes_does_not_wait_for_others_of_the_step() -> None:
    with pumped() as one:
        end = one.put(0)
        one.writer.flush_to(end, TIMEOUT_S)
        one.writer.want(one.put(1))  # said before it is looked at
        eventually(lambda: one.tail == one.memory.load(Word.HEAD))


def test_a_replay_does_not_gather() -> None:
    with pumped() as one:
        one.memory.store(Word.URGENT, 1)
        os.eventfd_write(one.wake, 1)  # as the trainer does
        for step in range(3):
            end = one.put(step)
            eventually(lambda end=end: one.tail == end)  # type: ignore[misc]


def test_much_goes_out_by_itself() -> None:
    with pumped() as one:
        for step in range(3):
            end = one.put(step, b"\1" * (100 << 10))  # a quarter of the ring is enough
        eventually(lambda: one.tail == end)


def test_a_trainer_that_waits_for_room_does_not_wait_for_itself() -> None:
    with pumped() as one:
        end = one.put(0)
        one.memory.store(Word.PRODUCER_WAITS, 1)
        os.eventfd_write(one.wake, 1)  # as the trainer does
        eventually(lambda: one.tail == end)


def test_one_that_never_catches_up_pauses_after_each_batch_and_forgets_old_steps() -> None:
    with InProcess() as running, closing(Pumped(running, 8 << 20, by_itself=False)) as one:

        def put(step: int) -> int:
            end = one.put(step, b"\1" * BATCH_BYTES)
            one.memory.store(Word.FLOOR_AT, end)  # as the trainer does at the end of a step
            one.memory.store(Word.FLOOR, step + 1)
            return end

        ends = [put(step) for step in range(3)]
        for step in range(3):
            one.writer.pump()
            assert one.writer._consumer.position == ends[step]
            ends.append(put(step + 3))
        assert one.writer._known == {"s0.F": {}}
        for _ in range(3):
            one.writer.pump()
        eventually(lambda: (one.writer.changed(), one.tail == ends[-1])[1])


def test_what_is_left_of_a_batch_is_not_gathered_again() -> None:
    with InProcess() as running, closing(Pumped(running, 16 << 20, by_itself=False)) as one:
        ends = [one.put(step, b"\1" * BATCH_BYTES) for step in range(4)]
        for end in ends:
            one.writer.pump()
            assert one.writer._consumer.position == end


def test_a_successor_is_patient_with_a_server_that_does_not_say_what_it_has_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holdings, troubles = LogReader.holdings, []
    with InProcess() as running:
        with rank_writing(running) as writer:
            for step in range(6):
                writer.append("s0.F", key(step), "uint8", (5,), bytes(5))
            writer.flush(TIMEOUT_S)
        running.engine.administration.trim(JOB, 4)
        with closing(Pumped(running, resumed=True, by_itself=False)) as one:

            def silent(*args: Any, **options: Any) -> Holdings | None:
                troubles.append(one.writer.trouble())
                return holdings(*args, **options) if len(troubles) > 3 else None

            monkeypatch.setattr(LogReader, "holdings", silent)
            one.memory.store(Word.URGENT, 1)
            one.put(6)
            one.writer.pump()
            assert troubles == [None] * 4
            assert one.writer.trouble() is None


def test_who_replays_or_may_drop_records_does_not_gather() -> None:
    with InProcess() as running:
        with rank_writing(running, when_full="drop") as writer:
            assert writer._memory.load(Word.URGENT) == 1
        with rank_writing(running) as writer:
            for keep in (False, True, False):
                writer.append("s0.F", key(int(keep)), "uint8", (5,), bytes(5), keep=keep)
                assert writer._memory.load(Word.URGENT) == keep


@pytest.mark.parametrize(
    "done",
    [
        lambda writer: writer.forget_below(1),  # at the end of a step
        lambda writer: writer.append("s0.F", key(0), "uint8", (5,), bytes(5), keep=True),  # in a replay
    ],
    ids=["the end of a step", "a replay"],
)
def test_the_trainer_wakes_the_sidecar_for(
    done: Callable[[Writer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with InProcess() as running, rank_writing(running) as writer:
        write, written = os.eventfd_write, []
        monkeypatch.setattr(os, "eventfd_write", lambda fd, value: (written.append(fd), write(fd, value))[1])
        done(writer)
        assert writer._wake in written


def test_the_ring_says_when_the_trainer_has_renewed_its_lease() -> None:
    with InProcess() as running:
        with rank_writing(running) as writer:
            writer.renewed(2.5)
            assert writer._memory.load(Word.RENEWED) == 2_500_000_000
        writer.renewed(3.0)  # the lease's thread does not know that it is closed

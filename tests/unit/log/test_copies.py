"""A stream on two servers: both have it before it counts as durable; one is lost, comes back, is replaced."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swift_ft.errors import LogUnavailable, RecordCorrupt, RecordMissing, ServiceError, UsageError
from swift_ft.launch.standalone import free_port
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, never
from swift_ft.log.ring import ALIGN, HEADER_BYTES
from swift_ft_services.logserver.service import make_server
from swift_ft_services.program import Protection
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, Gate, following, key, reading
from tests.unit.log.clients import rank_writing as writing
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess

STREAM = "s0.F"
NOBODY = "127.0.0.1:1"
RECORD_BYTES = HEADER_BYTES + ALIGN
"""What one of `put` takes of the ring."""


def put(writer: Writer, step: int, value: int = 0) -> None:
    writer.append(STREAM, key(step), "uint8", (4,), bytes([value or step] * 4))


def steps_of(server: InProcess) -> list[int]:
    """What it has, and each record once."""
    with reading(server) as reader:
        found = sorted(record.step for record in reader.digests(STREAM, 0, cancelled=never))
    there = {s.stream: s.records for s in admin.inventory(server.address, JOB, TIMEOUT_S)}
    assert there.get(STREAM, 0) >= len(found)
    return found


def put_all(writer: Writer, *steps: int) -> None:
    for step in steps:
        put(writer, step)


def make_durable(writer: Writer, *steps: int) -> None:
    put_all(writer, *steps)
    writer.flush(TIMEOUT_S)


def fence(generation: int, *servers: InProcess) -> None:
    for server in servers:
        server.engine.administration.fence(JOB, generation)


def flip(server: InProcess, step: int) -> None:
    """A bit of that record's body."""
    assert isinstance(server.storage, MemoryStorage)
    frames = server.storage.frames[JOB, STREAM]
    data = bytearray(frames[step])
    data[-1] ^= 1
    frames[step] = bytes(data)


def cut_off(server: InProcess) -> None:
    """Nobody can speak to it any more; what it holds is left."""
    server.server.stop(0).wait()


@contextmanager
def back(server: InProcess) -> Iterator[None]:
    """It serves again, under the address it had."""
    again, _ = make_server(server.engine)
    assert again.add_insecure_port(server.address) > 0
    again.start()
    try:
        yield
    finally:
        again.stop(0).wait()


@pytest.fixture
def one() -> Iterator[InProcess]:
    with InProcess(protection=Protection(listen=f"127.0.0.1:{free_port()}")) as running:
        yield running


@pytest.fixture
def two() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running


def values(reader: LogReader, steps: range) -> list[int]:
    with following(reader, STREAM, steps.start) as cursor:
        return [cursor.get(key(step), TIMEOUT_S, never).body[0] for step in steps]


class TestWriting:
    def test_it_is_durable_once_both_have_it(self, one: InProcess) -> None:
        storage = Gate()
        with InProcess(storage) as two, writing(one, two) as writer:
            storage.open.clear()
            put(writer, 0)
            eventually(lambda: steps_of(one) == [0])
            with pytest.raises(ServiceError, match="not acknowledged everything"):
                writer.flush(0.3)
            storage.open.set()
            writer.flush(TIMEOUT_S)
            assert steps_of(two) == [0]

    def test_one_server_alone_cannot_free_the_queue(self, one: InProcess) -> None:
        """What one of two has not acknowledged is held, and bounds what waits."""
        with writing(one, NOBODY, queue_bytes=4096, patience_s=0.5) as writer:
            with pytest.raises(LogUnavailable, match="acknowledged nothing"):
                put_all(writer, *range(50))
            eventually(lambda: steps_of(one))
            assert len(steps_of(one)) <= 4096 // RECORD_BYTES


class TestMoving:
    def test_what_only_the_lost_server_was_to_get_is_sent_to_the_new_one(
        self, one: InProcess, two: InProcess
    ) -> None:
        with writing(one) as writer:
            make_durable(writer, *range(3))
            cut_off(one)
            put_all(writer, *range(3, 6))
            fence(2, two)
            writer.set_generation(2, [two.address])
            writer.flush(TIMEOUT_S)
            assert steps_of(two) == [3, 4, 5]
            # A step that is done again is logged whole, though the lost server had it.
            make_durable(writer, *range(2, 7))
            assert steps_of(two) == [2, 3, 4, 5, 6]

    def test_a_copy_that_lives_is_not_written_twice(self, one: InProcess, two: InProcess) -> None:
        with InProcess() as three, writing(one, two) as writer:
            make_durable(writer, *range(4))
            cut_off(one)
            fence(2, two, three)
            writer.set_generation(2, [two.address, three.address])
            make_durable(writer, *range(3, 6))
            assert steps_of(two) == list(range(6))
            assert steps_of(three) == [3, 4, 5]
            with reading(three, two) as reader:
                assert values(reader, range(3, 6)) == [3, 4, 5]

    def test_old_steps_that_the_lost_server_had_not_acked_are_not_sent_to_the_other_again(
        self, one: InProcess, two: InProcess
    ) -> None:
        with InProcess() as three, writing(one, two) as writer:
            cut_off(one)
            put_all(writer, *range(4))
            eventually(lambda: steps_of(two) == [0, 1, 2, 3])
            writer.forget_below(3)
            fence(2, two, three)
            writer.set_generation(2, [two.address, three.address])
            make_durable(writer, 3)
            assert steps_of(two) == steps_of(three) == [0, 1, 2, 3]

    def test_both_are_lost_at_once(self, one: InProcess, two: InProcess) -> None:
        with InProcess() as three, writing(one, two) as writer:
            for server in (one, two):
                cut_off(server)
            put_all(writer, *range(4))
            fence(2, three)
            writer.wait_copied()
            writer.forget_below(3)
            writer.set_generation(2, [three.address])
            writer.flush(TIMEOUT_S)
            assert steps_of(three) == [0, 1, 2, 3]

    def test_a_server_that_is_used_again_was_emptied_and_gets_all_of_the_step(
        self, one: InProcess, two: InProcess
    ) -> None:
        with writing(one, two) as writer:
            make_durable(writer, *range(4))
            fence(2, two)
            writer.set_generation(2, [two.address])
            fence(3, one, two)
            admin.reset(one.address, JOB, 3, TIMEOUT_S)
            writer.set_generation(3, [two.address, one.address])
            make_durable(writer, 3, 4)
            assert steps_of(one) == [3, 4]
            assert steps_of(two) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("both", [True, False])
    def test_a_server_that_was_emptied_before_anybody_wrote_without_it(
        self, one: InProcess, two: InProcess, both: bool
    ) -> None:
        """Given up and named again in one breath: the addresses are the same, what it has acknowledged is gone."""
        using = (one, two) if both else (one,)
        with writing(*using) as writer:
            make_durable(writer, *range(4))
            fence(3, *using)
            admin.reset(one.address, JOB, 3, TIMEOUT_S)
            writer.set_generation(3, [s.address for s in using], [one.address])
            put_all(writer, 3, 4)  # the step that was dropped is done again
            writer.flush(TIMEOUT_S)
            assert steps_of(one) == [3, 4]
            assert not both or steps_of(two) == [0, 1, 2, 3, 4]

    def test_a_server_that_comes_again_with_an_empty_disk_is_not_corrupt(
        self, one: InProcess, two: InProcess
    ) -> None:
        with writing(one, two) as writer:
            make_durable(writer, *range(4))
            fence(3, one, two)
            assert isinstance(one.storage, MemoryStorage)
            one.storage.frames.clear()
            del one.engine.state.core.jobs[JOB]
            fence(3, one)
            writer.set_generation(3, [one.address, two.address], [one.address])
            make_durable(writer, 3)
            assert steps_of(one) == [3]
            assert not any(stream.corrupt for stream in admin.inventory(one.address, JOB, TIMEOUT_S))

    def test_one_that_comes_back_gets_what_it_missed(self, one: InProcess, two: InProcess) -> None:
        with writing(one, two) as writer:
            make_durable(writer, 0)
            cut_off(one)
            put_all(writer, *range(1, 4))
            eventually(lambda: steps_of(two) == [0, 1, 2, 3])
            with back(one):
                writer.flush(TIMEOUT_S)
                assert steps_of(one) == [0, 1, 2, 3]

    def test_nothing_waits_for_a_server_that_was_replaced(self, two: InProcess) -> None:
        with InProcess() as three, writing(NOBODY, two, patience_s=0.3) as writer:
            put(writer, 0)
            with pytest.raises(ServiceError, match=NOBODY):
                writer.flush(TIMEOUT_S)
            fence(2, two, three)
            writer.set_generation(2, [two.address, three.address])
            writer.flush(TIMEOUT_S)
            assert steps_of(two) == steps_of(three) == [0]
            assert writer.queued_bytes == 0


class TestReplaying:
    """A replacement declares what each copy holds."""

    def test_a_copy_that_lacks_a_record_gets_it(self, one: InProcess, two: InProcess) -> None:
        for server, steps in ((one, range(4)), (two, range(2))):
            with writing(server) as writer:
                make_durable(writer, *steps)
        with writing(one, two) as heir, reading(one, two) as reader:
            for server in (one, two):
                heir.expect(
                    STREAM, reader.digests(STREAM, 0, server.address, cancelled=never), server.address
                )
            make_durable(heir, *range(5))
            assert steps_of(one) == steps_of(two) == list(range(5))
            assert (heir.stats.verified, heir.stats.records) == (4, 1)

    def test_copies_that_differ_are_refused(self, one: InProcess, two: InProcess) -> None:
        with writing(one, two) as writer:
            writer.expect(STREAM, {key(0): b"a" * 16}, one.address)
            with pytest.raises(RecordCorrupt, match=r"s0\.F .* differs between its copies"):
                writer.expect(STREAM, {key(0): b"b" * 16}, two.address)


class TestReading:
    @pytest.fixture
    def both(self, one: InProcess, two: InProcess) -> tuple[InProcess, InProcess]:
        with writing(one, two) as writer:
            make_durable(writer, *range(6))
        return one, two

    def test_a_server_that_is_not_there_is_passed_over(self, both: tuple[InProcess, InProcess]) -> None:
        with reading(NOBODY, both[1]) as reader:
            assert values(reader, range(6)) == list(range(6))
            assert len(reader.digests(STREAM, 0, cancelled=never)) == 6

    def test_a_server_that_goes_in_the_middle(self, both: tuple[InProcess, InProcess]) -> None:
        one, two = both
        with reading(one, two) as reader, writing(two) as writer:
            cursor = reader.follow(STREAM, 2)
            assert cursor.get(key(2), TIMEOUT_S, never).body[0] == 2
            cut_off(one)
            writer.expect(STREAM, reader.digests(STREAM, 0, two.address, cancelled=never))
            put_all(writer, *range(9))
            assert [cursor.get(key(s), TIMEOUT_S, never).body[0] for s in range(3, 9)] == list(range(3, 9))
            cursor.close()

    def test_a_record_that_is_corrupt_in_one_copy_comes_from_the_other(
        self, both: tuple[InProcess, InProcess]
    ) -> None:
        one, two = both
        flip(one, 3)
        with reading(one, two) as reader:
            assert values(reader, range(6)) == list(range(6))
            assert len(reader.digests(STREAM, 0, cancelled=never)) == 6

    def test_corrupt_in_both_is_refused(self, both: tuple[InProcess, InProcess]) -> None:
        for server in both:
            flip(server, 3)
        with reading(*both) as reader, pytest.raises(RecordCorrupt, match="record 3"):
            values(reader, range(6))

    def test_copies_that_differ_are_not_mixed(self, one: InProcess, two: InProcess) -> None:
        for server, value in ((one, 7), (two, 9)):
            with writing(server) as writer:
                for step in range(3):
                    put(writer, step, value=value if step == 1 else 1)
                writer.flush(TIMEOUT_S)
        flip(one, 2)
        with reading(one, two) as reader, pytest.raises(RecordCorrupt, match="differs between its copies"):
            values(reader, range(3))

    def test_by_stream(self, both: tuple[InProcess, InProcess]) -> None:
        reader = LogReader({STREAM: [both[1].address]}, JOB)
        try:
            assert values(reader, range(6)) == list(range(6))
            with pytest.raises(RecordMissing, match=r"no log server holds s9\.F"):
                reader.follow("s9.F", 0)
        finally:
            reader.close()
        with pytest.raises(UsageError):
            LogReader({}, JOB)

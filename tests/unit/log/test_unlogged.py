"""What a writer does not log (when_full="drop"): declared in the stream itself, in front of whatever follows."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft._pb import log_pb2
from swift_ft.errors import LogUnavailable, RecordMissing
from swift_ft.log import admin
from swift_ft.log.reader import never
from swift_ft.log.record import MARK_SLOT, Dropped, RecordKey, Steps, Unlogged, declared, hull, mark
from swift_ft.tools.inspect import DirectoryLog
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, Gate, following, key, rank_writing, reading
from tests.unit.log.service import JOB, InProcess

QUEUE = 100
MICROBATCHES = 3


def test_a_mark_says_which_steps() -> None:
    for steps in (Steps(0, 0), Steps(3, 17), Steps(5, 5 + 2**31)):
        assert declared(mark(steps)) == steps
        assert mark(steps).step == steps.last  # a trim keeps it as long as one of them is wanted
    assert declared(RecordKey(5, 1, 0)) is None
    assert hull([RecordKey(9, 0, 0)]) is None
    assert hull([RecordKey(9, 0, 0), mark(Steps(4, 5)), mark(Steps(2, 2))]) == Steps(2, 5)


def test_the_rest_of_a_step_goes_the_same_way_and_later_ones_until_the_queue_is_half_full() -> None:
    unlogged = Unlogged(nullcontext())
    assert not unlogged.refuses("a", 4, QUEUE, QUEUE)
    unlogged.drop("a", 4, 10)
    assert unlogged.refuses("a", 4, 0, QUEUE)
    assert not unlogged.refuses("b", 4, QUEUE, QUEUE)
    assert unlogged.refuses("a", 5, QUEUE // 2 + 1, QUEUE)
    assert not unlogged.refuses("a", 5, QUEUE // 2, QUEUE)
    assert unlogged.due("a") == mark(Steps(4, 4))
    unlogged.marked("a")
    assert unlogged.due("a") is None
    assert not unlogged.refuses("a", 4, QUEUE, QUEUE)  # a step that is done again after a recovery


def test_the_news_are_told_once() -> None:
    unlogged = Unlogged(nullcontext())
    assert unlogged.news() is None
    unlogged.drop("b", 7, 10)
    unlogged.drop("a", 6, 5)
    unlogged.marked("a")
    news = unlogged.news()
    assert news == Dropped(Steps(6, 7), 2, 15, ("a", "b"))
    assert str(news) == "2 records (15 bytes) of a, b in steps 6 to 7 were dropped"
    assert unlogged.news() is None
    unlogged.drop("a", 8, 1)
    unlogged.forget()
    assert unlogged.news() is None
    assert unlogged.streams == ()


@dataclass
class World:
    """A queue of records, a log that takes them in order, and all that was ever meant to be logged."""

    unlogged: Unlogged = field(default_factory=lambda: Unlogged(nullcontext()))
    queue: list[tuple[str, RecordKey, int]] = field(default_factory=list)
    log: dict[str, list[RecordKey]] = field(default_factory=lambda: defaultdict(list))
    meant: list[tuple[str, RecordKey]] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(size for _, _, size in self.queue)

    def append(self, stream: str, key: RecordKey, size: int) -> None:
        """As both writers do it."""
        self.meant.append((stream, key))
        full = self.held + size > QUEUE
        if full or self.unlogged.refuses(stream, key.step, self.held, QUEUE):
            self.unlogged.drop(stream, key.step, size)
            return
        self.declare(stream)
        self.queue.append((stream, key, size))

    def declare(self, stream: str) -> None:
        due = self.unlogged.due(stream)
        if due is not None:
            self.queue.append((stream, due, 1))
            self.unlogged.marked(stream)

    def drain(self, records: int) -> None:
        for stream, record, _ in self.queue[:records]:
            self.log[stream].append(record)
        del self.queue[:records]


steps_of_work = st.lists(
    st.tuples(st.lists(st.integers(1, 60), min_size=6, max_size=6), st.integers(0, 8)), max_size=12
)


@given(work=steps_of_work, killed=st.booleans())
def test_what_is_missing_is_declared_in_front_of_all_that_follows(
    work: list[tuple[list[int], int]], killed: bool
) -> None:
    world = World()
    for step, (sizes, drained) in enumerate(work):
        for index, size in enumerate(sizes):
            world.append("ab"[index % 2], RecordKey(step, index // 2, 0), size)
        world.drain(drained)
    if not killed:  # a report
        for stream in world.unlogged.streams:
            world.declare(stream)
        world.drain(len(world.queue))
    for stream in "ab":
        there = world.log[stream]
        for wanted, record in world.meant:
            if wanted != stream or record in there:
                continue
            # Missing. Either nothing behind it is there, or a mark stands before that says so.
            behind = [at for at, found in enumerate(there) if found.slot != MARK_SLOT and found > record]
            marks = [at for at, found in enumerate(there) if _covers(found, record.step)]
            if behind or not killed:
                assert marks
                assert not behind or marks[0] < behind[0]
        for found in there:  # and nothing is declared that is whole
            steps = declared(found)
            for step in range(steps.first, steps.last + 1) if steps is not None else ():
                assert any(RecordKey(step, m, 0) not in there for m in range(MICROBATCHES))


def _covers(key: RecordKey, step: int) -> bool:
    steps = declared(key)
    return steps is not None and steps.first <= step <= steps.last


# -- the writer, against a server that takes nothing for a while ---------------------------------------


QUEUE_BYTES = 1 << 20
BODY = bytes(200 << 10)
STREAM = "s0.F"


def writing(server: InProcess, **options: object) -> AbstractContextManager[Writer]:
    return rank_writing(server, **{"queue_bytes": QUEUE_BYTES, "when_full": "drop", **options})


@contextmanager
def shut(**options: object) -> Iterator[tuple[Gate, InProcess, Writer]]:
    """A server that takes nothing, until its gate is opened."""
    gate = Gate()
    with InProcess(gate) as server, writing(server, **options) as writer:
        gate.open.clear()
        try:
            yield gate, server, writer
        finally:
            gate.open.set()


def put(writer: Writer, step: int, microbatch: int = 0, keep: bool = False) -> bool:
    return writer.append(STREAM, key(step, microbatch), "uint8", (len(BODY),), BODY, keep=keep)


def inventory(server: InProcess) -> log_pb2.StreamInventory:
    (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
    return found


def steps_there(server: InProcess, from_step: int = 0) -> dict[int, int]:
    """step -> its records, without marks."""
    with reading(server) as reader:
        found = reader.digests(STREAM, from_step, cancelled=never)
    return Counter(record.step for record in found if record.slot != MARK_SLOT)


def filled(writer: Writer) -> int:
    """Steps of two records until something is dropped; gives that step."""
    for step in range(20):
        taken = [put(writer, step, microbatch) for microbatch in range(2)]
        if not all(taken):
            return step
    raise AssertionError("the queue has no end")


def test_a_full_queue_never_holds_the_caller_up_and_what_is_missing_is_in_the_log() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        for step in range(first + 1, first + 200):
            for microbatch in range(2):
                assert not put(writer, step, microbatch)
        assert writer.stats.blocked_seconds == 0.0
        dropped = writer.stats.dropped_records
        assert writer.stats.dropped_bytes == dropped * len(BODY)
        news = writer.unlogged.news()
        last = first + 199
        assert news == Dropped(Steps(first, last), dropped, dropped * len(BODY), (STREAM,))
        gate.open.set()
        eventually(lambda: writer.queued_bytes <= QUEUE_BYTES // 2)
        assert put(writer, last + 1, 0)
        assert put(writer, last + 1, 1)
        assert writer.unlogged.news() is None
        writer.flush(TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, last)
        assert inventory(server).marks == 1
        there = steps_there(server)
        assert all(there[step] == 2 for step in range(first))
        assert not any(step in there for step in range(first + 1, last + 1))
        assert there[last + 1] == 2


def test_nothing_behind_a_gap_is_in_the_log_without_its_mark() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        gate.open.set()
        eventually(lambda: writer.queued_bytes <= QUEUE_BYTES // 2)
        assert put(writer, first + 1)
        eventually(lambda: first + 1 in steps_there(server))  # without a flush: a killed writer makes none
        assert admin.unlogged(inventory(server)) == Steps(first, first)


def test_a_flush_declares_what_no_later_record_has_declared() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        gate.open.set()
        writer.set_generation(1)  # as before a report
        writer.flush(TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, first)
        assert put(writer, first, 1)  # the step is done again: now there is room
        writer.flush(TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, first)  # and yet nobody replays it


def test_a_trim_forgets_it_with_the_last_step_and_not_before() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        for step in range(first, first + 5):
            put(writer, step)
        gate.open.set()
        writer.flush(TIMEOUT_S)
        admin.trim(server.address, JOB, first + 4, TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, first + 4)
        admin.trim(server.address, JOB, first + 5, TIMEOUT_S)
        assert admin.unlogged(inventory(server)) is None


def test_a_reader_of_a_declared_step_does_not_wait() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        gate.open.set()
        writer.flush(TIMEOUT_S)
        with reading(server) as reader, following(reader, STREAM, 0) as cursor:
            assert cursor.get(key(0), TIMEOUT_S, never).key == key(0)
            with pytest.raises(RecordMissing, match=f"step {first} microbatch 1 .*declared unlogged"):
                cursor.get(key(first, 1), 1e6, never)


def test_what_must_be_kept_waits() -> None:
    with shut() as (gate, server, writer):
        first = filled(writer)
        begun, kept = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            put(writer, first, 1, keep=True)
            kept.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(TIMEOUT_S)
        assert not kept.wait(0.3)
        gate.open.set()
        assert kept.wait(TIMEOUT_S)
        thread.join()
        writer.flush(TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, first)  # the mark came first
        assert writer.stats.blocked_seconds > 0.0


def test_a_log_that_takes_nothing_for_long_ends_nothing() -> None:
    with shut(patience_s=0.3) as (gate, server, writer):
        first = filled(writer)
        with pytest.raises(LogUnavailable):
            writer.flush(TIMEOUT_S)  # whoever asks for it, hears of it
        assert not put(writer, first + 1)
        gate.open.set()
        eventually(lambda: writer.queued_bytes <= QUEUE_BYTES // 2)
        assert put(writer, first + 2)
        writer.set_generation(1)  # as before a report: what was wrong is forgotten
        writer.flush(TIMEOUT_S)
        assert admin.unlogged(inventory(server)) == Steps(first, first + 1)


def test_an_emptied_log_lacks_nothing() -> None:
    with shut() as (gate, server, writer):
        filled(writer)
        gate.open.set()
        server.engine.administration.fence(JOB, 2)
        admin.reset(server.address, JOB, 2, TIMEOUT_S)
        writer.restart(2)
        assert put(writer, 0)
        writer.flush(TIMEOUT_S)
        found = inventory(server)
        assert (admin.unlogged(found), found.records) == (None, 1)
        assert writer.unlogged.news() is None


def test_a_predecessor_may_have_dropped_something() -> None:
    with InProcess() as server, writing(server) as writer:
        writer.unlogged.lacks(STREAM, Steps(0, 6))
        assert put(writer, 7)
        writer.flush(TIMEOUT_S)
        found = inventory(server)
        assert (admin.unlogged(found), found.records) == (Steps(0, 6), 2)


def test_who_waits_for_a_record_already_is_freed_by_its_declaration() -> None:
    """A rank replays while another one, which was copied, finds that it has not logged all of a step."""
    with InProcess() as server, writing(server, when_full="block") as writer:
        assert put(writer, 2)
        writer.flush(TIMEOUT_S)
        late = threading.Timer(0.2, lambda: (writer.unlogged.lacks(STREAM, Steps(2, 2)), writer.declare()))
        with reading(server) as reader, following(reader, STREAM, 2) as cursor:
            assert cursor.get(key(2), TIMEOUT_S, never).key == key(2)
            late.start()
            with pytest.raises(RecordMissing, match=r"step 2 microbatch 1 .*declared unlogged"):
                cursor.get(key(2, 1), 1e6, never)
        late.join()


def test_what_is_declared_at_once_is_not_waited_for_and_comes_by_itself() -> None:
    with shut(when_full="block") as (gate, server, writer):
        writer.unlogged.lacks(STREAM, Steps(2, 3))
        writer.unlogged.lacks("other", Steps(3, 3))
        writer.declare()  # the server takes nothing
        gate.open.set()
        wanted = {STREAM: Steps(2, 3), "other": Steps(3, 3)}
        eventually(
            lambda: (
                {s.stream: admin.unlogged(s) for s in admin.inventory(server.address, JOB, TIMEOUT_S)}
                == wanted
            )
        )
        writer.declare()  # nothing is due any more
        writer.flush(TIMEOUT_S)
        assert [stream.records for stream in admin.inventory(server.address, JOB, TIMEOUT_S)] == [1, 1]


def test_it_is_on_the_disk(tmp_path: Path) -> None:
    """Another server on the same directory says the same, and so do the files."""
    root = tmp_path / "data"
    with InProcess(DirectoryStorage(root, 1 << 20)) as server, writing(server) as writer:
        assert put(writer, 0)
        writer.unlogged.lacks(STREAM, Steps(1, 3))
        assert put(writer, 4)
        writer.flush(TIMEOUT_S)
    storage = DirectoryStorage(root, 1 << 20)
    again = LogEngine(storage, EngineConfig())
    again.start(storage.recover())
    (stream,) = again.state.core.jobs[JOB].streams.values()
    again.close()
    assert hull(stream.by_key) == Steps(1, 3)
    files = DirectoryLog(root)
    ((found,),) = (job.streams for job in files.facts().jobs)
    assert (found.unlogged, found.records) == (Steps(1, 3), 3)

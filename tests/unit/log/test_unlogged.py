"""What a writer does not log: declared in the stream itself, in front of whatever follows."""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.log.record import MARK_SLOT, Dropped, RecordKey, Steps, Unlogged, declared, hull, mark

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
        for stream, key, _ in self.queue[:records]:
            self.log[stream].append(key)
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
        for wanted, key in world.meant:
            if wanted != stream or key in there:
                continue
            # Missing. Either nothing behind it is there, or a mark stands before that says so.
            behind = [at for at, found in enumerate(there) if found.slot != MARK_SLOT and found > key]
            marks = [at for at, found in enumerate(there) if _covers(found, key.step)]
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

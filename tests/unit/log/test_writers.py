"""What a session may rely on, whichever writer it has: one suite for the ring's, for the one in the process, and for
the one that tests have.

`test_writer_reader` and `test_sidecar_writer` ask more of the two that are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

from swift_ft.errors import Divergence, LogInterrupted, RecordCorrupt, ServiceError, UsageError
from swift_ft.log import admin, ring, sidecar_client
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import MARK_SLOT, RecordKey, Steps, digest_of, mark
from swift_ft.log.sidecar_client import ENV_OFF, SidecarWriter, Writer, open_writer
from swift_ft.log.writer import LogWriter
from tests.unit.log.memory_writer import MemoryWriter, Records
from tests.unit.log.service import JOB, InProcess
from tests.unit.log.test_writer_reader import TIMEOUT_S, Gate, key

STREAM = "s0.F"
BODY = bytes(range(200)) * 500
QUEUE_BYTES = 2 * (len(BODY) + 1024)


class World(Protocol):
    """A writer's log."""

    def open(self, *, when_full: str = "block") -> Writer: ...

    def takes(self, yes: bool) -> None:
        """Whether the log takes what it is sent."""

    def empty(self, generation: int) -> None:
        """All of it is dropped, under that generation."""

    def grant(self, generation: int) -> None: ...

    @property
    def servers(self) -> list[str]: ...

    @property
    def logged(self) -> set[RecordKey]:
        """Of `STREAM`, what is durable."""


class Served:
    """A log server in this process."""

    def __init__(self, kind: type[LogWriter] | type[SidecarWriter], server: InProcess, gate: Gate) -> None:
        self._kind, self._server, self._gate = kind, server, gate
        self.servers = [server.address]

    def open(self, *, when_full: str = "block") -> Writer:
        return self._kind(self.servers, JOB, 1, when_full=when_full, queue_bytes=QUEUE_BYTES)

    def takes(self, yes: bool) -> None:
        if yes:
            self._gate.open.set()
        else:
            self._gate.open.clear()

    def empty(self, generation: int) -> None:
        self.grant(generation)
        admin.reset(self._server.address, JOB, generation, TIMEOUT_S)

    def grant(self, generation: int) -> None:
        self._server.engine.administration.fence(JOB, generation)

    @property
    def logged(self) -> set[RecordKey]:
        reader = LogReader(self.servers, JOB)
        try:
            return set(reader.digests(STREAM, 0, cancelled=never))
        finally:
            reader.close()


class Remembered:
    """None."""

    def __init__(self) -> None:
        self.servers = ["l0"]
        self._records: Records = {}
        self._writers: list[MemoryWriter] = []

    def open(self, *, when_full: str = "block") -> Writer:
        self._writers.append(MemoryWriter(self.servers, 1, drops=when_full == "drop", logged=self._records))
        return self._writers[-1]

    def takes(self, yes: bool) -> None:
        for writer in self._writers:
            writer.takes = yes

    def empty(self, generation: int) -> None:
        self._records.clear()

    def grant(self, generation: int) -> None: ...

    @property
    def logged(self) -> set[RecordKey]:
        return {key for stream, key in self._records if stream == STREAM}


@pytest.fixture(params=[LogWriter, SidecarWriter, MemoryWriter])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param is MemoryWriter:
        yield Remembered()
        return
    gate = Gate()
    with InProcess(gate) as server:
        try:
            yield Served(request.param, server, gate)
        finally:
            gate.open.set()


@contextmanager
def writing(world: World, **options: str) -> Iterator[Writer]:
    writer = world.open(**options)
    try:
        yield writer
    finally:
        writer.close(0.0)


def put(writer: Writer, step: int, body: bytes = BODY, **options: bool) -> bool:
    return writer.append(STREAM, key(step), "uint8", (len(body),), body, **options)


def digest(body: bytes = BODY) -> bytes:
    return digest_of("uint8", (len(body),), body)


def test_what_is_flushed_is_in_the_log(world: World) -> None:
    with writing(world) as writer:
        writer.await_ready()
        for step in range(5):
            assert put(writer, step)
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(step) for step in range(5)}
        stats = writer.stats
        assert (stats.records, stats.bytes, stats.verified) == (5, 5 * len(BODY), 0)
        assert writer.queued_bytes == 0


def test_what_the_log_has_is_compared_and_not_sent(world: World) -> None:
    with writing(world) as writer:
        writer.expect(STREAM, {key(0): digest()}, world.servers[0])
        writer.expect(STREAM, {key(1): digest()})
        for step in (0, 1, 2, 2):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(2)}
        assert (writer.stats.records, writer.stats.verified) == (1, 3)
        with pytest.raises(RecordCorrupt, match="differs between its copies"):
            writer.expect(STREAM, {key(1): digest(b"another")}, "another server")


def test_a_record_that_differs_is_raised_until_the_next_generation_and_told_once(world: World) -> None:
    with writing(world) as writer:
        writer.expect(STREAM, {key(0): digest(b"another")})
        put(writer, 0)
        for _ in range(2):
            with pytest.raises(Divergence, match=STREAM):
                writer.flush(TIMEOUT_S)
        with pytest.raises(Divergence):
            put(writer, 1)
        world.grant(2)
        writer.set_generation(2)
        assert isinstance(writer.unlogged.refusal(), Divergence)
        assert writer.unlogged.refusal() is None
        put(writer, 1)
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(1)}


def test_an_interrupt_stands_until_the_next_generation(world: World) -> None:
    with writing(world) as writer:
        put(writer, 0)
        writer.interrupt()
        for _ in range(2):
            with pytest.raises(LogInterrupted):
                put(writer, 1)
            with pytest.raises(LogInterrupted):
                writer.flush(TIMEOUT_S)
        world.grant(2)
        writer.set_generation(2, world.servers)
        put(writer, 1)
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(0), key(1)}


def test_no_generation_comes_back(world: World) -> None:
    with writing(world) as writer:
        world.grant(3)
        writer.set_generation(3)
        for call in (writer.set_generation, writer.restart):
            with pytest.raises(UsageError, match="generation 2 is older than 3"):
                call(2)


def test_a_server_that_was_emptied_is_sent_everything_again(world: World) -> None:
    with writing(world) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        world.empty(2)
        writer.set_generation(2, world.servers, world.servers)
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(0)}


def test_an_emptied_log_is_known_to_hold_and_to_lack_nothing(world: World) -> None:
    with writing(world) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        writer.unlogged.lacks(STREAM, Steps(1, 2))
        world.empty(2)
        writer.restart(2)
        put(writer, 0, b"another history")
        writer.flush(TIMEOUT_S)
        assert world.logged == {key(0)}


def test_steps_that_are_not_whole_are_declared_in_front_of_what_comes(world: World) -> None:
    with writing(world) as writer:
        writer.unlogged.lacks(STREAM, Steps(0, 3))
        writer.declare()
        writer.flush(TIMEOUT_S)
        assert world.logged == {mark(Steps(0, 3))}
        writer.unlogged.lacks(STREAM, Steps(4, 4))
        put(writer, 5)
        writer.flush(TIMEOUT_S)
        assert world.logged == {mark(Steps(0, 3)), mark(Steps(4, 4)), key(5)}


def test_a_full_queue_drops_what_may_be_dropped_and_says_so_once(world: World) -> None:
    with writing(world, when_full="drop") as writer:
        assert writer.drops
        world.takes(False)
        first = next(step for step in range(100) if not put(writer, step))
        assert not put(writer, first + 1)
        news = writer.unlogged.news()
        assert news is not None
        assert (news.steps, news.records, news.streams) == (Steps(first, first + 1), 2, (STREAM,))
        assert writer.unlogged.news() is None
        assert (writer.stats.dropped_records, writer.stats.dropped_bytes) == (2, 2 * len(BODY))
        world.takes(True)
        assert put(writer, first + 1, keep=True)  # the mark is in front of it
        writer.flush(TIMEOUT_S)
        assert world.logged == {
            *(key(step) for step in range(first)),
            mark(Steps(first, first + 1)),
            key(first + 1),
        }


@pytest.mark.parametrize(
    ("where", "dtype", "shape", "words"),
    [
        (RecordKey(0, 0, MARK_SLOT), "uint8", (1,), "out of range"),
        (RecordKey(-1, 0, 0), "uint8", (1,), "out of range"),
        (key(0), "float7", (1,), "cannot be logged"),
        (key(0), "uint8", (2,), "takes 2 bytes, not 1"),
        (key(0), "uint8", (1,) * 9, "9 dimensions"),
    ],
)
def test_what_is_no_record_is_refused_at_once(
    world: World, where: RecordKey, dtype: str, shape: tuple[int, ...], words: str
) -> None:
    with writing(world) as writer:
        with pytest.raises(UsageError, match=words):
            writer.append(STREAM, where, dtype, shape, b"x")
        writer.flush(TIMEOUT_S)
        assert writer.stats.records == 0


def test_a_closed_writer_takes_nothing_and_still_tells(world: World) -> None:
    writer = world.open()
    put(writer, 0)
    writer.close()
    writer.close()
    calls: list[Any] = [
        lambda: put(writer, 1),
        lambda: writer.flush(TIMEOUT_S),
        lambda: writer.set_generation(2),
        lambda: writer.restart(2),
    ]
    for call in calls:
        with pytest.raises(ServiceError, match="closed"):
            call()
    assert (writer.stats.records, writer.queued_bytes) == (1, 0)
    assert world.logged == {key(0)}


@pytest.mark.parametrize("away", ["switched off", "no shared memory"])
def test_a_machine_without_rings_gets_the_writer_in_the_process(
    monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    if away == "switched off":
        monkeypatch.setenv(ENV_OFF, "1")
    else:
        monkeypatch.setattr(ring, "available", lambda: False)
    with InProcess() as server:
        writer = open_writer([server.address], JOB, 1, lease={"rank": 0})
        assert isinstance(writer, LogWriter)
        assert (writer.lending, writer.pid) == (None, None)
        writer.close()


def test_any_other_gets_the_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_OFF, raising=False)
    assert sidecar_client.ring.available()
    with InProcess() as server:
        writer = open_writer([server.address], JOB, 1)
        assert isinstance(writer, SidecarWriter)
        assert writer.lending is writer
        assert writer.pid is not None
        writer.close()

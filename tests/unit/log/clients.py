"""Clients of log servers in this process, closed at the end; and a server that takes nothing for a while."""

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from swift_ft.log.reader import LogReader, ReadFilter, StreamCursor
from swift_ft.log.record import RecordKey
from tests.log_client import LogWriter, Writer
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess

TIMEOUT_S = 10.0


def key(step: int, microbatch: int = 0, slot: int = 0) -> RecordKey:
    return RecordKey(step, microbatch, slot)


def addresses(servers: tuple[InProcess | str, ...]) -> list[str]:
    return [server if isinstance(server, str) else server.address for server in servers]


@contextmanager
def writing(*servers: InProcess | str, **options: object) -> Iterator[LogWriter]:
    writer = LogWriter(addresses(servers), JOB, 1, **options)  # type: ignore[arg-type]
    try:
        yield writer
    finally:
        writer.close(0.0)


@contextmanager
def rank_writing(*servers: InProcess | str, job: str = JOB, **options: object) -> Iterator[Writer]:
    """A rank's writer, with a sidecar."""
    writer = Writer(addresses(servers), job, 1, **options)  # type: ignore[arg-type]
    try:
        yield writer
    finally:
        writer.close(0.0)


@contextmanager
def reading(*servers: InProcess | str, **options: int) -> Iterator[LogReader]:
    reader = LogReader(addresses(servers), JOB, **options)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def following(
    reader: LogReader, stream: str, from_step: int, share: ReadFilter | None = None
) -> Iterator[StreamCursor]:
    cursor = reader.follow(stream, from_step, share)
    try:
        yield cursor
    finally:
        cursor.close()


def put(
    writer: LogWriter | Writer,
    step: int,
    microbatch: int = 0,
    stream: str = "s0.F",
    value: int | None = None,
) -> None:
    value = step * 100 + microbatch if value is None else value
    writer.append(stream, key(step, microbatch), "int64", (1,), struct.pack("<q", value))


def make_durable(writer: LogWriter | Writer, *steps: int) -> None:
    """A record of each."""
    for step in steps:
        put(writer, step)
    writer.flush(TIMEOUT_S)


def value_of(body: memoryview) -> int:
    return int(struct.unpack("<q", body)[0])


class Gate(MemoryStorage):
    """Commits nothing while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def commit(self, writes: object, sync: bool) -> None:
        assert self.open.wait(TIMEOUT_S)
        super().commit(writes, sync)  # type: ignore[arg-type]

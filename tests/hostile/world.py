"""A log server in the test's process, on a directory that another one can take over; and a job that wants its due."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swift_ft._pb import log_pb2
from swift_ft.log import admin
from swift_ft.log.protocol import method
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from swift_ft_services.authorization import Gate
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.log_client import LogWriter
from tests.unit.log.frames import frame_of
from tests.unit.log.service import InProcess

BOUND_S = 5.0
"""What takes longer is held up: here everything takes milliseconds."""
STREAM = "s0.F"


class Server(InProcess):
    """Starts in the constructor. A context manager."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig | None = None,
        gate: Gate | None = None,
        segment_bytes: int = 1 << 20,
    ) -> None:
        storage = DirectoryStorage(directory, segment_bytes)
        super().__init__(storage, config, gate=gate, jobs=storage.recover(), granted=False)

    def append(self, messages: Iterable[bytes], timeout_s: float = BOUND_S) -> Iterator[log_pb2.AppendReply]:
        append = self.channel.stream_stream(method("Append"), None, log_pb2.AppendReply.FromString)
        return iter(append(iter(messages), timeout=timeout_s))

    def put(self, messages: Sequence[bytes], acked: int) -> None:
        """Sends them, and goes once everything below that sequence is acknowledged."""
        done = threading.Event()

        def requests() -> Iterator[bytes]:
            yield from messages
            done.wait(BOUND_S)

        for reply in self.append(requests()):
            if any(one.durable_sequence >= acked for one in reply.acked):
                done.set()
        assert done.is_set()


def opening(job: str, *, generation: int = 1, acked: int = 0, stream: str = STREAM) -> bytes:
    opened = log_pb2.Open(job=job, stream=stream, generation=generation, acked_sequence=acked)
    return log_pb2.AppendRequest(opens=[opened]).SerializeToString()


def frame(job: str, sequence: int, step: int, *, body: bytes = b"x", **fields: Any) -> bytes:
    return frame_of(sequence, job=job, step=step, body=body, **fields)[1]


def message(*frames: bytes) -> bytes:
    return log_pb2.AppendRequest(frames=b"".join(frames)).SerializeToString()


class Neighbour:
    """A job that wants nothing but its due: `use` fails if that takes long, or anything is missing."""

    def __init__(self, name: str = "neighbour") -> None:
        self.name = name
        self.generation = 0
        self.steps = 0

    def use(self, address: str) -> None:
        began = time.monotonic()
        self.generation += 1
        admin.fence(address, self.name, self.generation, BOUND_S)
        writer = LogWriter([address], self.name, self.generation, patience_s=BOUND_S)
        for _ in range(3):
            writer.append(STREAM, RecordKey(self.steps, 0, 0), "uint8", (1,), bytes([self.steps % 256]))
            self.steps += 1
        writer.flush(BOUND_S)
        writer.close()
        reader = LogReader([address], self.name)
        found = reader.digests(STREAM, 0, timeout_s=BOUND_S, cancelled=never)
        reader.close()
        assert len(found) == self.steps
        (inventory,) = admin.inventory(address, self.name, BOUND_S)
        assert (inventory.records, inventory.corrupt) == (self.steps, False)
        took_s = time.monotonic() - began
        assert took_s < BOUND_S, f"the other job's calls took {took_s:.1f} s"

"""What a replay will need of the log is read before it is asked for, from all servers at the same time."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swift_ft.log.reader import LogReader, ReadFilter
from swift_ft.train.boundary_log import Channel
from swift_ft_services.logserver.storage_interface import Place
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, key, writing
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess
from tests.unit.runtime.wired import channel_of

STEPS, MICROBATCHES, SIZE = 6, 4, 1000
LEFT, RIGHT, BOTH = "s1.F", "s3.B", ("s1.F", "s3.B")


class Gated(MemoryStorage):
    """Nothing is read from it before something is asked of the other one as well."""

    def __init__(self, asked: threading.Event, other_asked: threading.Event) -> None:
        super().__init__()
        self._asked, self._other_asked = asked, other_asked
        self.met = False

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        self._asked.set()
        self.met = self._other_asked.wait(TIMEOUT_S)
        assert self.met, "nothing is asked of the other server"
        return super().read(place, size, buffer)


@pytest.fixture
def servers() -> Iterator[dict[str, InProcess]]:
    left, right = threading.Event(), threading.Event()
    gates = {LEFT: (left, right), RIGHT: (right, left)}
    with ExitStack() as stack:
        found = {stream: stack.enter_context(InProcess(Gated(*gates[stream]))) for stream in BOTH}
        for stream, server in found.items():
            with writing(server) as writer:
                for step in range(STEPS):
                    for microbatch in range(MICROBATCHES):
                        body = bytes([step, microbatch]) * (SIZE // 2)
                        writer.append(stream, key(step, microbatch), "uint8", (SIZE,), body)
                writer.flush(TIMEOUT_S)
        yield found


@contextmanager
def replaying(servers: dict[str, InProcess], also: Mapping[int, int] | None = None) -> Iterator[Channel]:
    """Rank 2 of four, from the first step on. `also`: stages that replay too, and from which step they send."""
    reader = LogReader({stream: [server.address] for stream, server in servers.items()}, JOB)
    found = channel_of(2, store=HashStore)
    found.witness = None
    found.begin_replay(reader, 0, (), also or {})
    try:
        yield found
    finally:
        found.end_replay()
        reader.close()


def read(channel: Channel, stream: str) -> Any:
    return cast(Any, channel._cursors[stream])._records


def test_two_servers_are_read_at_once_and_before_anything_is_asked_for(servers: dict[str, InProcess]) -> None:
    with replaying(servers) as channel:
        channel.read_ahead([LEFT, RIGHT])
        for stream in BOTH:
            eventually(lambda stream=stream: len(read(channel, stream)) == STEPS * MICROBATCHES)  # type: ignore[misc]
        for stream in BOTH:
            storage = servers[stream].storage
            assert isinstance(storage, Gated)
            assert storage.met
        room = torch.empty(SIZE, dtype=torch.uint8)
        channel.receive(1, "F", 3, 0, room, early=True)
        assert room[:2].tolist() == [0, 3]


def test_each_rank_reads_its_share_only(servers: dict[str, InProcess]) -> None:
    with replaying(servers) as channel:
        channel.want(ReadFilter(first=1, behind=3, of=MICROBATCHES, below_step=4), 0)
        channel.read_ahead([LEFT, RIGHT])
        for stream in BOTH:
            # Two of four up to step 4, and everything behind it.
            eventually(lambda stream=stream: len(read(channel, stream)) == 4 * 2 + 2 * 4)  # type: ignore[misc]
            assert {key.microbatch for key in read(channel, stream) if key.step < 4} == {1, 2}


def test_a_stream_that_no_server_has_is_not_missed_before_it_is_wanted(servers: dict[str, InProcess]) -> None:
    with replaying({LEFT: servers[LEFT]}) as channel:
        channel.read_ahead([RIGHT])
        assert channel._cursors == {}


def test_a_wait_for_a_stage_that_replays_too_is_not_the_logs(servers: dict[str, InProcess]) -> None:
    with replaying(servers, {1: 2}) as channel:
        read: list[int] = []
        channel.profile.read = lambda size, waited_s: read.append(size)  # type: ignore[method-assign]
        channel.read_ahead([LEFT, RIGHT])
        room = torch.empty(SIZE, dtype=torch.uint8)
        for step, counted in ((1, [SIZE]), (2, [SIZE])):
            channel.begin_step(step)
            channel.receive(1, "F", 0, 0, room, early=True)
            assert read == counted

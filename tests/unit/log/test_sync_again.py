"""A record that was acknowledged without a sync, and is sent again by who wants one, is not acknowledged without it."""

import queue
from collections.abc import Sequence

import pytest

from swift_ft._pb import log_pb2
from swift_ft_services.logserver.storage_interface import Write
from tests.unit.log.append_call import Call
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import InProcess


class Watched(MemoryStorage):
    def __init__(self) -> None:
        super().__init__()
        self.synced: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        if sync:
            self.synced.put(True)
        return super().commit(writes, sync)


def call_of(server: InProcess, fsync: str) -> Call:
    call = Call(server)
    opening = log_pb2.Open(job=JOB, stream=STREAM, generation=1, fsync=fsync)
    call.raw(log_pb2.AppendRequest(opens=[opening]).SerializeToString())
    call.read(lambda: STREAM in call.opened)
    return call


@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_what_was_written_without_a_sync_is_synced_before_it_is_acknowledged_again(fsync: str) -> None:
    storage = Watched()
    frames = [frame_of(n)[1] for n in range(3)]
    with InProcess(storage) as server:
        careless = call_of(server, "never")
        careless.send(*frames)
        careless.until_acked(3)
        careless.end()
        assert storage.synced.empty()
        careful = call_of(server, fsync)
        careful.send(*frames)
        careful.until_acked(3)
        assert storage.synced.get_nowait()
        again = call_of(server, fsync)  # that is known now
        again.send(*frames)
        again.until_acked(3)
        assert storage.synced.empty()


def test_who_wants_no_sync_waits_for_none() -> None:
    storage = Watched()
    with InProcess(storage) as server:
        for _ in range(2):
            call = call_of(server, "never")
            call.send(frame_of(0)[1])
            call.until_acked(1)
            call.end()
        assert storage.synced.empty()

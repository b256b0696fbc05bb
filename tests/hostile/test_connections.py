"""Calls that end, all at once or while the server's lock is held: gRPC's one thread goes on serving the others."""

from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log import admin
from swift_ft.log.protocol import CALLS_PER_CONNECTION, PINGS_TOO_SOON_MAX
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from swift_ft.tokens import LOG
from tests.health_probe import check_service
from tests.hostile.clients import Connection
from tests.hostile.world import BOUND_S, Neighbour, Server, opening
from tests.log_client import LogWriter
from tests.patience import eventually

JOB = "job"


def test_a_connection_has_so_many_calls_at_once_and_no_more(tmp_path: Path) -> None:
    """When it breaks they end at once, and whoever is served by the same thread waits for that."""
    with Server(tmp_path / "log") as server:
        sessions = server.engine.state.sessions
        with Connection(server.address) as greedy, Connection(server.address) as other:
            for _ in range(3 * CALLS_PER_CONNECTION):
                greedy.begin(LOG + "Append")
            eventually(lambda: len(sessions) == CALLS_PER_CONNECTION)
            for _ in range(CALLS_PER_CONNECTION):
                other.begin(LOG + "Append")
            eventually(lambda: len(sessions) == 2 * CALLS_PER_CONNECTION)
            Neighbour().use(server.address)
            assert len(sessions) == 2 * CALLS_PER_CONNECTION
        eventually(lambda: not sessions)


def test_who_floods_with_pings_loses_his_connection_and_who_pings_now_and_then_does_not(
    tmp_path: Path,
) -> None:
    with Server(tmp_path / "log") as server, Connection(server.address) as greedy:
        with Connection(server.address) as modest:
            modest.ping(PINGS_TOO_SOON_MAX // 2)
            greedy.ping(3 * PINGS_TOO_SOON_MAX)
            assert greedy.closed.wait(BOUND_S)
            Neighbour().use(server.address)
            assert not modest.closed.is_set()


def test_a_reader_follows_more_streams_than_a_connection_has_calls(tmp_path: Path) -> None:
    """Each is a call for as long as it is followed. More of them come and go than there are at once."""
    streams = [f"s{number}.F" for number in range(2 * CALLS_PER_CONNECTION + 3)]
    with Server(tmp_path / "log") as server:
        admin.fence(server.address, JOB, 1, BOUND_S)
        writer = LogWriter([server.address], JOB, 1, patience_s=BOUND_S)
        for number, stream in enumerate(streams):
            writer.append(stream, RecordKey(0, 0, 0), "uint8", (1,), bytes([number]))
        writer.flush(BOUND_S)
        writer.close()
        reader = LogReader([server.address], JOB)
        for _ in range(3):
            cursors = [reader.follow(stream, 0) for stream in streams]
            bodies = [cursor.get(RecordKey(0, 0, 0), BOUND_S, lambda: False).body for cursor in cursors]
            assert [bytes(body) for body in bodies] == [bytes([number]) for number in range(len(streams))]
            assert len(reader.digests(streams[0], 0, timeout_s=BOUND_S, cancelled=never)) == 1
            for cursor in cursors:
                cursor.close()
                cursor.close()  # once is enough
        assert len(reader._channels) <= -(-len(streams) // (CALLS_PER_CONNECTION // 2))
        reader.close()


@pytest.mark.parametrize("method", ["Append", "Read"])
def test_a_call_that_ends_while_the_lock_is_held_holds_up_nobody(tmp_path: Path, method: str) -> None:
    request = opening(JOB)
    if method == "Read":
        request = log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True).SerializeToString()
    with Server(tmp_path / "log") as server:
        admin.fence(server.address, JOB, 1, BOUND_S)
        job = server.engine.state.core.jobs[JOB]
        with Connection(server.address) as connection:
            call = connection.begin(LOG + method)
            connection.message(call, request, end=method == "Read")
            eventually(lambda: server.engine.state.holders if method == "Append" else job.readers)
            with server.engine.state.changed:
                connection.reset(call)
                connection.close()
                for _ in range(20):  # the server has heard of the end before some of them
                    assert check_service(server.address).status == "SERVING"
        eventually(lambda: not server.engine.state.holders and not job.readers)
        Neighbour().use(server.address)

"""Faults 30 to 33: peers that are gone without a word, clocks that jump, and the dead that go on writing."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import ServiceError
from swift_ft.log import admin
from swift_ft.log.protocol import client_options, server_options
from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import TIMEOUT_S, Helper, Server, put
from tests.integration.coordinator_world import Coordinator, FakeMember
from tests.integration.logserver_world import JOB
from tests.integration.namespaces import Network, impossible
from tests.integration.test_partitions import World
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM
from tests.unit.log.service import InProcess

KEEPALIVE_BOUND_S = 20.0
"""docs/protocol.md: both sides notice a peer that is gone within this."""
HOUR_S = 3600
QUICK_LEASES = ("--heartbeat-s", "0.2", "--lease-s", "2")


# -- 30: half-open connections --------------------------------------------------------------------------------


class HalfOpen:
    """A server and a client whose network is cut; neither is told. Who finds it out says when."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        network = Network("meta", "log", "a", "b")
        stack.callback(network.close)
        world = World(network, directory, stack)
        with mock.patch.dict(os.environ, SWIFT_INSECURE="1"):  # connections in clear text off loopback
            world.log_server()
            self.client, self.operator = world.agent("a"), world.agent("b")
        assert self.operator("fence", world.log, 1) is None
        assert self.client("open_writer", world.log, 1, 60.0) is None
        assert self.client("write", STREAM, 0, 1) is None
        assert self.client("follow", world.log, STREAM) is None
        assert self.operator("trim", world.log, 1) == 0  # it is being read
        network.lose("a", "log")
        network.lose("log", "a")
        self.began = time.monotonic()
        self.client.begin("seconds_to_notice", 60.0)
        self.operator.begin("trimmed_at", world.log, 1)


@pytest.fixture(scope="module", autouse=True)
def half_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HalfOpen | None]:
    """Cut before the first test of this file and looked at in the last one: it takes as long as all others together."""
    with contextlib.ExitStack() as stack:
        yield None if impossible() else HalfOpen(tmp_path_factory.mktemp("half-open"), stack)


def test_f30_stopped_server_is_given_up_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process keeps its connections open, and its kernel answers for it."""
    for stated in (dict(client_options(1)), dict(server_options())):
        for timeout in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
            assert stated["grpc.keepalive_time_ms"] + stated[timeout] <= KEEPALIVE_BOUND_S * 1000
    # Quick, but not so quick that a server which only waits for a core is given up again and again.
    quick = {**dict(client_options(1)), "grpc.http2.ping_timeout_ms": 2000, "grpc.keepalive_timeout_ms": 2000}
    monkeypatch.setattr(
        "swift_ft.log.protocol.client_options",
        lambda size: [*{**dict(client_options(size)), **quick}.items()],
    )
    with Server(tmp_path / "log") as server:
        server.fence(1)
        writer = server.writer()
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        put(writer, 1)
        link = writer.sending.links[server.address]
        eventually(lambda: "timeout" in link.core.trouble, "a ping has no answer: the call is given up")
        with pytest.raises(ServiceError, match="has not acknowledged everything"):
            writer.flush(0.1)
        server.process.send_signal(signal.SIGCONT)
        writer.close(3 * TIMEOUT_S)
        server.check(0, 2)


# -- 31: clocks -----------------------------------------------------------------------------------------------


@pytest.fixture
def forging(tmp_path: Path, faults: Faults) -> Iterator[Coordinator]:
    """A coordinator whose wall clock is the test's."""
    coordinator = Coordinator(tmp_path / "meta", *QUICK_LEASES)
    with mock.patch.dict(os.environ, faults.env):
        coordinator.start()
    yield coordinator
    coordinator.stop()


def sees_the_jump(address: str, jump_s: int) -> None:
    """The process's own wall clock is off by this, as it tells with the answer to a health check."""
    with grpc.insecure_channel(address) as channel:
        _, call = health_pb2_grpc.HealthStub(channel).Check.with_call(
            health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True
        )
        told = dict(call.trailing_metadata())["swift-time"]
    assert abs(float(told) - time.time() - jump_s) < 60


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_f31_wall_clock_jump_changes_nothing_at_the_coordinator(
    forging: Coordinator, faults: Faults, jump_s: int
) -> None:
    members = [FakeMember(forging.address, "a", rank, 3).start() for rank in range(3)]
    try:
        members[0].watcher.wait_for(lambda view: view.state == pb.RUNNING, TIMEOUT_S)
        faults.set_clock_offset(jump_s)
        sees_the_jump(forging.address, jump_s)
        with CoordinatorClient(forging.address, "a") as client:
            # Leases are looked at many times meanwhile, and each is renewed.
            begin = time.monotonic()
            while time.monotonic() - begin < 1.5:
                status = client.status()
                assert status.view.generation == 1
                assert all(0 <= rank.lease_age_s < 2 for rank in status.ranks)
                time.sleep(0.05)
        # Nor does a lease live longer, or shorter, for it.
        members[2].silent.set()
        begin = time.monotonic()
        view = members[0].watcher.wait_for(lambda view: view.generation == 2, 3 * TIMEOUT_S)
        assert "rank 2 was silent for" in view.reason
        assert time.monotonic() - begin > 1.0
    finally:
        for member in members:
            member.kill()


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_f31_wall_clock_jump_changes_nothing_at_the_log_server(
    tmp_path: Path, faults: Faults, jump_s: int
) -> None:
    """Under the policy that has a timer. A reader's lease, open calls and acknowledgements go on."""
    with Server(tmp_path / "log", "--fsync", "interval", faults=faults) as server:
        server.fence(1)
        writer = server.writer()
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        with reading(server.address) as reader:
            cursor = reader.follow(STREAM, 0)
            faults.set_clock_offset(jump_s)
            sees_the_jump(server.address, jump_s)
            syncs = faults.rule(shim.SYNC, shim.RECORDS, shim.COUNT)
            for step in range(1, 20):
                put(writer, step)
                writer.flush(TIMEOUT_S)
            syncs.wait()  # the timer goes on
            assert admin.trim(server.address, JOB, 3, TIMEOUT_S) == 0
            faults.set_clock_offset(0)
            for step in range(20, 30):
                put(writer, step)
            writer.close()
            assert writer.stats.resent == 0  # no call was broken off
            assert admin.trim(server.address, JOB, 3, TIMEOUT_S) == 0  # which is being read
            cursor.close()
        eventually(lambda: admin.trim(server.address, JOB, 3, TIMEOUT_S) == 3, "nobody reads any more")
        server.check(3, 30)


# -- 32, 33: the dead that write ------------------------------------------------------------------------------

# Rank 1 of a job, which logs a record for every line it is told, and says what came of it.
ZOMBIE = """
import json, sys
from swift_ft.errors import SwiftError
from swift_ft.log.record import RecordKey
from tests.log_client import LogWriter
from tests.integration.coordinator_world import FakeMember

coordinator, log, listen_s = sys.argv[1:]
member = FakeMember(coordinator, "job", 1, 3).start()
writer = LogWriter([log], "job", 1, patience_s=3.0)
for step, line in enumerate(sys.stdin):
    try:
        writer.append("s1.F", RecordKey(step, 0, 0), "uint8", (3,), b"old")
        writer.flush(20.0)
        print(json.dumps(["durable", step]), flush=True)
    except SwiftError as error:
        member._threads[0].join(float(listen_s))  # it ends when the coordinator tells it that it is fenced
        print(json.dumps([type(error).__name__, member.fenced]), flush=True)
"""


class Proxy:
    """A way to a server that can be cut: what is under way and what comes later arrives nowhere. A connection is
    answered `after_s` seconds after it was made."""

    def __init__(self, target: str, after_s: float = 0.0) -> None:
        self._after_s = after_s
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._cut = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                time.sleep(self._after_s)
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, from_: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := from_.recv(1 << 16):
                if not self._cut.is_set():
                    to.sendall(data)

    def close(self) -> None:
        for one in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Trio:
    """A coordinator with quick leases, a log server, and two good ranks of three; rank 1 is the zombie."""

    def __init__(self, directory: Path) -> None:
        self.log = Server(directory / "log").start()
        self.coordinator = Coordinator(
            directory / "meta", *QUICK_LEASES, "--log-servers", self.log.address
        ).start()
        self.proxy = Proxy(self.coordinator.address)
        self.members = [FakeMember(self.coordinator.address, JOB, rank, 3) for rank in (0, 2)]
        self.zombie: Helper | None = None

    def form(self, coordinator: str, listen_s: float) -> Helper:
        self.zombie = Helper(ZOMBIE, coordinator, self.log.address, str(listen_s))
        for member in self.members:
            member.start()
        self.until_generation(1)
        return self.zombie

    def until_generation(self, generation: int) -> str:
        """RUNNING in it; why it came."""
        view = self.members[0].watcher.wait_for(
            lambda view: view.generation == generation and view.state == pb.RUNNING, TIMEOUT_S
        )
        return str(view.reason)

    def recover(self) -> None:
        """Rank 1 is lost to its lease, and another process takes its place."""
        view = self.members[0].watcher.wait_for(lambda view: view.generation == 2, TIMEOUT_S)
        assert "rank 1 was silent for" in view.reason
        self.members.append(FakeMember(self.coordinator.address, JOB, 1, 3).start())
        self.until_generation(2)

    def logged(self, count: int) -> list[tuple[int, int]]:
        """Step and generation of every record, as a replay gets them."""
        with reading(self.log.address) as reader, following(reader, "s1.F", 0) as cursor:
            eventually(lambda: len(cursor._records) >= count, "the records")
            return [(record.key.step, record.generation) for record in cursor._records.values()]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.log.__exit__)
            stack.callback(self.coordinator.stop)
            stack.callback(self.proxy.close)
            for member in self.members:
                stack.callback(member.kill)
            if self.zombie is not None:
                stack.callback(self.zombie.__exit__)


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Trio]:
    made = Trio(tmp_path)
    yield made
    made.close()


def heirs_steps(trio: Trio, begin: int) -> None:
    heir = LogWriter([trio.log.address], JOB, 2)
    for step in range(begin, begin + 3):
        put(heir, step, "s1.F")
    heir.close()


def test_f32_trainer_stopped_past_its_lease_is_fenced_at_its_first_write(trio: Trio) -> None:
    zombie = trio.form(trio.coordinator.address, TIMEOUT_S)
    for step in range(2):
        zombie.say("write")
        assert zombie.hear() == ["durable", step]
    zombie.process.send_signal(signal.SIGSTOP)
    trio.recover()
    heirs_steps(trio, 2)
    zombie.process.send_signal(signal.SIGCONT)
    zombie.say("write")  # as if nothing had happened
    assert zombie.hear() == ["StaleGeneration", True]
    assert trio.logged(5) == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]
    assert trio.log.inventory("s1.F").next_sequence == 5


def test_f33_partitioned_zombie_is_rejected_and_replay_ends_at_the_fence(trio: Trio) -> None:
    """It reaches the log server, not the coordinator, and writes all the while."""
    zombie = trio.form(trio.proxy.address, listen_s=1.0)  # five heartbeats, none of which is answered
    zombie.say("write")
    assert zombie.hear() == ["durable", 0]
    trio.proxy.cut()
    said: list[list[object]] = []

    def go_on() -> None:
        while not said or said[-1][0] == "durable":
            zombie.say("write")
            said.append(zombie.hear())
            time.sleep(0.01)

    writing = threading.Thread(target=go_on)
    writing.start()
    trio.recover()
    writing.join(TIMEOUT_S)
    assert said[-1] == ["StaleGeneration", False]  # the log server told it; the coordinator could not
    acked = len(said)  # with the first one, without the last one
    fence = trio.log.inventory("s1.F").next_sequence
    assert acked <= fence <= acked + 1  # one may have got in whose acknowledgement the fence has overtaken
    heirs_steps(trio, fence)
    zombie.say("write")
    assert zombie.hear()[0] == "StaleGeneration"
    wanted = [(step, 1) for step in range(fence)] + [(fence + n, 2) for n in range(3)]
    assert trio.logged(len(wanted)) == wanted


# -- 30 again: what has come of the connections that were cut --------------------------------------------------


def test_f30_half_open_connection_is_found_by_both_sides_within_the_stated_bound(
    half_open: HalfOpen | None,
) -> None:
    """The network between them is cut, and neither is told. The server's side: a dead reader's lease ends."""
    if half_open is None:
        pytest.skip(impossible())
    trimmed, at = half_open.operator.end()
    assert trimmed == 1
    found = half_open.client.end()  # of the writer, and of the reader
    slack_s = 3.0  # of processes that take turns on a busy machine
    assert at - half_open.began < KEEPALIVE_BOUND_S + slack_s
    for noticed in found:
        assert noticed is not None, found
        after_s, trouble = noticed
        assert after_s < KEEPALIVE_BOUND_S + slack_s, found
        # Of a ping; or of data that the peer's kernel does not acknowledge.
        assert "ping timeout" in trouble or "timed out" in trouble, found


def test_a_server_whose_answer_takes_its_time_is_not_away() -> None:
    """A first attempt to connect is given more than a busy machine or a distant server takes."""
    with InProcess() as server:
        way = Proxy(server.address, after_s=0.3)
        try:
            assert admin.status(way.address, TIMEOUT_S, at_once=True).jobs
        finally:
            way.close()

"""Faults 30 to 33: peers that are gone without a word, clocks that jump, and the dead that go on writing."""

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import ServiceError
from swift_ft.launch.standalone import free_port
from swift_ft.log import admin
from swift_ft.log.protocol import client_options, server_options
from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import TIMEOUT_S, Helper, Server, put, reading
from tests.integration.coordinator_world import Coordinator, FakeMember
from tests.integration.logserver_world import JOB
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.frames import STREAM
from tests.unit.log.service import InProcess

KEEPALIVE_BOUND_S = 20.0
"""docs/protocol.md: both sides notice a peer that is gone within this."""
HOUR_S = 3600
QUICK_LEASES = ("--heartbeat-s", "0.2", "--lease-s", "2")


# -- 30: half-open connections --------------------------------------------------------------------------------

SERVER_IP, CLIENT_IP = "10.77.0.2", "10.77.0.1"


class Wire:
    """A network namespace for the server, one for its clients, a pair of interfaces between them."""

    def __init__(self, server_pid: int) -> None:
        self.server_pid = server_pid
        self._client = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        mine, theirs = (Path(f"/proc/{pid}/ns/net") for pid in ("self", self._client.pid))
        eventually(lambda: theirs.readlink() != mine.readlink(), "the client has a network of its own")
        self.run(
            self.client, "link", "add", "c0", "type", "veth", "peer", "name", "s0", "netns", str(server_pid)
        )
        for inside, name, address in ((self.client, "c0", CLIENT_IP), (self.server, "s0", SERVER_IP)):
            self.run(inside, "address", "add", f"{address}/24", "dev", name)
            self.run(inside, "link", "set", name, "up")
            self.run(inside, "link", "set", "lo", "up")

    @property
    def client(self) -> list[str]:
        """Words that let a command run on the clients' side."""
        return ["nsenter", f"--net=/proc/{self._client.pid}/ns/net"]

    @property
    def server(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.server_pid}/ns/net"]

    @staticmethod
    def run(inside: list[str], *words: str) -> None:
        done = subprocess.run([*inside, "ip", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def cut(self) -> None:
        """What either side sends goes to nobody. No FIN, no RST, no error: the interfaces stay up."""
        nobody = "02:00:00:00:00:99"
        for inside, name, peer in ((self.client, "c0", SERVER_IP), (self.server, "s0", CLIENT_IP)):
            self.run(inside, "neigh", "replace", peer, "lladdr", nobody, "dev", name, "nud", "permanent")

    def close(self) -> None:
        self._client.kill()
        self._client.wait(TIMEOUT_S)


# Writes and reads; then says how long it took until each of its connections was known to be dead.
CUT_OFF = """
import json, os, sys, time
from swift_ft.log import admin
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from tests.log_client import LogWriter

os.environ["SWIFT_INSECURE"] = "1"  # the network between is the test's own
address = sys.argv[1]
admin.fence(address, "job", 1, 20.0)
writer = LogWriter([address], "job", 1)
writer.append("s0.F", RecordKey(0, 0, 0), "uint8", (1,), b"x")
writer.flush(20.0)
reader = LogReader([address], "job")
cursor = reader.follow("s0.F", 0)
cursor.get(RecordKey(0, 0, 0), 20.0, lambda: False)
print(json.dumps("reading"), flush=True)
sys.stdin.readline()
begin = time.monotonic()
link = writer.sending.links[address]
was = link.core.trouble
writer.append("s0.F", RecordKey(1, 0, 0), "uint8", (1,), b"y")
found = {}
while len(found) < 2 and time.monotonic() - begin < 60:
    if "writer" not in found and link.core.trouble != was:
        found["writer"] = [time.monotonic() - begin, link.core.trouble]
    if "reader" not in found and cursor._trouble:
        found["reader"] = [time.monotonic() - begin, cursor._trouble]
    time.sleep(0.01)
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""

# Until it has trimmed as far as the first argument says, or once. What came of it, and when.
TRIM = """
import json, sys, time
from swift_ft.log import admin

while (trimmed := admin.trim(sys.argv[1], "job", 1, 20.0)) < 1:
    if sys.argv[2] == "once":
        break
    time.sleep(0.05)
print(json.dumps([trimmed, time.monotonic()]), flush=True)
"""


class HalfOpen:
    """A server and a client whose network is cut; neither is told. Who finds it out says when."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        server = Server(directory / "log", "--insecure")
        server.address = f"0.0.0.0:{free_port()}"
        server.prefix = ("unshare", "--net")
        stack.enter_context(server)
        wire = Wire(server.pid)
        stack.callback(wire.close)
        port = server.address.rpartition(":")[2]
        self.client = stack.enter_context(Helper(CUT_OFF, f"{SERVER_IP}:{port}", prefix=wire.client))
        assert self.client.hear() == "reading"
        trim = [TRIM, f"127.0.0.1:{port}"]
        with Helper(*trim, "once", prefix=wire.server) as once:
            assert once.hear()[0] == 0  # it is being read
        wire.cut()
        self.began = time.monotonic()
        self.client.say("cut")
        self.trim = stack.enter_context(Helper(*trim, "until", prefix=wire.server))


def no_networks() -> str:
    """Why a network of its own cannot be made here."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"no {program}: a network of its own cannot be made"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture(scope="module", autouse=True)
def half_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HalfOpen | None]:
    """Cut before the first test of this file and looked at in the last one: it takes as long as all others together."""
    with contextlib.ExitStack() as stack:
        yield None if no_networks() else HalfOpen(tmp_path_factory.mktemp("half-open"), stack)


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
def forging(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    """A coordinator whose wall clock is the test's."""
    coordinator = Coordinator(tmp_path / "meta", *QUICK_LEASES)
    with monkeypatch.context() as patch:
        for name, value in faults.env.items():
            patch.setenv(name, value)
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
        with reading(self.log.address) as reader:
            cursor = reader.follow("s1.F", 0)
            eventually(lambda: len(cursor._records) >= count, "the records")
            found = [(record.key.step, record.generation) for record in cursor._records.values()]
            cursor.close()
        return found

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
        pytest.skip(no_networks())
    trimmed, at = half_open.trim.hear()
    assert trimmed == 1
    found = half_open.client.hear()
    slack_s = 3.0  # of processes that take turns on a busy machine
    assert at - half_open.began < KEEPALIVE_BOUND_S + slack_s
    for who in ("writer", "reader"):
        after_s, trouble = found[who]
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

"""A launcher under test, the scripts that it starts, and a coordinator that says what the test wants it to."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.coordinator_messages import whole
from swift_ft.launch.standalone import free_port
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import Meetings
from swift_ft_services.coordinator.timeouts import Timing
from tests.patience import eventually

Found = TypeVar("Found")
STALL_S = 30.0

BEGINS = "from swift_ft import warm_up; warm_up.begin_session()\n"
"""What a session says to the launcher."""

# Says who it is, then waits for the file that ends it. `go.RANK` holds what it does in the end.
PLAIN_SCRIPT = """\
import json, os, sys, time
env = {k: v for k, v in os.environ.items() if k in WANTED or k.startswith(("SWIFT_", "TORCHELASTIC_"))}
about = {"t": time.clock_gettime(time.CLOCK_MONOTONIC), "pid": os.getpid(), "env": env, "argv": sys.argv}
path = f"rank{env['RANK']}.{os.getpid()}.json"
with open(path + ".part", "w") as part:
    json.dump(about, part)
os.rename(path + ".part", path)
go = f"go.{env['RANK']}"
deadline = time.monotonic() + 60
while not os.path.exists(go) and time.monotonic() < deadline:
    time.sleep(0.01)
exec(open(go).read())
"""
RANK_SCRIPT = BEGINS + PLAIN_SCRIPT
WANTED = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
WANTED += ["OMP_NUM_THREADS"]


class ScriptedCoordinator(pb_grpc.CoordinatorServicer):
    """Publishes the Views that the test gives it; keeps what it was told."""

    def __init__(self) -> None:
        self.exits: list[pb.ExitRequest] = []
        self.failures: list[str] = []
        self.asked: list[tuple[int, str, str]] = []
        self.stops: list[tuple[str, str, int]] = []
        """(launcher, why, how many exits it had told before)."""
        self._view: pb.View | None = None
        self._meetings = Meetings(events.now())
        self._meeting = threading.Lock()
        self.met = 0
        """Machines that it has told that they are here."""
        self._readers: list[queue.SimpleQueue[pb.View]] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.come()

    def come(self) -> None:
        """At its address, again after `close`."""
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)]
        )
        pb_grpc.add_CoordinatorServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def publish(self, **fields: Any) -> None:
        revision = 1 if self._view is None else self._view.revision + 1
        self._view = pb.View(job="test", world_size=2, revision=revision, **fields)
        for reader in self._readers:
            reader.put(self._view)

    def close(self) -> None:
        self._server.stop(None).wait()

    def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ViewUpdate]:
        reader: queue.SimpleQueue[pb.View] = queue.SimpleQueue()
        self._readers.append(reader)
        if self._view is not None:
            yield whole(self._view)
        while context.is_active():
            try:
                yield whole(reader.get(timeout=0.1))
            except queue.Empty:
                continue

    def Meet(  # noqa: N802
        self, request: pb.MeetRequest, context: grpc.ServicerContext
    ) -> pb.MeetReply:
        with self._meeting:
            over = None if self._view is None else self._view.state in (pb.FINISHED, pb.FAILED, pb.STOPPED)
            self._meetings.expire(
                events.now(), Timing(lease_s=2 * STALL_S, step_bound_s=120.0), lambda _job: ()
            )
            try:
                reply = self._meetings.say(request, events.now(), over=over)
            except Refusal as refusal:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
            self.met = max(self.met, reply.here)
            return reply

    def restart(self) -> None:
        """Of what is in memory alone nothing is left."""
        with self._meeting:
            self._meetings = Meetings(events.now())

    def MemberExited(  # noqa: N802
        self, request: pb.ExitRequest, context: grpc.ServicerContext
    ) -> pb.Ack:
        self.exits.append(request)
        return pb.Ack()

    def Fail(  # noqa: N802
        self, request: pb.FailRequest, context: grpc.ServicerContext
    ) -> pb.Ack:
        self.failures.append(request.reason)
        return pb.Ack()

    def AskCheckpoint(  # noqa: N802
        self, request: pb.AskCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.Ack:
        self.asked.append((request.rank, request.incarnation, request.reason))
        return pb.Ack()

    def Stop(  # noqa: N802
        self, request: pb.StopRequest, context: grpc.ServicerContext
    ) -> pb.Ack:
        self.stops.append((request.run, request.reason, len(self.exits)))
        return pb.Ack()


class Rank:
    """What a started script has written about itself."""

    def __init__(self, path: Path) -> None:
        about = json.loads(path.read_text())
        self.t: float = about["t"]
        self.pid: int = about["pid"]
        self.env: dict[str, str] = about["env"]
        self.argv: list[str] = about["argv"]

    @property
    def alive(self) -> bool:
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE


class Launch:
    """One `python -m swift_ft.launch`. Spares import next to nothing unless told otherwise. Without the address of a
    coordinator it is `--standalone`."""

    def __init__(
        self,
        directory: Path,
        coordinator: str,
        *flags: str,
        script: str = RANK_SCRIPT,
        launcher: tuple[str, ...] = ("-m", "swift_ft.launch"),
    ) -> None:
        self.directory = directory
        self.trace = directory / "events"
        self.trace.mkdir(exist_ok=True)
        (directory / "script.py").write_text(
            f"WANTED = {WANTED}\n" + script if script in (RANK_SCRIPT, PLAIN_SCRIPT) else script
        )
        command = [
            sys.executable,
            *launcher,
            *(["--coordinator", coordinator] if coordinator else ["--standalone"]),
            "--preload-only",
            "json",
        ]
        if not any(flag.startswith(("--job", "--rdzv-id")) for flag in flags):
            command.append("--job=test")
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [*command, *flags, "script.py", "--flag", "value"],
            cwd=directory,
            env=environment | {"SWIFT_EVENTS": str(self.trace)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self, number: int) -> list[Rank]:
        """All processes that this rank has had so far, oldest first."""
        return sorted(map(Rank, self.directory.glob(f"rank{number}.*.json")), key=lambda rank: rank.t)

    def rank(self, number: int, process: int = 1) -> Rank:
        """The first process of this rank, or a later one; waits for it."""

        def look() -> Rank | None:
            self.check()
            ranks = self.ranks(number)
            return ranks[process - 1] if len(ranks) >= process else None

        return eventually(look, f"process {process} of rank {number}", 30.0)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in events.read(self.trace) if event["event"] == name]

    def warm_spares(self, count: int = 1) -> list[int]:
        """Waits until so many spares are warm and unassigned."""

        def look() -> list[int] | None:
            self.check()
            gone = {event["pid"] for name in ("spare_assigned", "spare_exit") for event in self.events(name)}
            warm = [event["pid"] for event in self.events("worker_warm") if event["pid"] not in gone]
            return warm if len(warm) >= count else None

        return eventually(look, f"{count} warm spares", 30.0)

    def go(self, number: int, last_words: str = "") -> None:
        """Ends a rank's script with this code."""
        part = self.directory / f"go.{number}.part"
        part.write_text(last_words)
        part.rename(self.directory / f"go.{number}")

    def go_all(self, ranks: int = 2) -> None:
        """Ends the scripts of so many ranks well."""
        for number in range(ranks):
            self.go(number)

    def check(self) -> None:
        assert self.process.poll() is None, self.process.communicate()

    def processes(self, recursive: bool = True) -> list[psutil.Process]:
        """Everything below the launcher, or its own children."""
        return psutil.Process(self.process.pid).children(recursive=recursive)

    def wait(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Exit code and standard error."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr

    def until_said(self, line: str) -> None:
        """Waits for this line on standard error. After it, `rest` gives the others, not `wait`."""
        said = iter(self.process.stderr.readline, "")
        assert f"{line}\n" in said, f"it has ended without {line!r}"

    def rest(self) -> tuple[int, str]:
        """Exit code, and what it has said since `until_said`."""
        stderr = self.process.stderr.read()
        return self.process.wait(timeout=20), stderr

    def close(self) -> None:
        """Ends what a failed test has left."""
        below = self.processes() if self.process.poll() is None else []
        for process in below:
            process.kill()
        self.process.kill()
        self.process.communicate(timeout=20)


Start = Callable[..., Launch]


def assert_all_gone(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    # What lost its parent belongs to init, which may take a while to reap it.
    running = [
        process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    for process in running:
        process.kill()
    assert not running

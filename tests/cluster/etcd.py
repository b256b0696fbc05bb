"""The coordinator's store in etcd: three members and three coordinators, killed and stopped while a job recovers."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.credentials import Credentials
from swift_ft.lab.drill.cluster import COORDINATOR, JOB, LAUNCHER
from swift_ft.rpc.client import CoordinatorClient
from swift_ft_services.coordinator.etcd_store import LEASE_S, EtcdStore
from swift_ft_services.coordinator.store import MetadataStore, StoreConflict, StoreHeld, Transaction
from tests.cluster.rows import Row, row
from tests.frameworks.environment import ROOT, Unavailable
from tests.integration.again_world import Again

PLACE = ROOT / ".cluster" / "etcd"
STEPS = 400
SLOW = {"rank": 0, "what": "slow", "times": 100000}
TAKEOVER_S = 5.0


def cases(only: str) -> Iterator[Row]:
    for name, case in (
        ("a commit of any size is whole, and a holder that has lost its lease commits nothing", store),
        ("the holder is killed while a rank is lost", killed_holders),
        ("the holder is stopped for longer than its lease while a rank is lost", stopped_holders),
        ("an etcd member is killed while a rank is lost", killed_members),
        ("an etcd member is stopped for 4 s while a rank is lost", stopped_members),
    ):
        if only in name:
            yield case(name)


# --- etcd ---


def program() -> Path:
    """Returns Debian's etcd, which is unpacked beside the environment of the tests. Raises Unavailable."""
    there = PLACE / "usr" / "bin" / "etcd"
    if not there.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "download", "etcd-server"], cwd=PLACE, check=True, capture_output=True)
            (package,) = PLACE.glob("etcd-server_*.deb")
            subprocess.run(["dpkg-deb", "-x", package, PLACE], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise Unavailable(f"Debian's etcd-server cannot be had: {error}") from None
    return there


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Members:
    """(context manager) Three members on loopback."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        self._program = program()
        self._directory = directory
        ports = free_ports(2 * count)
        self.clients = [f"127.0.0.1:{port}" for port in ports[:count]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for number in range(len(self.clients)):
            self.start(number)
        deadline = time.monotonic() + 30
        while not all(self.is_healthy(number) for number in self.processes):
            if time.monotonic() > deadline:
                raise Unavailable("etcd's members do not find each other")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, number: int) -> None:
        urls = ",".join(f"m{n}={peer}" for n, peer in enumerate(self._peers))
        client, peer = f"http://{self.clients[number]}", self._peers[number]
        words = ["--name", f"m{number}", "--data-dir", str(self._directory / f"etcd{number}")]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            urls,
        ]
        with open(self._directory / f"etcd{number}.txt", "ab") as output:
            self.processes[number] = subprocess.Popen([self._program, *words], stdout=output, stderr=output)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def is_healthy(self, number: int) -> bool:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://{self.clients[number]}/health", timeout=1) as reply,
        ):
            return json.loads(reply.read())["health"] == "true"
        return False

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.clients)}"

    def open(self, name: str = "a:1") -> EtcdStore:
        return EtcdStore(self.clients, "test", Credentials(), name=lambda: name)


def store(name: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="swift-etcd-") as place, Members(Path(place)) as members:
        try:
            return row(name, **asyncio.run(_store(members)))
        except AssertionError as error:
            return row(name, f"{error}")


async def _held(take: Callable[[], Awaitable[None]]) -> float:
    began = time.monotonic()
    while True:
        try:
            await take()
            return time.monotonic() - began
        except StoreHeld:
            await asyncio.sleep(0.1)


async def _store(members: Members) -> dict[str, object]:
    first, second = members.open(), members.open("b:1")
    await first.hold()
    big = {f"k{number}": "é" * (number * 2000) for number in range(200)}
    await first.commit(Transaction(puts=big))
    assert {key: stored.value for key, stored in (await first.read("k")).items()} == big, "a part is missing"
    await first.commit(Transaction(puts=dict.fromkeys(big, "small"), deletes=["none"]))
    assert {stored.value for stored in (await first.read("k")).values()} == {"small"}, "a part is left"
    began = time.monotonic()
    for number in range(100):
        await first.commit(Transaction(puts={"a": str(number)}))
    commit_s = (time.monotonic() - began) / 100
    for member in members.processes:  # one after the other is away, and commits go on
        members.kill(member)
        await first.commit(Transaction(puts={"away": str(member)}))
        members.start(member)
        deadline = time.monotonic() + 20
        while not members.is_healthy(member):
            assert time.monotonic() < deadline, "a member does not come back"
            await asyncio.sleep(0.1)
    assert await _refused(second.hold), "two hold the store"
    assert first._renewing is not None
    first._renewing.cancel()  # as if it were stopped
    taken_s = await _held(second.hold)
    assert not first.holds(), "a holder without a lease answers"
    there = await second.read()
    assert await _conflict(first), "a holder without a lease commits"
    assert await second.read() == there, "a holder without a lease has committed"
    await second.close()
    at_once_s = await _held(first.hold)
    await first.close()
    return {
        "milliseconds_of_a_commit": round(1000 * commit_s, 2),
        "seconds_until_a_lost_lease_is_taken": round(taken_s, 2),
        "seconds_after_a_clean_end": round(at_once_s, 2),
    }


async def _refused(hold: Callable[[], Awaitable[None]]) -> bool:
    with suppress(StoreHeld):
        await hold()
        return False
    return True


async def _conflict(lost: MetadataStore) -> bool:
    with suppress(StoreConflict):
        await lost.commit(Transaction(puts={"a": "of a former holder"}))
        return False
    return True


# --- jobs ---


class Several(Again):
    """A job with three coordinators on one etcd."""

    def __init__(self, directory: Path, members: Members) -> None:
        super().__init__(directory)
        self._members = members
        self._names = [f"{COORDINATOR}{number}" for number in range(3)]

    def _start(self) -> None:
        self._start_service("logserver")
        self._await_service("logserver")
        for name in self._names:
            self.start_coordinator(name)
        for name in self._names:
            self._await_service(name)
        self._addresses[COORDINATOR] = ",".join(self._addresses[name] for name in self._names)
        self._ranks_killed = 0

    def start_coordinator(self, name: str) -> None:
        words = ["swift_ft_services.coordinator", "--store", self._members.url]
        words += ["--address-file", str(self.directory / f"{name}.address")]
        words += ["--listen", self._addresses.get(name, "127.0.0.1:0")]
        words += ["--log-servers", f"machine0={self._addresses['logserver']}"]
        self._spawn(name, words)

    def poll(self) -> int | None:
        return self._processes[LAUNCHER].poll()

    @property
    def coordinators(self) -> str:
        return self._addresses[COORDINATOR]

    def holder(self) -> str | None:
        """The name of the coordinator that has said last that it holds the store."""
        said = [(event["t"], event["pid"]) for event in self.events("holds_store")]
        of = {self._processes[name].pid: name for name in self._names}
        return next((of[pid] for _, pid in sorted(said, reverse=True) if pid in of), None)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._processes[name].pid, number)

    def kill_coordinator(self, name: str) -> None:
        process = self._processes[name]
        process.kill()
        while process.poll() is None:
            time.sleep(0.01)
        self.start_coordinator(name)


class Trouble:
    """(called again and again while the job runs) Kills a rank once the job has come to a new step, and makes something
    else happen within the recovery."""

    def __init__(self, job: Several, happen: Callable[[], None], times: int, seed: int) -> None:
        self.times = 0
        self._client = CoordinatorClient(job.coordinators, JOB)
        self._watcher = self._client.watch()
        self._happen = happen
        self._most = times
        self._random = random.Random(seed)
        self._generation = 0
        self._due = 0.0

    def __call__(self) -> bool:
        view, now = self._watcher.latest, time.monotonic()
        if self._due and now >= self._due:
            self._due = 0.0
            self._happen()
            self.times += 1
        elif view is not None and not self._due and self.times < self._most and self._has_run_on(view):
            self._generation = view.generation
            victim = self._random.choice(view.members)
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
            self._due = now + self._random.random() * 0.5
        return False

    def _has_run_on(self, view: pb.View) -> bool:
        return view.state == pb.RUNNING and view.generation > self._generation and not view.setbacks

    def close(self) -> None:
        self._client.close()


def job(name: str, times: int, make: Callable[[Several, Members], Callable[[], None]]) -> Row:
    """Runs a job to its end, with so many kills of ranks and what `make` returns."""
    with tempfile.TemporaryDirectory(prefix="swift-etcd-") as place:
        directory = Path(place)
        (directory / "twin").mkdir()
        (directory / "job").mkdir()
        with Again(directory / "twin") as twin:
            if twin.unlucky(STEPS):
                return row(name, f"the run without failures failed: {twin.said[-300:]}")
            digests = twin.digests(STEPS)
        with Members(directory) as members, Several(directory / "job", members) as several:
            trouble = Trouble(several, make(several, members), times, seed=1)
            several.kill_when = trouble
            try:
                code = several.run(
                    "unlucky.py",
                    several.directory,
                    STEPS,
                    json.dumps([SLOW]),
                    1,
                    5,
                    patience_s=60 + 20 * times,
                )
                problem = _problem(several, code, trouble, digests)
            except AssertionError as error:
                problem = " ".join(str(error).split())[-300:]
            finally:
                trouble.close()
            return row(name, problem, **_figures(several, trouble))


def _problem(job: Several, code: int, trouble: Trouble, digests: list[dict[str, Any]]) -> str:
    if code:
        return f"exit code {code}: {' '.join(job.said.split())[-300:]}"
    if job.digests(STEPS) != digests:
        return "other bits than those of the run without failures"
    used = Counter((event["generation"], event["state"]) for event in job.events("state"))
    if twice := [key for key, count in used.items() if count > 1]:
        return f"used twice: {twice}"
    if not trouble.times:
        return "nothing has happened"
    late = [seconds for seconds in _takeovers(job) if seconds > TAKEOVER_S]
    return f"taken over after {max(late):.1f} s" if late else ""


def _takeovers(job: Several) -> list[float]:
    """Seconds from each kill of a holder to the next one that holds the store."""
    held = sorted(event["t"] for event in job.events("holds_store"))
    lost = sorted(event["t"] for event in job.events("holder_lost"))
    return [min((t for t in held if t > at), default=at + 60.0) - at for at in lost]


def _figures(job: Several, trouble: Trouble) -> dict[str, object]:
    taken = _takeovers(job)
    generations = {event["generation"] for event in job.events("state")}
    slowest = {"slowest_takeover_in_seconds": round(max(taken), 2)} if taken else {}
    return {"times": trouble.times, "generations": len(generations), "takeovers": len(taken), **slowest}


def killed_holders(name: str) -> Row:
    def make(several: Several, _: Members) -> Callable[[], None]:
        def happen() -> None:
            if (holder := several.holder()) is not None:
                several.trace("holder_lost", holder=holder)
                several.kill_coordinator(holder)

        return happen

    return job(name, int(os.environ.get("TAKEOVERS", "20")), make)


def stopped_holders(name: str) -> Row:
    def make(several: Several, _: Members) -> Callable[[], None]:
        def happen() -> None:
            if (holder := several.holder()) is not None:
                several.trace("holder_lost", holder=holder)
                several.signal(holder, signal.SIGSTOP)
                time.sleep(LEASE_S + 2.0)
                several.signal(holder, signal.SIGCONT)

        return happen

    return job(name, 6, make)


def killed_members(name: str) -> Row:
    def make(_: Several, members: Members) -> Callable[[], None]:
        numbers = iter(list(members.processes) * 100)

        def happen() -> None:
            member = next(numbers)
            members.kill(member)
            time.sleep(1.0)
            members.start(member)

        return happen

    return job(name, 9, make)


def stopped_members(name: str) -> Row:
    def make(_: Several, members: Members) -> Callable[[], None]:
        numbers = iter(list(members.processes) * 100)

        def happen() -> None:
            process = members.processes[next(numbers)]
            process.send_signal(signal.SIGSTOP)
            time.sleep(4.0)
            process.send_signal(signal.SIGCONT)

        return happen

    return job(name, 6, make)

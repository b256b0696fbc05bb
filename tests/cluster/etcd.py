"""The coordinator's store in etcd: three members and three coordinators, killed and stopped while a job recovers."""

import asyncio
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.credentials import Credentials
from swift_ft.lab.drill.cluster import COORDINATOR, JOB, LAUNCHER
from swift_ft.launch.standalone import free_port
from swift_ft.tools.credentials import CertificateAuthority
from swift_ft_services.coordinator.etcd_store import LEASE_S, EtcdStore
from swift_ft_services.coordinator.store import MetadataStore, StoreConflict, StoreHeld
from tests.cluster.rows import Row, row
from tests.frameworks.environment import ROOT, Unavailable
from tests.integration.again_world import Again
from tests.integration.namespaces import Network, impossible

PLACE = ROOT / ".cluster" / "etcd"
STEPS = 400
SLOW = {"rank": 0, "what": "slow", "times": 100000}
TAKEOVER_S = 5.0
NODES = ("m0", "m1", "m2")
"""Machines of etcd's members, where each has its own."""


def cases(only: str) -> Iterator[Row]:
    for name, case in (
        ("a commit of any size is whole, and a holder that has lost its lease commits nothing", store),
        ("the holder is killed while a rank is lost", killed_holders),
        ("the holder is stopped for longer than its lease while a rank is lost", stopped_holders),
        ("an etcd member is killed while a rank is lost", killed_members),
        ("an etcd member is stopped for 4 s while a rank is lost", stopped_members),
        ("an etcd member is cut off for 4 s while a rank is lost", cut_members),
        ("over TLS with certificates on both sides, the holder is killed while a rank is lost", over_tls),
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

    def __init__(self, directory: Path, *, network: Network | None = None, tls: bool = False) -> None:
        """`network`: with machines of the names `NODES`, one for each; without it all are on loopback."""
        self._program = program()
        self._directory = directory
        self._network = network
        hosts = ["127.0.0.1" if network is None else network.host(node) for node in NODES]
        ports = free_ports(2 * len(NODES))
        self.clients = [f"{host}:{port}" for host, port in zip(hosts, ports[::2], strict=True)]
        self._peers = [f"{host}:{port}" for host, port in zip(hosts, ports[1::2], strict=True)]
        self._scheme = "https" if tls else "http"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.credentials = Credentials(insecure=network is not None)
        if tls:
            authority = CertificateAuthority(directory / "authority")
            self._server = authority.issue("member", *hosts)
            own = authority.issue("coordinator")
            self.credentials = Credentials(ca=authority.certificate, certificate=own.certificate, key=own.key)

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
        urls = ",".join(f"m{n}={self._scheme}://{peer}" for n, peer in enumerate(self._peers))
        client, peer = (f"{self._scheme}://{there[number]}" for there in (self.clients, self._peers))
        words = [str(self._program), f"--name=m{number}", f"--data-dir={self._directory}/etcd{number}"]
        words += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        words += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        words += [f"--initial-cluster={urls}"]
        if self._scheme == "https":
            pair = (f"cert-file={self._server.certificate}", f"key-file={self._server.key}")
            for of in ("", "peer-"):
                words += [f"--{of}{flag}" for flag in (*pair, f"trusted-ca-file={self.credentials.ca}")]
                words += [f"--{of}client-cert-auth"]
        if self._network is not None:
            words = [*self._network.inside(NODES[number]), *words]
        with open(self._directory / f"etcd{number}.txt", "ab") as output:
            self.processes[number] = subprocess.Popen(words, stdout=output, stderr=output)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def is_healthy(self, number: int) -> bool:
        url, context = f"{self._scheme}://{self.clients[number]}/health", None
        if self._scheme == "https":
            context = ssl.create_default_context(cafile=self.credentials.ca)
            context.load_cert_chain(self.credentials.certificate, self.credentials.key)
        with suppress(OSError), urllib.request.urlopen(url, timeout=1, context=context) as reply:
            return json.loads(reply.read())["health"] == "true"
        return False

    @property
    def flags(self) -> list[str]:
        """Of a coordinator."""
        given = self.credentials
        tls = {"--store-ca": given.ca, "--store-cert": given.certificate, "--store-key": given.key}
        words = [str(word) for flag in tls.items() if flag[1] for word in flag]
        return [*words, *["--insecure"] * given.insecure]

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.clients)}"

    def open(self, name: str = "a:1") -> EtcdStore:
        return EtcdStore(self.clients, "test", self.credentials, name=lambda: name)


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
    await first.commit(big)
    assert await first.read("k") == big, "a part is missing"
    await first.commit(dict.fromkeys(big, "small"), ["none"])
    assert set((await first.read("k")).values()) == {"small"}, "a part is left"
    began = time.monotonic()
    for number in range(100):
        await first.commit({"a": str(number)})
    commit_s = (time.monotonic() - began) / 100
    for member in members.processes:  # one after the other is away, and commits go on
        members.kill(member)
        await first.commit({"away": str(member)})
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
        await lost.commit({"a": "of a former holder"})
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
        for name in self._log_servers:
            self._start_service(name)
        for name in self._log_servers:
            self._await_service(name)
        for name in self._names:
            self.start_coordinator(name)
        for name in self._names:
            self._await_service(name)
        self._addresses[COORDINATOR] = ",".join(self._addresses[name] for name in self._names)

    def start_coordinator(self, name: str) -> None:
        words = ["swift_ft_services.coordinator", "--store", self._members.url]
        words += ["--address-file", str(self.directory / f"{name}.address")]
        words += ["--listen", self._addresses.setdefault(name, f"127.0.0.1:{free_port()}")]
        named = [f"machine{number}={address}" for number, address in enumerate(self.log_addresses)]
        self._spawn(name, [*words, "--log-servers", ",".join(named), *self._members.flags])

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
    else happen within the recovery; or makes it happen while the job trains."""

    def __init__(
        self,
        job: Several,
        happen: Callable[[], None],
        times: int,
        seed: int,
        *,
        in_training: int = 0,
        loses_rank: bool = False,
    ) -> None:
        """`in_training`: of how many times. `loses_rank`: what happens makes a recovery by itself."""
        self.times = 0
        self._client = CoordinatorClient(job.coordinators, JOB)
        self._watcher = self._client.watch()
        self._happen = happen
        self._random = random.Random(seed)
        self._in_recovery = [True] * (times - in_training) + [False] * in_training
        self._random.shuffle(self._in_recovery)
        self.times_wanted = times
        self._loses_rank = loses_rank
        self._generation = 0
        self._due = 0.0

    def __call__(self) -> bool:
        view, now = self._watcher.latest, time.monotonic()
        if self._due and now >= self._due:
            self._due = 0.0
            self._happen()
            self.times += 1
        elif view is not None and not self._due and self.times < self.times_wanted and self._has_run_on(view):
            if in_recovery := self._in_recovery[self.times]:
                victim = self._random.choice(view.members)
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
            self._generation = view.generation - (not in_recovery and not self._loses_rank)
            self._due = now + self._random.random() * 0.5
        return False

    def _has_run_on(self, view: pb.View) -> bool:
        return view.state == pb.RUNNING and view.generation > self._generation and not view.setbacks

    def close(self) -> None:
        self._client.close()


def digests_wanted(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Of a run that never fails. Raises AssertionError."""
    directory.mkdir()
    with Again(directory) as twin:
        assert not twin.unlucky(steps), f"the run without failures failed: {twin.said[-300:]}"
        return twin.digests(steps)


def job(
    name: str,
    times: int,
    make: Callable[[Several, Members], Callable[[], None]],
    *,
    network: Network | None = None,
    tls: bool = False,
) -> Row:
    """Runs a job to its end, with so many kills of ranks and what `make` returns. `network`, `tls`: of `Members`."""
    with tempfile.TemporaryDirectory(prefix="swift-etcd-") as place:
        directory = Path(place)
        (directory / "job").mkdir()
        steps = max(STEPS, 10 * times)
        digests = digests_wanted(directory / "twin", steps)
        with (
            Members(directory, network=network, tls=tls) as members,
            Several(directory / "job", members) as several,
        ):
            trouble = Trouble(several, make(several, members), times, seed=1)
            several.kill_when = trouble
            try:
                code = several.run(
                    "unlucky.py",
                    several.directory,
                    steps,
                    json.dumps([SLOW]),
                    1,
                    5,
                    patience_s=60 + 20 * times,
                )
                problem = problem_of(several, code, trouble, digests, steps)
            except AssertionError as error:
                problem = " ".join(str(error).split())[-300:]
            finally:
                trouble.close()
            return row(name, problem, **figures_of(several, trouble))


def problem_of(job: Several, code: int, trouble: Trouble, digests: list[dict[str, Any]], steps: int) -> str:
    if code:
        return f"exit code {code}: {' '.join(job.said.split())[-300:]}"
    if job.digests(steps) != digests:
        return "other bits than those of the run without failures"
    used = Counter((event["generation"], event["state"]) for event in job.events("state"))
    if twice := [key for key, count in used.items() if count > 1]:
        return f"used twice: {twice}"
    if trouble.times < trouble.times_wanted:
        return f"it has happened {trouble.times} times"
    late = [seconds for seconds in _takeovers(job) if seconds > TAKEOVER_S]
    return f"taken over after {max(late):.1f} s" if late else ""


def _takeovers(job: Several) -> list[float]:
    """Seconds from each kill of a holder to the next one that holds the store."""
    held = sorted(event["t"] for event in job.events("holds_store"))
    lost = sorted(event["t"] for event in job.events("holder_lost"))
    return [min((t for t in held if t > at), default=at + 60.0) - at for at in lost]


def figures_of(job: Several, trouble: Trouble) -> dict[str, object]:
    taken = _takeovers(job)
    generations = {event["generation"] for event in job.events("state")}
    slowest = {"slowest_takeover_in_seconds": round(max(taken), 2)} if taken else {}
    return {"times": trouble.times, "generations": len(generations), "takeovers": len(taken), **slowest}


def kill_holder(several: Several) -> None:
    until = time.monotonic() + 60.0
    while (holder := several.holder()) is None:  # the last one was killed a moment ago
        assert time.monotonic() < until, "no coordinator takes over"
        time.sleep(0.02)
    several.trace("holder_lost", holder=holder)
    several.kill_coordinator(holder)


def killed_holders(
    name: str, times: int = int(os.environ.get("TAKEOVERS", "20")), *, tls: bool = False
) -> Row:
    return job(name, times, lambda several, _: partial(kill_holder, several), tls=tls)


def over_tls(name: str) -> Row:
    return killed_holders(name, 3, tls=True)


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


def cut_members(name: str) -> Row:
    """In a network namespace, so that etcd's members may be machines on a switch, and the rest on another one."""
    if why := impossible():
        raise Unavailable(why)
    program()
    call = f"import json; from tests.cluster import etcd; print(json.dumps(etcd.cut_members_here({name!r})))"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", call],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        return row(name, f"exit code {done.returncode}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def cut_members_here(name: str) -> Row:
    """Each member is cut off once from all, once from the coordinators alone, and once from the other members alone."""
    network = Network("meta", *NODES, own="meta")

    def make(_several: Several, members: Members) -> Callable[[], None]:
        cuts = ((node, away) for away in (("meta", *NODES), ("meta",), NODES) for node in NODES)

        def happen() -> None:
            node, away = next(cuts)
            ways = [(node, other) for other in away if other != node]
            ways += [(other, node) for node, other in ways]
            for sender, receiver in ways:
                network.lose(sender, receiver)
            time.sleep(4.0)
            assert not members.is_healthy(NODES.index(node)), f"{node} is not cut off"
            for sender, receiver in ways:
                network.find(sender, receiver)

        return happen

    try:
        return job(name, 9, make, network=network)
    finally:
        network.close()

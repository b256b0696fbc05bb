"""Checkpoints and cold segments in S3: kills between any two requests, errors, slow answers; drills in every phase."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.errors import LogUnavailable, ServiceError, SwiftError
from swift_ft.lab.drill.cluster import JOB as DRILL_JOB
from swift_ft.lab.drill.cluster import LOG_SERVER
from swift_ft.lab.drill.run import LOG_LOST_S
from swift_ft.log import admin
from swift_ft.log.protocol import open_channel
from swift_ft.objects import Objects
from swift_ft.state.checkpoint_place import MARK
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.digests import digest_of
from tests.cluster import s3, saver
from tests.cluster.rows import Row, row
from tests.cluster.saver import state
from tests.frameworks.environment import ROOT
from tests.integration.again_world import Again
from tests.integration.forked import ForkedCluster
from tests.integration.logserver_world import JOB, LogServer
from tests.integration.test_from_checkpoints import KILL, SLOW, STEPS, lose_coordinator
from tests.integration.watched import Run
from tests.unit.checkpoint.holding import Holding
from tests.unit.log.append_call import Call
from tests.unit.log.frames import STREAM, body_of, frame_of

T = TypeVar("T")

URL = f"s3://{s3.BUCKET}/jobs"
_DRILL = ("drill", "--model", "tiny", "--microbatches", "4", "--steps", "15", "--checkpoint-every", "5")
_PAIR = ("--stages", "2", "--replicas", "2")
DRILLS: dict[str, tuple[str, ...]] = {
    "a stage of a pipeline is killed in forward": ("--kill", "rank=2,step=7,microbatch=1,phase=forward"),
    "… in backward": ("--kill", "rank=2,step=7,microbatch=1,phase=backward"),
    "… in the optimizer's step": ("--kill", "rank=1,step=7,phase=optimizer"),
    "… while it saves": ("--kill", "rank=1,step=9,phase=save"),
    "… while another one replays": ("--kill", "rank=1,step=7", "--kill", "rank=2,phase=replay"),
    "a replica is killed in its reduction": (*_PAIR, "--kill", "rank=1,step=7,phase=reduce"),
    "all ranks load their checkpoints": ("--strategy", "checkpoint", "--kill", "rank=2,step=8"),
}


def cases(only: str) -> Iterator[Row]:
    with s3.serving() as store, s3.environment(store):
        for name, case in (
            ("a rank is killed between any two requests of a save", kills),
            ("answers are lost, errors and slow answers", errors),
            ("a log server is killed between any two requests of its cold tier", log_kills),
            ("the coordinator's directory is lost, and its checkpoints are in the store", adoption),
            ("two log servers are lost with their disks, and a rank replays what they had moved", lost_logs),
        ):
            if only in name:
                store.again()
                yield case(store, name)
        with tempfile.TemporaryDirectory(prefix="swift-twins-") as twins:
            for name, words in DRILLS.items():
                if only in name:
                    store.again()
                    yield drill(store, name, words, Path(twins))
            if only in (
                name := "a third of all requests fails, the rest is slow, in training and in recoveries"
            ):
                store.again()
                store.rule = Trouble(1)
                yield drill(store, name, DRILLS["… in backward"], Path(twins))
            if only in (name := "the store is away for 8 s while a rank is lost"):
                store.again()
                store.rule = Away(8.0)
                yield drill(store, name, DRILLS["… in backward"], Path(twins))


class Trouble:
    """A third of all requests fails; the others take up to 0.4 s."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, _asked: s3.Asked) -> s3.Answer:
        if (place := self._random.random()) < 0.33:
            return s3.Answer(status=503) if place < 0.22 else s3.Answer(lost=True)
        return s3.Answer(after_s=0.4 * self._random.random())


class Away:
    """From the first checkpoint of version 5 on nothing is answered for a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0

    def __call__(self, asked: s3.Asked) -> s3.Answer | None:
        if not self._until and "v00000005" in asked.path:
            self._until = time.monotonic() + self._seconds
        return s3.Answer(status=503) if time.monotonic() < self._until else None


# --- drills ---


def drill(store: s3.Store, name: str, words: tuple[str, ...], twins: Path) -> Row:
    """Bits are compared with those of a run that never failed, whose checkpoints are in a directory."""
    twin = twins / str(words[: len(_PAIR)] == _PAIR)
    with tempfile.TemporaryDirectory(prefix="swift-drill-") as place:
        path = Path(place) / "report.json"
        command = [sys.executable, "-m", "swift_ft.cli", *_DRILL, *words, "--checkpoint-dir", URL]
        command += ["--twin", str(twin), "--json", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=_environment(), cwd=ROOT
        )
        if not path.exists():
            return row(name, f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(path.read_text())
    checks = [check["name"] for check in report.get("checks", []) if check["answer"] is not True]
    problem = ""
    if (report["verdict"], report["bitwise_equal"], report["survivors_kept"]) != ("PASS", True, True):
        return row(name, f"{report['verdict']}: {', '.join(checks)}")
    if not any("index.jsonl" in asked.path for asked in store.requests):
        problem = "nothing was asked of the store"
    return row(
        name,
        problem,
        requests=len(store.requests),
        seconds_to_recover=round(report["recovery_seconds"]["total"], 2),
        steps_per_second=round(report["throughput"]["before"], 2),
    )


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# --- a save that is killed ---


def kills(store: s3.Store, name: str) -> Row:
    """A process saves version 2 over an older history's, and prunes version 1. It is killed when its n-th request was
    carried out and not answered. Whoever comes next finds version 1 or 2, whole; saves version 2 anew; and nothing else
    is left of it."""
    found = {"old": 0, "new": 0}
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.cluster.saver"])
    for number in range(1, 1000):
        url = f"{URL}/killed-{number}"
        _save(url, 1, generation=1)
        _save(url, 2, generation=1)
        store.again()
        process = processes.Process(target=saver.main, args=(url, 2))
        store.after = partial(_kill, process, number)
        process.start()
        process.join(120)
        store.again()
        if process.exitcode != -signal.SIGKILL:
            problem = f"exit code {process.exitcode}" if process.exitcode else ""
            problem = problem or ("" if all(found.values()) and number > 8 else f"only {number - 1} kills")
            return row(name, problem, kills=number - 1, **found)
        try:
            found[_found(url)] += 1
            _go_on(url)
        except (AssertionError, ServiceError) as error:
            return row(name, f"killed at request {number}: {error!r}")
    return row(name, "it never ends")


def _kill(process: Any, number: int, asked: s3.Asked) -> None:
    if asked.number == number:
        process.kill()  # the kernel ends it before it sees the answer


def _save(url: str, version: int, generation: int) -> None:
    store = CheckpointStore(url, 0, Holding(entered=generation))
    store.save(version, state(version, generation), lambda _version: None, lambda _unsaved: None)
    store.wait()


def _found(url: str) -> str:
    """Returns which history's version 2 there is."""
    loaded = digest_of(CheckpointStore(url, 0, Holding()).load(2))
    kinds = {digest_of(state(2, 1)): "old", digest_of(state(2, 2)): "new"}
    assert loaded in kinds, "neither the older nor the newer state"
    try:
        assert digest_of(CheckpointStore(url, 0, Holding()).load(1)) == digest_of(state(1, 1))
    except ServiceError:
        assert kinds[loaded] == "new", "version 1 is gone before version 2 was saved"
    return kinds[loaded]


def _go_on(url: str) -> None:
    _save(url, 2, generation=3)
    heir = CheckpointStore(url, 0, Holding(entered=3))
    assert digest_of(heir.load(2)) == digest_of(state(2, 3))
    place = heir._place
    assert [(shard.generation, shard.whole) for shard in place.shards(2, 0)] == [(3, True)]


# --- answers that go wrong ---


def errors(store: s3.Store, name: str) -> Row:
    """Saves and loads under `Trouble`: every save ends, and what is loaded are its bits."""
    began, count = time.monotonic(), 12
    url = f"{URL}/troubled"
    for version in range(count):
        store.rule = Trouble(version)
        saving = CheckpointStore(url, 0, Holding(entered=1))
        durable: list[int] = []
        saving.save(version, state(version, 1), durable.append, lambda _unsaved: None)
        until = time.monotonic() + 60
        while not durable and time.monotonic() < until:
            time.sleep(0.02)
        if durable != [version]:
            return row(name, f"version {version} was not saved: {saving.unsaved}")
        if digest_of(CheckpointStore(url, 0, Holding()).load(version)) != digest_of(state(version, 1)):
            return row(name, f"version {version} has other bits")
        saving.close()
    seconds = round((time.monotonic() - began) / count, 2)
    return row(name, saves=count, seconds_each=seconds, requests=len(store.requests))


# --- a coordinator that has lost its state ---


def adoption(_store: s3.Store, name: str) -> Row:
    """All processes die once version 5 is marked; the coordinator's directory is removed. Without the flag the
    job is refused; with it, it goes on at step 5, loses a rank, and ends with the bits of a run that never failed."""
    with tempfile.TemporaryDirectory(prefix="swift-adoption-") as place:
        for folder in ("twin", "lost"):
            (Path(place) / folder).mkdir()
        with Again(Path(place) / "twin") as twin:
            if twin.unlucky(STEPS):
                return row(name, f"the twin: {twin.said[-300:]}")
            digests = twin.digests(STEPS)
        with Again(Path(place) / "lost") as job:
            job.checkpoints = f"{URL}/adopted"
            objects = Objects.at(f"{job.checkpoints}/{DRILL_JOB}")
            job.kill_when = lambda: any(entry.path.endswith(MARK) for entry in objects.entries("v00000005"))
            code = job.unlucky(STEPS, SLOW)
            lose_coordinator(job)
            codes = [code, job.unlucky(STEPS)]
            refused = any(
                "to go on there say --from-checkpoints s3://" in line for line in job.said.splitlines()
            )
            began = time.monotonic()
            codes.append(job.unlucky(STEPS, KILL, flags=["--from-checkpoints", str(job.checkpoints)]))
            if codes != [-signal.SIGKILL, 2, 0]:
                return row(name, f"exit codes {codes}: {job.said[-300:]}")
            problem = "" if refused else "it was refused without the place to go on from"
            if "goes on at step 5, with its checkpoint there" not in job.said:
                problem = "it did not go on at step 5"
            if job.digests(STEPS) != digests:
                problem = "other bits"
            return row(name, problem, seconds=round(time.monotonic() - began, 1))


# --- the log's cold tier ---

READ = "s0.F"
"""What the lost rank needs."""

_RECORDS, _BODY_BYTES, _LIMIT_S = 40, 20_000, 60.0
_QUOTA = ("--quota-bytes", "300000", "--segment-bytes", "50000")


class Supervised:
    """A log server that is killed at its n-th request, and started again whenever it is gone."""

    def __init__(self, store: s3.Store, place: Path, url: str, number: int) -> None:
        self.server = LogServer(place / "log", "--cold", url, *_QUOTA)
        self.url = url
        self.kills = 0
        self._number = number
        self._over = threading.Event()
        store.after = self._kill
        self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _kill(self, asked: s3.Asked) -> None:
        if asked.number == self._number and self.server.process is not None:
            self.kills += 1
            self.server.process.kill()  # the kernel ends it before it sees the answer

    def _start(self) -> None:
        try:
            self.server.start()
        except AssertionError:
            assert self.kills
            self.server.start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            if self.server.process is None or self.server.process.poll() is not None:
                self._start()

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.server.stop()

    # As its clients do: a call that is cut off by the kill is made again.

    def fence(self) -> None:
        self._patiently(lambda: self.server.fence(1))

    def write(self) -> None:
        """All records, one after the other. What was acknowledged is not sent again unless the server asks for it."""
        acked = 0

        def write() -> None:
            nonlocal acked
            call = Call(_Channel(self.server.address))
            call.open(acked=acked)
            assert call.opened[STREAM] >= acked, f"records from {call.opened[STREAM]} on are gone"
            acked = call.opened[STREAM]
            while acked < _RECORDS:
                call.send(_frame(acked))
                call.until_acked(acked + 1)
                acked += 1

        self._patiently(write)

    def read(self) -> bytes:
        request = log_pb2.ReadRequest(job=JOB, stream=STREAM, from_step=0, follow=False)

        def read() -> bytes:
            stub = log_pb2_grpc.LogStub(open_channel(self.server.address))
            return b"".join(reply.frames for reply in stub.Read(request, timeout=30))

        return self._patiently(read)

    def trim(self) -> None:
        self._patiently(lambda: admin.trim(self.server.address, JOB, _RECORDS, 20.0))

    def left(self) -> list[str]:
        return [entry.path for entry in Objects.at(self.url).entries() if entry.path != "probe"]

    @staticmethod
    def _patiently(call: Callable[[], T]) -> T:
        until = time.monotonic() + _LIMIT_S
        while True:
            try:
                return call()
            except (grpc.RpcError, LogUnavailable):
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)


class _Channel:
    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)


def _frame(sequence: int) -> bytes:
    return frame_of(sequence, body=body_of(sequence, _BODY_BYTES))[1]


def log_kills(store: s3.Store, name: str) -> Row:
    """A log server takes several times its quota, and is killed when its n-th request was carried out. All that it has
    acknowledged is read, also after one more start. A trim leaves nothing in the store."""
    sent = b"".join(map(_frame, range(_RECORDS)))
    for number in range(1, 1000):
        store.again()
        with tempfile.TemporaryDirectory(prefix="swift-log-") as place:
            log = Supervised(store, Path(place), f"{URL}/log-{number}", number)
            problem = ""
            try:
                log.fence()
                log.write()
                for _ in range(2):
                    problem = problem or ("" if log.read() == sent else "other records are read")
                    log.server.stop()
                log.trim()
                until = time.monotonic() + _LIMIT_S
                while (left := log.left()) and time.monotonic() < until:
                    time.sleep(0.1)
                problem = problem or ("it left " + ", ".join(left) if left else "")
            except (AssertionError, grpc.RpcError, SwiftError) as error:
                problem = repr(error)
            code = log.end()
        problem = problem or (f"exit code {code}" if code else "")
        if problem:
            return row(name, f"killed at request {number}: {problem}")
        if not log.kills:
            return row(name, "" if number > 8 else f"only {number - 1} kills", kills=number - 1)
    return row(name, "it never ends")


class _ColdCluster(ForkedCluster):
    """Its log servers move records soon."""

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name.startswith(LOG_SERVER):
            arguments = [
                *arguments,
                "--cold",
                f"{URL}/lost",
                "--quota-bytes",
                "1000000",
                "--segment-bytes",
                "32768",
            ]
        super()._spawn(name, arguments)


def lost_logs(store: s3.Store, name: str) -> Row:
    """There are two copies of each record, and no checkpoint but the first. One server is lost with its disk; its
    streams get a third server, which has them from there on. The second server is lost with a rank when it has moved
    what came before. So the rank's replay reads what is in the store, and then the third server."""
    steps, trainer = 300, "long_interval.py"
    with tempfile.TemporaryDirectory(prefix="swift-lost-") as place:
        for folder in ("twin", "lost"):
            (Path(place) / folder).mkdir()
        twin = Run(Path(place) / "twin", trainer, steps, 0.0, ranks=2, spares=0)
        with twin.cluster:
            twin.end()
        servers = {"log_servers": 3, "copies": 2, "log_lost_s": LOG_LOST_S, "kind": _ColdCluster}
        run = Run(Path(place) / "lost", trainer, steps, 0.2, ranks=2, spares=1, **servers)
        with run.cluster:
            run.until(lambda: len(run.said("step_end", step=20)) == 2)
            addresses = run.cluster.log_addresses
            first, second = map(addresses.index, run.said("log_placed", rank=0)[-1]["servers"])
            run.cluster.kill_log_server("f0", first, for_good=True)
            run.until(lambda: len(run.said("resumed", generation=2)) == 2)
            joined = int(run.said("plan", generation=2)[-1]["target_version"])
            who = f"logserver{second}"
            run.until(
                lambda: any(
                    event["stream"] == READ and event["below"] > 2 * (joined + 2)
                    for event in run.said("moved")
                    if event["pid"] == run.cluster.pids[who]
                )
            )
            before = len(store.requests)
            run.cluster.kill_log_server("f1", second, for_good=True)
            run.kill(1)
            run.end()
        asked = [
            asked.path for asked in store.requests[before:] if asked.method == "GET" and READ in asked.path
        ]
        plans = run.said("plan")
        ways = {entry["rank"]: (entry["strategy"], entry["from_version"]) for entry in plans[-1]["ranks"]}
        problem = "" if asked else "nothing was read from the store"
        if len(run.said("log_server_lost")) != 2 or ways.get(1) != ("REPLAY", 0):
            problem = f"rank 1 was to replay all: {ways}, {plans[-1]['reason']}"
        if run.digests() != twin.digests():
            problem = "other bits"
        (end,) = run.said("replay_end", rank=1) or [{}]
        return row(
            name,
            problem,
            steps_replayed=end.get("steps"),
            records=end.get("records"),
            objects_read=len(set(asked)),
        )

"""Checkpoints in S3: kills between any two requests, errors, slow answers; drills in every phase."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from swift_ft.errors import ServiceError
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.digests import digest_of
from tests.cluster import s3, saver
from tests.cluster.rows import Row, row
from tests.cluster.saver import state
from tests.frameworks.environment import ROOT
from tests.unit.checkpoint.holding import Holding

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
    assert [shard.generation for shard in place.shards(2, 0)] == [3]
    assert place.shards(2, 0, begun=True) == []


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

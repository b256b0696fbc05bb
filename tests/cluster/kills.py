"""Kill lists: each part of a cluster is killed again and again, in training and in recoveries.

One job on two machines (a launcher and a log server each), three coordinators on three etcd members, checkpoints in an
object store; all on loopback. Half of the kills come while the job trains. For the other half a rank is killed, and
the part within half a second. What was killed starts again, and nobody helps. `KILLS` and `SEED` are in the
environment.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from swift_ft.lab.drill.cluster import JOB, LAUNCHER
from tests.cluster import s3
from tests.cluster.etcd import (
    SLOW,
    Members,
    Several,
    Trouble,
    digests_wanted,
    figures_of,
    kill_holder,
    problem_of,
)
from tests.cluster.rows import Row, row
from tests.integration.trainer_world import TRAINERS

KILLS, SEED = int(os.environ.get("KILLS", "20")), int(os.environ.get("SEED", "1"))
STEPS = 600
EVERY = 10
AWAY_S = 6.0
MACHINES = 2


def cases(only: str) -> Iterator[Row]:
    wanted = [name for name in TARGETS if only in name]
    with tempfile.TemporaryDirectory(prefix="swift-kills-") as place, s3.serving() as store:
        with (
            s3.environment(store),
            contextlib.chdir(place),
        ):  # metrics of a job whose checkpoints are in a store
            digests = digests_wanted(Path(place) / "twin", STEPS) if wanted else []
            for number, name in enumerate(wanted):
                store.again()
                directory = Path(place) / f"job{number}"
                directory.mkdir()
                with Members(directory) as members, (site := Site(directory, members, store, number)):
                    trouble = Trouble(
                        site,
                        lambda site=site, name=name: TARGETS[name](site),  # type: ignore[misc]
                        KILLS,
                        SEED,
                        in_training=KILLS // 2,
                        loses_rank=TARGETS[name] is machine,
                    )
                    try:
                        code = site.train(trouble)
                        problem = problem_of(site, code, trouble, digests, STEPS)
                    except AssertionError as error:
                        problem = " ".join(str(error).split())[-300:]
                    finally:
                        trouble.close()
                    refused = {"refused requests": site.refused} if site.refused else {}
                    yield row(name, problem, seed=SEED, **figures_of(site, trouble), **refused)


class Site(Several):
    """Two machines beside the coordinators. Each may be killed whole."""

    def __init__(self, directory: Path, members: Members, store: s3.Store, number: int) -> None:
        super().__init__(directory, members)
        self.members, self.store = members, store
        self.random = random.Random(SEED)
        self.refused = 0
        """Requests to the object store."""
        self._checkpoints = f"s3://{s3.BUCKET}/kills{number}"
        self._log_servers = [f"logserver{number}" for number in range(MACHINES)]

    def train(self, trouble: Trouble) -> int:
        """Returns the first exit code that is not 0, or 0. Raises AssertionError if the job does not end."""
        until = time.monotonic() + 120 + 40 * KILLS
        for machine in range(MACHINES):
            self.launch(machine)
        while None in (codes := self._codes()) and not any(codes):
            trouble()
            if trouble.times == KILLS:  # the steps that are left take as long as they do without failures
                (self.directory / "mishap0").write_text("." * SLOW["times"])
            assert time.monotonic() < until, f"the job does not end: {self.output_tail()}"
            time.sleep(0.02)
        self.said = self.output_tail()
        return next(filter(None, codes), 0)

    def _codes(self) -> list[int | None]:
        return [self._processes[f"{LAUNCHER}{machine}"].poll() for machine in range(MACHINES)]

    def launch(self, machine: int) -> None:
        words = ["swift_ft.launch", "--nnodes", str(MACHINES), "--nproc-per-node", "1", "--spares", "1"]
        words += ["--coordinator", self.coordinators, "--job", JOB, "--checkpoint-dir", self._checkpoints]
        words += ["--local-addr", "127.0.0.1", str(TRAINERS / "unlucky.py"), str(self.directory), str(STEPS)]
        self._spawn(f"{LAUNCHER}{machine}", [*words, json.dumps([SLOW]), "1", str(EVERY)])

    def kill_tree(self, name: str) -> None:
        process = psutil.Process(self._processes[name].pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._processes[name].stop(0.0)

    def kill_log_server_of(self, machine: int) -> None:
        self.kill_tree(self._log_servers[machine])

    def start_log_server(self, number: int, *, emptied: bool) -> None:
        if emptied:
            shutil.rmtree(self.log_directories[number])
        self._start_service(self._log_servers[number])


# --- what is killed ---


def member(site: Site) -> None:
    number = site.random.randrange(len(site.members.processes))
    site.members.kill(number)
    time.sleep(site.random.random())
    site.members.start(number)


def log_server(site: Site) -> None:
    number = site.random.randrange(MACHINES)
    site.kill_log_server_of(number)
    time.sleep(site.random.random())
    site.start_log_server(number, emptied=False)


def machine(site: Site) -> None:
    """Its launcher, its ranks and its log server; the disk is lost every other time."""
    number = site.random.randrange(MACHINES)
    site.kill_tree(f"{LAUNCHER}{number}")
    site.kill_log_server_of(number)
    time.sleep(site.random.random())
    site.start_log_server(number, emptied=site.random.random() < 0.5)
    site.launch(number)


def object_store(site: Site) -> None:
    """It closes every connection, for up to AWAY_S."""
    until = time.monotonic() + AWAY_S * site.random.random()

    def rule(_asked: s3.Asked) -> s3.Answer:
        refused = time.monotonic() < until
        site.refused += refused
        return s3.Answer(refused=refused)

    site.store.rule = rule


TARGETS: dict[str, Callable[[Site], None]] = {
    "the coordinator that holds the store is killed": kill_holder,
    "an etcd member is killed": member,
    "a log server is killed": log_server,
    "a machine is killed": machine,
    "the object store is killed": object_store,
}

"""Ray: a head and nodes in network namespaces, each with a raylet of its own; examples/ray as it is."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from swift_ft import events
from tests.cluster.rows import Row, row
from tests.cluster.watched import Watched
from tests.frameworks.environment import ROOT, Unavailable, ensure
from tests.integration.namespaces import Network, impossible

PINS = ("ray==2.52.1",)
SCRIPT = ROOT / "examples" / "ray" / "train.py"
NODES, LATER = "abc", "d"
PORT = 6379
STEPS = 800
TIMEOUT_S = 1200.0
SOON = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}
"""When Ray notices that a node is lost: after seconds, not a minute, so that the job still runs."""
TRAINER = ("-m", "swift_ft.lab.drill.trainer", "--stages", "2", "--model", "tiny", "--microbatches", "4")
OWN_FILES = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && exec "$0" "$@"',
)
FLAGS = (
    "--node-ip-address",
    "{host}",
    "--object-store-memory",
    "80000000",
    "--disable-usage-stats",
    "--block",
)


def cases(only: str) -> Iterator[Row]:
    if why := impossible():
        raise Unavailable(why)
    python = ensure("ray", PINS)
    with tempfile.TemporaryDirectory(prefix="swift-ray-") as name:
        place = Path(name)
        with Cluster(place / "twin", python) as cluster:
            wanted = cluster.digests()
        for number, case in enumerate((nodes, launchers, terminated, driver)):
            words = (case.__doc__ or "").rstrip(".")
            if only not in words:
                continue
            with Cluster(place / str(number), python) as cluster:
                try:
                    figures = case(cluster)
                    yield row(words, "" if cluster.digests() == wanted else "other bits", **figures)
                except AssertionError as error:
                    yield row(words, " ".join(f"{error}".split()))


def nodes(cluster: "Cluster") -> dict[str, Any]:
    """A node that trains is killed, a new one comes, and the other node that has trained is killed."""
    cluster.until_step(20)
    first, second = cluster.training()
    killed = time.monotonic()
    cluster.kill(first)
    cluster.node(LATER)
    cluster.until(lambda: len(cluster.trace("script_start")) > 2, "the spare node")
    took_s = time.monotonic() - killed
    cluster.until(lambda: cluster.launchers(LATER), "the actor on the new node")
    cluster.until_step(20 + max(each["step"] for each in cluster.trace("loss")))
    cluster.kill(second)
    cluster.until(lambda: len(cluster.trace("script_start")) > 3, "the new node")
    return {"seconds_until_the_spare_trains": round(took_s, 1)}


def launchers(cluster: "Cluster") -> dict[str, Any]:
    """A launcher is killed, then the other one that has trained: their nodes are used again."""
    cluster.until_step(20)
    killed = cluster.training()
    for number, machine in enumerate(killed):
        cluster.launchers(machine)[0].kill()
        cluster.until(lambda number=number: len(cluster.trace("script_start")) > 2 + number, "a spare node")  # type: ignore[misc]
        cluster.until(lambda machine=machine: cluster.launchers(machine), "the next launcher")  # type: ignore[misc]
    return {"nodes_used_again": sum(bool(cluster.launchers(machine)) for machine in killed)}


def terminated(cluster: "Cluster") -> dict[str, Any]:
    """SIGTERM to the driver: a checkpoint, and the same command goes on there."""
    cluster.until_step(20)
    cluster.driver.terminate()
    code = cluster.driver.wait(TIMEOUT_S)
    saved = max(each["version"] for each in cluster.trace("checkpoint_durable"))
    cluster.submit()
    return {"exit_code": code, "saved_version": saved}


def driver(cluster: "Cluster") -> dict[str, Any]:
    """The driver is killed, and with it the coordinator: the same command goes on at the newest checkpoint."""
    cluster.until_step(20)
    cluster.driver.kill()
    cluster.driver.wait(20)
    cluster.until(lambda: not any(cluster.launchers(machine) for machine in NODES), "Ray to end the actors")
    cluster.submit()
    return {}


class Cluster(Watched):
    """A context manager."""

    limit_s = TIMEOUT_S

    def __init__(self, place: Path, python: Path) -> None:
        self.place, self._python = place, python
        self._stack = contextlib.ExitStack()
        self._blocked: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        for name in ("shared", "digests", "trace"):
            (self.place / name).mkdir(parents=True)
        self._tail, self._trace = events.Tail(self.place / "trace"), list[dict[str, Any]]()
        machines = ("head", *NODES, *LATER)
        self.network = Network(*machines, named=True)
        self._stack.callback(self.network.close)
        self._env = {
            **os.environ,
            "SWIFT_CREDENTIALS": str(self.place / "credentials"),
            "SWIFT_DIGESTS": str(self.place / "digests"),
            "SWIFT_EVENTS": str(self.place / "trace"),
            "GLOO_SOCKET_IFNAME": "e0",
            "RAY_ADDRESS": f"{self.network.host('head')}:{PORT}",
            **{f"RAY_health_check_{name}": value for name, value in SOON.items()},
        }
        init = ("credentials", "init", self._env["SWIFT_CREDENTIALS"])
        hosts = ",".join(self.network.host(machine) for machine in machines)
        subprocess.run(
            [self._python, "-m", "swift_ft.cli", *init, "--hosts", hosts],
            check=True,
            capture_output=True,
        )
        self._stack.callback(lambda: [self._end(machine) for machine in [*self._blocked]])
        with contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.push(self._stack)
            self._ray("head", "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
            self.until(lambda: self._ready("head"), "the head")
            for machine in NODES:  # one after the other: a raylet gives up if it gets no CPU for long
                self.node(machine)
                self.until(lambda machine=machine: self._ready(machine), machine)  # type: ignore[misc]
            self.submit()
            unless_it_starts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _ready(self, machine: str) -> bool:
        return "Ray runtime started" in (self.place / f"{machine}.out").read_text(errors="replace")

    def _start(self, machine: str, name: str, *words: str) -> "subprocess.Popen[bytes]":
        with (self.place / f"{name}.out").open("ab") as output:
            command = [*self.network.inside(machine), *words]
            return subprocess.Popen(command, env=self._env, cwd=ROOT, stdout=output, stderr=output)

    def _ray(self, machine: str, *words: str) -> None:
        flags = [word.format(host=self.network.host(machine)) for word in FLAGS]
        program = [str(self._python), "-m", "ray.scripts.scripts", "start"]
        self._blocked[machine] = self._start(machine, machine, *OWN_FILES, *program, *words, *flags)

    def node(self, machine: str) -> None:
        self._ray(machine, "--num-cpus=1", f"--address={self._env['RAY_ADDRESS']}")

    def submit(self) -> None:
        flags = ["--nodes", "2", "--spares", "1", "--shared", str(self.place / "shared")]
        command = [str(SCRIPT), *flags, "--", *TRAINER, "--steps", str(STEPS)]
        beside = ("nsenter", f"--mount=/proc/{self._blocked['head'].pid}/ns/mnt", f"--wd={ROOT}")
        self.driver = self._start("head", "driver", *beside, str(self._python), *command)
        self._stack.callback(self.driver.wait, 20)
        self._stack.callback(self.driver.kill)

    def _processes(self, machine: str) -> Iterator[psutil.Process]:
        space = os.readlink(self.network.inside(machine)[1].partition("=")[2])
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                # A `cat` keeps the namespace.
                if os.readlink(f"/proc/{process.pid}/ns/net") == space and process.name() != "cat":
                    yield process

    def _end(self, machine: str) -> None:
        """With all that Ray has started there."""
        for process in self._processes(machine):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._blocked.pop(machine).wait(20)

    def kill(self, machine: str) -> None:
        self.network.isolate(machine)
        self._end(machine)

    def launchers(self, machine: str) -> list[psutil.Process]:
        return [each for each in self._processes(machine) if "--local-addr" in each.cmdline()]

    def training(self) -> list[str]:
        """Machines on which ranks have begun, in the order of their numbers."""
        begun = {each["who"]: each["pid"] for each in self.trace("script_start")}
        pids = {each.pid: machine for machine in self._blocked for each in self._processes(machine)}
        return [pids[begun[who]] for who in sorted(begun)]

    def trace(self, event: str) -> list[dict[str, Any]]:
        self._trace += self._tail.read()
        return [each for each in self._trace if each["event"] == event]

    def output(self) -> str:
        path = self.place / "driver.out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def digests(self) -> dict[str, Any]:
        self.until(lambda: self.driver.poll() is not None, "the driver")
        assert self.driver.returncode == 0, self.output()
        found = sorted((self.place / "digests").glob(f"*-v{STEPS}.json"))
        assert len(found) == 2, self.output()
        return {path.name: json.loads(path.read_text()) for path in found}

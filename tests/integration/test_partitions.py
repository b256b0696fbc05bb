"""Cables are pulled between machines: ranks, coordinator and log server in network namespaces of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from tests.faults.world import Helper
from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import REPOSITORY, LogServer
from tests.integration.namespaces import Network, skip_where_impossible
from tests.patience import eventually

pytestmark = pytest.mark.matrix

LEASE_S = 2.0
SLACK_S = 5.0
"""Of processes that take turns on a busy machine."""
NOTICED_S = 20.0
"""docs/protocol.md: a peer that is gone without a word."""
TIMEOUT_S = 40.0
MACHINES = ("meta", "log", "a", "b", "c", "d")
PORT = 7000


class Machine:
    """An agent on one machine."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    def begin(self, name: str, *arguments: Any) -> None:
        self._helper.say(json.dumps([name, arguments]))

    def end(self) -> Any:
        """The answer; an error of swift as a string."""
        found, error = self._helper.hear()
        return error or found

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.end()


class World:
    """What the tests start on the machines, and end."""

    def __init__(self, network: Network, directory: Path, stack: contextlib.ExitStack) -> None:
        self.network = network
        self._directory = directory
        self._stack = stack
        self.log = f"{network.host('log')}:{PORT}"
        self.meta = f"{network.host('meta')}:{PORT}"

    def log_server(self) -> LogServer:
        server = LogServer(self._directory / "log", "--insecure")
        server.address = self.log
        server.prefix = self.network.inside("log")
        return self._stack.enter_context(server)

    def coordinator(self, lease_s: float = LEASE_S) -> Coordinator:
        leases = ("--heartbeat-s", "0.2", "--lease-s", f"{lease_s:g}")
        coordinator = Coordinator(self._directory / "meta", "--insecure", *leases, "--log-servers", self.log)
        coordinator.address = self.meta
        coordinator.prefix = self.network.inside("meta")
        self._stack.callback(coordinator.stop)
        return coordinator.start()

    def agent(self, machine: str) -> Machine:
        source = "from tests.integration.partition_agent import main; main()"
        return Machine(self._stack.enter_context(Helper(source, prefix=self.network.inside(machine))))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    skip_where_impossible()
    monkeypatch.setenv("SWIFT_INSECURE", "1")  # connections in clear text off loopback
    with contextlib.ExitStack() as stack:
        network = Network(*MACHINES)
        stack.callback(network.close)
        yield World(network, tmp_path, stack)


def until(machine: Machine, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The View that a member sees, and how it is itself, once it is as wanted."""
    view: dict[str, Any] = {}

    def is_there() -> bool:
        view.update(machine("view"))
        return wanted(view)

    eventually(is_there, lambda: f"{what}: {view}", TIMEOUT_S)
    return view


def in_generation(generation: int, state: int) -> Callable[[dict[str, Any]], bool]:
    return lambda view: view["generation"] == generation and view["state"] == state


def form(world: World, machines: str = "abc") -> list[Machine]:
    ranks = [world.agent(name) for name in machines]
    for number, rank in enumerate(ranks):
        assert rank("join", world.meta, number, len(ranks)) is None
    for rank in ranks:
        until(rank, in_generation(1, pb.RUNNING), "the job")
    return ranks


def grows(machine: Machine, generation: int, by: int = 20) -> None:
    begin = machine("view")["version"]
    found = until(machine, lambda view: bool(view["version"] >= begin + by), "steps")
    assert (found["generation"], found["state"]) == (generation, pb.RUNNING)


def test_coordinator_that_was_away_for_longer_than_a_lease_has_fenced_everybody(world: World) -> None:
    """It cannot tell that from the loss of all machines. Nobody goes on as before; new processes do."""
    world.log_server()
    world.coordinator()
    ranks = form(world)
    beside = world.agent("meta")
    world.network.isolate("meta")

    def waiting() -> str:
        return str(beside("status", world.meta, "job")["waiting_for"])

    # Their leases may end at different moments, each with a generation of its own.
    eventually(lambda: "ranks 0, 1, 2 to join" in waiting(), waiting, TIMEOUT_S)
    for rank in ranks:
        grows(rank, 1)
    world.network.rejoin("meta")
    for rank in ranks:
        until(rank, lambda view: bool(view["fenced"]), "its fence")
    heirs = [world.agent("d") for _ in ranks]
    for number, heir in enumerate(heirs):
        assert heir("join", world.meta, number, len(heirs)) is None
    for heir in heirs:
        until(heir, lambda view: bool(view["state"] == pb.RUNNING), "the recovery")


def test_half_open_connections_are_noticed_in_time_whichever_way_is_lost(world: World) -> None:
    """Data goes out and no answer comes; or answers are all that gets through. Client and server notice."""
    world.log_server()
    silenced, unheard, operator = world.agent("a"), world.agent("b"), world.agent("c")
    assert operator("fence", world.log, 1) is None
    for client, stream in ((silenced, "s0.F"), (unheard, "s1.F")):
        assert client("open_writer", world.log, 1, 2 * TIMEOUT_S) is None
        assert client("write", stream, 0, 3) is None
        assert client("follow", world.log, stream) is None
    assert operator("trim", world.log, 1) == 0  # both read
    world.network.lose("a", "log")
    world.network.lose("log", "b")
    began = time.monotonic()
    for client in (silenced, unheard):
        client.begin("seconds_to_notice", NOTICED_S + 2 * SLACK_S)
    while operator("trim", world.log, 1) < 1:
        assert time.monotonic() - began < NOTICED_S + SLACK_S, "the dead readers hold up a trim"
        time.sleep(0.1)
    for client in (silenced, unheard):
        for noticed in client.end():
            assert noticed is not None
            after_s, words = noticed
            assert after_s < NOTICED_S + SLACK_S, words
            assert "ping timeout" in words or "timed out" in words or "reset" in words, words


# -- trainers -------------------------------------------------------------------------------------------------

TRAINING_TIMEOUT_S = 200.0
"""Of what takes seconds on a quiet machine: every rank and spare imports torch."""


class Machines:
    """`swift-ft run` on one or several machines, with one or more stages on each."""

    def __init__(
        self,
        world: World,
        directory: Path,
        flags: Callable[[str, int], list[str]],
        stages: int,
        nodes: int = 2,
        steps: int = 60,
    ) -> None:
        """`flags`: of a machine and its number."""
        self._world, self._directory, self._flags, self._stages = world, directory, flags, stages
        self._nodes, self._steps = nodes, steps
        for name in ("events", "digests", "checkpoints"):
            (directory / name).mkdir(parents=True)
        self._tail = events.Tail(directory / "events")
        self._trace: list[dict[str, Any]] = []
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, machine: str, number: int, spares: int = 0) -> None:
        ranks = self._stages // self._nodes
        command = [*self._world.network.inside(machine), sys.executable, "-m", "swift_ft.launch"]
        command += [f"--nnodes={self._nodes}", f"--nproc-per-node={ranks}", f"--spares={spares}"]
        command += ["--coordinator", self._world.meta, "--job", self._directory.name]
        command += self._flags(machine, number)
        command += ["--checkpoint-dir", str(self._directory / "checkpoints")]
        command += ["-m", "swift_ft.lab.drill.trainer", "--stages", str(self._stages)]
        command += ["--steps", str(self._steps), "--model", "tiny", "--microbatches", "4"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "e0",
            "SWIFT_EVENTS": str(self._directory / "events"),
            "SWIFT_DIGESTS": str(self._directory / "digests"),
        }
        with (self._directory / f"output-{machine}").open("wb") as output:
            self.launchers[machine] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def said(self, name: str) -> list[dict[str, Any]]:
        self._trace += self._tail.read()
        return [event for event in self._trace if event["event"] == name]

    def until(self, look: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TRAINING_TIMEOUT_S
        while not look():
            assert all(launcher.poll() is None for launcher in self.launchers.values()), self.output()
            assert time.monotonic() < deadline, f"waited for {what}\n{self.output()}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(event["step"] >= step for event in self.said("loss")), f"step {step}")

    def kill(self, rank: int) -> None:
        """The process that holds it now."""
        holders = [event["pid"] for event in self.said("script_start") if event["who"] == f"rank{rank}"]
        os.kill(holders[-1], signal.SIGKILL)

    def start_both(self) -> None:
        """The one after the other: who comes first is the first."""
        self.start("a", 0)
        begun = self._directory / "output-a"
        self.until(lambda: self.said("script_start") or "1 of 2" in begun.read_text(), "the first machine")
        self.start("b", 1)

    def lose(self, machine: str) -> None:
        self._world.network.isolate(machine)
        launcher = self.launchers.pop(machine)
        if launcher.poll() is None:
            root = psutil.Process(launcher.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        launcher.wait(10.0)

    def pids(self) -> dict[str, set[int]]:
        """Of all processes that a rank has had."""
        found: dict[str, set[int]] = {}
        for event in self.said("script_start"):
            found.setdefault(event["who"], set()).add(event["pid"])
        return found

    def digests(self) -> dict[str, Any]:
        codes = {machine: launcher.wait(TRAINING_TIMEOUT_S) for machine, launcher in self.launchers.items()}
        assert set(codes.values()) == {0}, self.output()
        found = list((self._directory / "digests").glob(f"*-v{self._steps}.json"))
        assert len(found) == self._stages, found
        return {path.name: json.loads(path.read_text()) for path in found}

    def output(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in self._directory.glob("output-*")
        )

    def close(self) -> None:
        for machine in list(self.launchers):
            self.lose(machine)


@pytest.mark.timeout(450)
def test_trainers_are_cut_off_from_the_log_and_from_the_coordinator_and_end_with_the_same_bits(
    world: World, tmp_path: Path
) -> None:
    world.log_server()
    world.coordinator(lease_s=15.0)
    beside = world.agent("meta")
    with contextlib.ExitStack() as stack:
        twin, run = (
            Machines(world, tmp_path / name, lambda *_: [], 2, nodes=1, steps=120) for name in ("twin", "run")
        )
        for machines in (twin, run):
            stack.callback(machines.close)
        twin.start("a", 0)
        wanted = twin.digests()
        twin.launchers.clear()
        run.start("a", 0, spares=2)
        run.until_step(10)
        world.network.isolate("log")
        run.kill(1)
        run.until(
            lambda: world.log in beside("status", world.meta, "run")["waiting_for"],
            "a fence that cannot be set",
        )
        world.network.rejoin("log")
        run.until(lambda: beside("status", world.meta, "run")["state"] == pb.RUNNING, "the recovery")
        run.until_step(60)
        world.network.isolate("meta")
        run.kill(0)
        time.sleep(1.0)  # the launcher is not heard meanwhile
        assert beside("status", world.meta, "run")["generation"] == 2
        world.network.rejoin("meta")
        assert run.digests() == wanted
        assert beside("status", world.meta, "run")["generation"] == 3

"""A training machine is lost whole, launcher, ranks and all; another one takes its place, and nobody else notices."""

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
from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import REPOSITORY, LogServer
from tests.integration.namespaces import Network, skip_where_impossible
from tests.integration.test_partitions import PORT, World

pytestmark = pytest.mark.matrix

STEPS = 60
TIMEOUT_S = 200.0
MACHINES = ("meta", "log", "a", "b", "c")
LOG_LOST_S = 12.0


class Machines:
    """`swift-ft run` on several machines, with one or more stages on each."""

    def __init__(
        self,
        world: World,
        directory: Path,
        flags: Callable[[str, int], list[str]],
        stages: int,
        nodes: int = 2,
        steps: int = STEPS,
    ) -> None:
        self._world, self._directory, self._flags, self._stages = world, directory, flags, stages
        self._nodes, self._steps = nodes, steps
        for name in ("events", "digests", "checkpoints"):
            (directory / name).mkdir(parents=True)
        self._tail = events.Tail(directory / "events")
        self._trace: list[dict[str, Any]] = []
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, machine: str, number: int) -> None:
        command = [
            *self._world.network.inside(machine),
            sys.executable,
            "-m",
            "swift_ft.launch",
            f"--nnodes={self._nodes}",
        ]
        command += [
            f"--nproc-per-node={self._stages // self._nodes}",
            "--spares=0",
            "--coordinator",
            self._world.meta,
        ]
        command += ["--job", self._directory.name, *self._flags(machine, number)]
        command += [
            "--checkpoint-dir",
            str(self._directory / "checkpoints"),
            "-m",
            "swift_ft.lab.drill.trainer",
        ]
        command += [
            "--stages",
            str(self._stages),
            "--steps",
            str(self._steps),
            "--model",
            "tiny",
            "--microbatches",
            "4",
        ]
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
        deadline = time.monotonic() + TIMEOUT_S
        while not look():
            assert all(launcher.poll() is None for launcher in self.launchers.values()), self.output()
            assert time.monotonic() < deadline, f"waited for {what}\n{self.output()}"
            time.sleep(0.02)

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
        codes = {machine: launcher.wait(TIMEOUT_S) for machine, launcher in self.launchers.items()}
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


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    skip_where_impossible()
    monkeypatch.setenv("SWIFT_INSECURE", "1")
    with contextlib.ExitStack() as stack:
        network = Network(*MACHINES, named=True)
        stack.callback(network.close)
        yield World(network, tmp_path, stack)


def meeting(world: World, backend: str) -> Callable[[str, int], list[str]]:
    """The flags of a machine, by its number."""
    first = world.network.host("a")

    def flags(machine: str, number: int) -> list[str]:
        if backend == "static":
            return [f"--node-rank={number}", f"--master-addr={first}"]
        here = f"--local-addr={world.network.host(machine)}"
        if backend == "c10d":  # as for torchrun
            return [here, "--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint={first}:29400"]
        return [here]

    return flags


@contextlib.contextmanager
def twins(
    world: World, directory: Path, backend: str, stages: int = 2
) -> Iterator[tuple[Machines, dict[str, Any]]]:
    """A run, some steps behind its checkpoint, and the bits of one that never fails."""
    with contextlib.ExitStack() as stack:
        flags = meeting(world, backend)
        twin, run = (Machines(world, directory / name, flags, stages) for name in ("twin", "run"))
        for machines in (twin, run):
            stack.callback(machines.close)
        twin.start_both()
        wanted = twin.digests()
        twin.launchers.clear()
        run.start_both()
        run.until(lambda: any(event["step"] >= 15 for event in run.said("loss")), "step 15")
        yield run, wanted


@pytest.mark.timeout(500)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("backend", ["static", "c10d", ""])
def test_a_lost_machine_is_replaced_and_the_run_ends_with_the_same_bits(
    backend: str, lost: int, world: World, tmp_path: Path
) -> None:
    world.log_server()
    world.coordinator(lease_s=10.0)
    with twins(world, tmp_path, backend) as (run, wanted):
        run.lose("ab"[lost])
        if not backend:
            words = f"waited for 20 s for rank {lost} to join (if a machine is lost, start the same command"
            run.until(lambda: words in run.output(), "the word that a machine is missed")
        run.start("c", lost)
        assert run.digests() == wanted
        assert sorted(len(pids) for pids in run.pids().values()) == [1, 2]  # the other one's process stayed


class Logs:
    """Log servers on machines that train; the coordinator knows their machines."""

    def __init__(
        self, world: World, directory: Path, stack: contextlib.ExitStack, machines: str, copies: int = 1
    ) -> None:
        self._world, self._directory, self._stack = world, directory, stack
        self.servers = {machine: self.start(machine) for machine in machines}
        named = ",".join(f"{machine}={server.address}" for machine, server in self.servers.items())
        flags = ["--insecure", "--heartbeat-s=0.2", "--lease-s=10", f"--log-lost-s={LOG_LOST_S:g}"]
        coordinator = Coordinator(directory / "meta", *flags, f"--copies={copies}", "--log-servers", named)
        coordinator.address = world.meta
        coordinator.prefix = world.network.inside("meta")
        stack.callback(coordinator.stop)
        coordinator.start()

    def start(self, machine: str) -> LogServer:
        server = LogServer(self._directory / f"log-{machine}", "--insecure")
        server.address = f"{self._world.network.host(machine)}:{PORT}"
        server.prefix = self._world.network.inside(machine)
        return self._stack.enter_context(server)

    def operate(self, *words: str) -> None:
        """`swift-ft logs`, where the coordinator is."""
        command = [*self._world.network.inside("meta"), sys.executable, "-m", "swift_ft.cli", "logs"]
        done = subprocess.run(
            [*command, "--coordinator", self._world.meta, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("stages", "copies", "lost"), [(2, 1, 0), (2, 2, 1), (4, 1, 0), (4, 1, 1)])
def test_a_machine_is_lost_with_its_log_server_and_its_stages_are_replayed(
    stages: int, copies: int, lost: int, world: World, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        logs = Logs(world, tmp_path, stack, "ab", copies)
        run, wanted = stack.enter_context(twins(world, tmp_path, "", stages))
        machine = "ab"[lost]
        logs.servers[machine].kill()
        run.lose(machine)
        run.start("c", lost)
        assert run.digests() == wanted
        half = stages // 2
        assert sorted(len(pids) for pids in run.pids().values()) == half * [1] + half * [2]
        # A survivor that the others are a step ahead of does that step again, from what it holds.
        mine = set(range(lost * half, (lost + 1) * half))
        assert mine <= {event["rank"] for event in run.said("replay_begin")}
        assert {event["rank"] for event in run.said("restore_end")} == mine


@pytest.mark.timeout(500)
def test_a_machine_is_lost_with_the_only_log_server_and_all_go_on_from_the_checkpoint(
    world: World, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        logs = Logs(world, tmp_path, stack, "a")
        run, wanted = stack.enter_context(twins(world, tmp_path, ""))
        lost = logs.servers["a"]
        lost.kill()
        run.lose("a")
        words = f"waited for 20 s for log server {lost.address}: "
        run.until(lambda: words in run.output(), "the word that the log server is missed")
        logs.operate("--job", "run", "--lost", lost.address, "--add", f"c={logs.start('c').address}")
        run.start("c", 0)
        assert run.digests() == wanted
        assert sorted(len(pids) for pids in run.pids().values()) == [1, 2]
        assert not run.said("replay_begin")
        words = [line for line in run.output().splitlines() if "restored version" in line]
        assert words
        assert all("restored version 10; exact" in line for line in words), words

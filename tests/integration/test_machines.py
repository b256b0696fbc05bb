"""A training machine is lost whole, launcher, ranks and all; another one takes its place, and nobody else notices."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import REPOSITORY, LogServer
from tests.integration.namespaces import Network, skip_where_impossible
from tests.integration.test_partitions import PORT, Machines, World

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(500)]

TIMEOUT_S = 200.0
MACHINES = ("meta", "log", "a", "b", "c")
LEASES = ("--heartbeat-s=0.2", "--lease-s=10", "--log-lost-s=12")


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
        run.until_step(15)
        yield run, wanted


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
        self,
        world: World,
        directory: Path,
        stack: contextlib.ExitStack,
        machines: str,
        copies: int = 1,
        flags: Sequence[str] = LEASES,
    ) -> None:
        self._world, self._directory, self._stack = world, directory, stack
        self.servers = {machine: self.start(machine) for machine in machines}
        named = ",".join(f"{machine}={server.address}" for machine, server in self.servers.items())
        more = ["--insecure", f"--copies={copies}", "--log-servers", named]
        coordinator = Coordinator(directory / "meta", *flags, *more)
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


def test_a_machine_that_loses_its_network_is_fenced_and_comes_back(world: World, tmp_path: Path) -> None:
    world.log_server()
    world.coordinator(lease_s=2.0)
    with twins(world, tmp_path, "") as (run, wanted):
        world.network.isolate("b")
        time.sleep(5.0)
        world.network.rejoin("b")
        assert run.digests() == wanted
        assert {who: len(pids) for who, pids in run.pids().items()} == {"rank0": 1, "rank1": 2}

"""`swift-ft run --standalone`: services of the job's own, which begin and end with it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch_world import Launch, assert_all_gone, wait_until


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    begun: list[Launch] = []
    yield begun
    for launch in begun:
        launch.close()


def summary(launch: Launch) -> str:
    """Reads the three lines with which it begins. Returns the coordinator's address."""
    assert launch.process.stderr is not None
    lines = [launch.process.stderr.readline() for _ in range(3)]
    assert (
        lines[0] == "swift: job test: 2 ranks and 1 spare on this machine; strategy: the script's, or auto\n"
    )
    assert lines[1].startswith("swift: checkpoints and log are in ./swift-test: ")
    watch, _, rest = lines[2].partition(" --coordinator ")
    assert watch == "swift: to watch it: swift-ft status"
    address, _, job = rest.partition(" --job ")
    assert job == "test\n"
    return address


def services(launch: Launch) -> dict[str, int]:
    """The newest process of each service."""
    return {event["service"]: event["pid"] for event in launch.events("service_started")}


def test_services_begin_and_end_with_the_job_and_one_that_is_killed_comes_back(
    tmp_path: Path, launches: list[Launch]
) -> None:
    launches.append(launch := Launch(tmp_path, "", "--nproc-per-node=2"))
    address = summary(launch)
    rank = launch.rank(0)
    assert rank.env["SWIFT_COORDINATOR"] == address
    assert rank.env["SWIFT_CHECKPOINT_DIR"] == str(tmp_path / "swift-test" / "checkpoints")
    launch.rank(1)
    said = (tmp_path / "swift-test" / "coordinator.txt").read_text()
    assert said == f"coordinator on {address}, directory {tmp_path}/swift-test/coordinator\n"

    second = Launch(tmp_path, "", "--nproc-per-node=2")
    launches.append(second)
    assert second.wait() == (
        2,
        f"swift: run: --standalone: ./swift-test is used by another swift-ft run (process {launch.process.pid}): "
        "give this job another name, with --job NAME\n",
    )

    first = services(launch)
    assert set(first) == {"coordinator", "logserver"}
    os.kill(first["coordinator"], signal.SIGKILL)
    again = wait_until(
        lambda: (pid := services(launch)["coordinator"]) != first["coordinator"] and pid, "another one"
    )
    launch.until_said(f"swift: the job's coordinator was killed: started again as process {again}")
    address_file = tmp_path / "swift-test" / "coordinator.address"
    wait_until(address_file.exists, "the address")
    assert address_file.read_text().strip() == address

    everything = launch.processes()
    assert set(services(launch).values()) <= {process.pid for process in everything}
    launch.go(0)
    launch.go(1)
    code, said = launch.rest()
    assert code == 0, said
    assert_all_gone(everything)


def test_a_launcher_that_is_killed_leaves_nothing_and_the_job_can_go_on_at_once(
    tmp_path: Path, launches: list[Launch]
) -> None:
    for number, ending in enumerate((signal.SIGKILL, signal.SIGINT), 1):
        launches.append(launch := Launch(tmp_path, "", "--nproc-per-node=2"))
        summary(launch)
        launch.rank(0, number)
        launch.rank(1, number)
        everything = launch.processes()
        assert set(services(launch).values()) <= {process.pid for process in everything}
        os.kill(launch.process.pid, ending)
        assert launch.process.wait(timeout=20) == (-ending if ending == signal.SIGKILL else 128 + ending)
        if ending == signal.SIGINT:
            assert_all_gone(everything)
        else:
            killed = everything
    assert_all_gone(killed)

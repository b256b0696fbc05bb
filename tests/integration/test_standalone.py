"""`swift-ft run --standalone`: services of the job's own, which begin and end with it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import own_environment
from tests.integration.launch_world import Launch, assert_all_gone
from tests.integration.trainer_world import TRAINERS
from tests.patience import eventually


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
    again = eventually(
        lambda: (pid := services(launch)["coordinator"]) != first["coordinator"] and pid, "another one"
    )
    launch.until_said(f"swift: the job's coordinator was killed: started again as process {again}")
    address_file = tmp_path / "swift-test" / "coordinator.address"
    eventually(address_file.exists, "the address")
    assert address_file.read_text().strip() == address

    everything = launch.processes()
    assert set(services(launch).values()) <= {process.pid for process in everything}
    launch.go_all()
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
        what = "two ranks, two services, a spare, the fork server"
        everything = eventually(lambda: below if len(below := launch.processes()) == 6 else None, what)
        assert set(services(launch).values()) <= {process.pid for process in everything}
        os.kill(launch.process.pid, ending)
        assert launch.process.wait(timeout=20) == (-ending if ending == signal.SIGKILL else 128 + ending)
        if ending == signal.SIGINT:
            assert_all_gone(everything)
        else:
            killed = everything
    assert_all_gone(killed)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_run_whose_output_nobody_reads_any_more_goes_on(tmp_path: Path, unbuffered: str) -> None:
    mishaps = [{"rank": rank, "what": "say", "times": 1000} for rank in (0, 1)]
    mishaps += [{"rank": 1, "what": "kill", "step": 8}]
    command = [sys.executable, "-P", "-m", "swift_ft.cli", "run", "--standalone", "--nproc-per-node=2"]
    command += [str(TRAINERS / "unlucky.py"), str(tmp_path), "20", json.dumps(mishaps)]
    read, write = os.pipe()
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=own_environment() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=write,
    ) as run:
        os.close(write)
        with open(read) as pager:
            while "rank 1: step 3" not in (line := pager.readline()):
                assert line, "it has ended"
        assert run.wait(100.0) == 0
    assert all((tmp_path / f"saved{rank}").read_text().startswith("20 ") for rank in (0, 1))

"""The coordinator as a process, against fake members over real gRPC."""

import os
import signal
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import UnknownJob, UsageError
from tests.integration.coordinator_world import Job, finish, recovered
from tests.integration.logserver_world import python
from tests.patience import eventually

LEASE_S = 4.0
"""Longer than members, which are threads here, wait for a processor."""


def test_a_silent_member_is_fenced_and_a_zombie_is_told(job: Job) -> None:
    job.coordinator("--heartbeat-s", "0.2", "--lease-s", str(LEASE_S))
    members = job.form()
    zombie = members[1]
    zombie.silent.set()  # it trains and watches, but its lease is not renewed
    view = job.wait(members[0], lambda view: view.generation == 2)
    assert "rank 1 was silent for" in view.reason
    members[1] = job.member(1)
    job.wait(members[0], recovered(2))
    zombie.silent.clear()
    eventually(lambda: zombie.fenced, "its fence")
    finish(job, members)


def test_nobody_is_blamed_for_the_coordinator_s_own_silence(job: Job) -> None:
    coordinator = job.coordinator("--heartbeat-s", "0.2", "--lease-s", str(LEASE_S))
    members = job.form()
    assert coordinator.process is not None
    coordinator.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * LEASE_S)
    coordinator.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    with CoordinatorClient(coordinator.address, "a") as client:
        assert client.status().view.generation == 1
    finish(job, members)


def test_two_jobs_and_a_launcher_that_gives_up(job: Job) -> None:
    coordinator = job.coordinator()
    first, second = job.form("a"), job.form("b")
    with CoordinatorClient(coordinator.address, "b") as launcher:
        launcher.call(pb.FailRequest(rank=-1, reason="no replacement left"))
        assert launcher.status().view.reason == "no replacement left"
    job.wait(second[0], lambda view: view.state == pb.FAILED)
    assert job.wait(first[0], lambda view: True).state == pb.RUNNING
    with CoordinatorClient(coordinator.address, "c") as client:
        with pytest.raises(UnknownJob, match="no rank has joined a job c here: swift-ft jobs lists"):
            client.status()
    with CoordinatorClient(coordinator.address, "../c") as client:
        with pytest.raises(UsageError, match="job name"):
            client.status()
    finish(job, first)


def test_status_shows_versions_leases_and_suspicions(job: Job) -> None:
    coordinator = job.coordinator()
    members = job.form()
    members[2].client.call(pb.SuspectRequest(generation=1, reason="connection reset by rank 1"))
    with CoordinatorClient(coordinator.address, "a") as client:

        def heard() -> pb.StatusReply | None:
            """The coordinator has heard of each again and again, and just now."""
            told = client.status()
            return told if all(rank.version > 0 and rank.lease_age_s < 2.5 for rank in told.ranks) else None

        status = eventually(heard, "news of all", 10.0)
    assert [rank.rank for rank in status.ranks] == [0, 1, 2]
    assert [(s.rank, s.reason) for s in status.suspicions] == [(2, "connection reset by rank 1")]
    assert status.view.state == pb.RUNNING  # shown, and nobody is fenced for it


# --- the program ---


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return python("-m", "swift_ft_services.coordinator", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--directory"),
        (["--directory", "{file}"], "--directory {file}: "),
        (["--directory", "{file}/below"], "--directory {file}/below: "),
        (
            ["--directory", "{free}", "--listen", "{port}"],
            "--listen {port}: cannot listen there: the port is in use",
        ),
        (
            ["--directory", "{free}", "--listen", "0.0.0.0:0"],
            "--listen 0.0.0.0:0 is not loopback: give --tls-cert and --tls-key and --token-keys, or --insecure",
        ),
        (["--directory", "{free}", "--log-servers", "a:1,b"], "--log-servers b: write HOST:PORT"),
        (["--directory", "{free}", "--log-servers", "a:1,a:1"], "the same address twice"),
        (["--directory", "{free}", "--step-bound-s", "1"], "step bound of 1 s is too short"),
        (["--directory", "{free}", "--die-at", "NOWHERE"], "NOWHERE"),
        (["--directory", "{free}", "--address-file", "{file}/x"], "--address-file {file}/x: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, job: Job, arguments: list[str], words: str
) -> None:
    (tmp_path / "file").write_text("not a directory")
    names = {"file": str(tmp_path / "file"), "free": str(tmp_path / "free")}
    if "{port}" in arguments:
        names["port"] = job.coordinator().address
    done = run(*[argument.format(**names) for argument in arguments])
    assert done.returncode == 2, done
    assert words.format(**names) in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not done.stdout


def test_health_and_a_clean_end(job: Job) -> None:
    coordinator = job.coordinator()
    members = job.form()
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "swift.coordinator.v1.Coordinator"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    # With watchers and heartbeats under way: no noise, exit code 0, and all of it is still there afterwards.
    assert coordinator.stop() == 0
    coordinator.start()
    finish(job, members)
    assert os.listdir(coordinator.directory)

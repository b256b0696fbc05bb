"""SIGTERM and health of real processes: what was acknowledged stays, who watches is told, a second signal kills."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft import events
from swift_ft._pb import coordinator_pb2, coordinator_pb2_grpc, log_pb2
from swift_ft.coordinator_client import make_member
from swift_ft.log import admin
from swift_ft.log.protocol import code_of, method, open_channel
from swift_ft.log.record import RecordKey
from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import JOB, REPOSITORY, TIMEOUT_S, LogServer
from tests.log_client import LogWriter
from tests.patience import eventually, served_at


def until_it_hangs(call: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            call()
        except grpc.RpcError as error:
            if code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
        assert time.monotonic() < deadline


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_a_log_server_that_waits(tmp_path: Path, number: signal.Signals) -> None:
    """A reader that takes nothing keeps its call, and so the server, for the grace of its stop."""
    with LogServer(tmp_path / "log") as server:
        server.fence(1)
        writer = LogWriter([server.address], JOB, 1)
        for step in range(400):
            writer.append("s0.F", RecordKey(step, 0, 0), "uint8", (100_000,), bytes(100_000))
        writer.close()
        channel = open_channel(server.address)
        read = channel.unary_stream(
            method("Read"),
            request_serializer=log_pb2.ReadRequest.SerializeToString,
            response_deserializer=None,
        )
        call = read(log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True))
        assert next(call)
        process = server.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        eventually(lambda: any(event["event"] == "draining" for event in events.read(server.events)))
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == -number
        process.communicate()
        assert not any(event["event"] == "stopped" for event in events.read(server.events))
        call.cancel()
        channel.close()
        server.start()
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert (found.records, found.corrupt) == (400, False)


def test_a_second_signal_kills_a_coordinator_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its store: somebody else has locked the database. It is there meanwhile, and takes no turn."""
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    coordinator = Coordinator(tmp_path / "meta").start()
    process = coordinator.process
    assert process is not None
    with contextlib.closing(sqlite3.connect(tmp_path / "meta" / "coordinator.sqlite")) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        with grpc.insecure_channel(coordinator.address) as channel:
            member = make_member(0)
            request = coordinator_pb2.JoinRequest(job="a", member=member, world_size=1)
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            hanging = stub.Join.future(request, wait_for_ready=True)
            until_it_hangs(lambda: stub.Status(coordinator_pb2.StatusRequest(job="a"), timeout=0.3))
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: any(event["event"] == "draining" for event in events.read(tmp_path)))
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == -signal.SIGTERM
            assert hanging.code() is grpc.StatusCode.UNAVAILABLE
    process.communicate()


@pytest.mark.parametrize("service", ["logserver", "coordinator"])
def test_json_logs_of_a_life_and_of_a_start_that_fails(tmp_path: Path, service: str) -> None:
    address = tmp_path / "address"
    secret = "s3cr3t-v4lue-0123456789"
    command = [sys.executable, "-m", f"swift_ft_services.{service}", "--directory", str(tmp_path / "data")]
    command += ["--log-format", "json", "--address-file", str(address)]
    environment = {**os.environ, "SWIFT_TEST_TOKEN": secret}
    running = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    served_at(running, address)
    second = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False
    )
    bad = [*command, "--listen", f"{secret}:x"]
    third = subprocess.run(bad, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False)
    running.terminate()
    out, err = running.communicate(timeout=TIMEOUT_S)
    assert (running.returncode, out) == (0, "")
    life = [json.loads(line) for line in err.splitlines()]
    assert [line["event"] for line in life] == ["serving", "signal", "draining", "stopped"]
    assert {(line["role"], line["level"], line["pid"]) for line in life} == {(service, "info", running.pid)}
    times = [line["monotonic"] for line in life]
    assert times == sorted(times)
    assert life[0]["fields"]["address"] == address.read_text().strip()
    (fatal,) = [json.loads(line) for line in second.stderr.splitlines()]
    assert second.returncode == 3  # the directory is held
    assert (fatal["event"], fatal["level"], second.stdout) == ("fatal", "error", "")
    assert third.returncode == 2
    for text in (err, second.stderr, third.stderr):
        assert secret not in text

"""Fault 44: no thread can be started, at a limit of memory or of processes. Real processes are refused new ones."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import grpc
import psutil
import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import LogUnavailable
from swift_ft.launch.standalone import free_port
from swift_ft.log import admin
from swift_ft.log.protocol import code_of, open_channel, reason_of
from tests.faults import shim
from tests.faults.shim import Faults, Rule
from tests.faults.world import STREAM, TIMEOUT_S, Server, fill, put
from tests.integration.coordinator_world import Job, finish, recovered
from tests.integration.logserver_world import JOB, REPOSITORY
from tests.unit.log.append_call import Call

BUSY = (grpc.StatusCode.UNAVAILABLE, "busy")
MANY = 140
"""Calls: more than one address may have of a kind."""
THREADS_MAX = 512
"""A usual limit of processes in a container."""

BROKEN = """
import os, sys
from swift_ft_services.logserver import __main__ as program
from swift_ft_services.threads import Threads

def submit(self, *work):
    raise RuntimeError("can't start new thread")

Threads.submit = submit
sys.exit(program.main())
"""
"""A log server in whose one thread of gRPC an error is raised by the first call."""


@pytest.fixture
def faulty(tmp_path: Path, faults: Faults) -> Iterator[Server]:
    """A server with the shim in it; a record of generation 1 is there."""
    with Server(tmp_path / "log", faults=faults) as running:
        fill(running, 1)
        yield running


def no_threads(faults: Faults) -> Rule:
    return faults.rule(shim.THREAD, "", shim.FAIL, error=errno.EAGAIN)


def refused(call: Call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call.open()
    return code_of(caught.value), reason_of(caught.value)


def follow(server: Server, channel: grpc.Channel | None = None) -> "grpc.Call":
    """A reader that stays, once it has the first record."""
    read = (channel or server.channel).unary_stream(
        "/swift.log.v1.Log/Read",
        request_serializer=log_pb2.ReadRequest.SerializeToString,
        response_deserializer=None,
    )
    call = read(log_pb2.ReadRequest(job=JOB, stream=STREAM, follow=True), timeout=TIMEOUT_S)
    next(call)
    return call


def test_f44_calls_for_which_no_thread_can_be_started_are_refused_and_the_others_answered(
    faulty: Server, faults: Faults
) -> None:
    rule = no_threads(faults)
    assert refused(Call(faulty)) == BUSY
    readers: list[grpc.Call] = []
    with pytest.raises(grpc.RpcError) as caught:
        readers.extend(follow(faulty) for _ in range(8))
    assert (code_of(caught.value), reason_of(caught.value)) == BUSY
    assert rule.hits > 1
    for _ in range(20):
        faulty.fence(1)
        assert faulty.serving()
        assert admin.inventory(faulty.address, JOB, TIMEOUT_S)
    rule.clear()
    readers.append(follow(faulty))
    writer = faulty.writer()
    put(writer, 1)
    writer.close()
    for reader in readers:
        reader.cancel()
    faulty.check(0, 2)


def test_f44_a_writer_that_is_refused_for_it_comes_again(faulty: Server, faults: Faults) -> None:
    rule = no_threads(faults)
    writer = faulty.writer()
    put(writer, 1)
    rule.wait(2)
    rule.clear()
    writer.close()
    faulty.check(0, 2)


def test_f44_sigterm_ends_a_log_server_that_can_start_no_thread(faulty: Server, faults: Faults) -> None:
    call, reader = Call(faulty), follow(faulty)
    call.open("s1.F")
    rule = no_threads(faults)
    assert faulty.stop() == 0
    assert rule.hits
    for ended in (lambda: next(reader), lambda: call.read(lambda: False)):
        with pytest.raises(grpc.RpcError):
            ended()


def test_f44_an_error_in_the_thread_that_serves_ends_the_log_server(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN, "--directory", str(tmp_path / "log"), "--listen", address],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with pytest.raises(LogUnavailable):
            admin.fence(address, JOB, 1, TIMEOUT_S)
        (line,) = process.communicate(timeout=TIMEOUT_S)[1].splitlines()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3
    assert line.startswith("logserver: RuntimeError: can't start new thread in thread ")
    assert line.endswith("; start it again")


def test_f44_one_address_causes_no_more_threads_than_a_container_has(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server, ExitStack() as stack:
        fill(server, 1)
        full = ""
        for number in range(MANY):
            if number % 8 == 0:  # a connection has 16 calls
                channel = stack.enter_context(open_channel(server.address))
            call = Call(type("Has", (), {"channel": channel}))
            try:
                call.open(f"s{number}.F")
                stack.callback(follow(server, channel).cancel)
            except grpc.RpcError as error:
                full = reason_of(error)
                break
        assert full == "limit"
        assert psutil.Process(server.pid).num_threads() < THREADS_MAX
        server.fence(1)


def test_f44_a_coordinator_that_can_start_no_thread_recovers_its_jobs_and_ends(
    tmp_path: Path, faults: Faults
) -> None:
    job = Job(tmp_path)
    with ExitStack() as stack:
        stack.callback(job.close)
        servers = [stack.enter_context(Server(tmp_path / f"log{number}")) for number in range(2)]
        with mock.patch.dict(os.environ, faults.env):
            coordinator = job.coordinator("--log-servers", ",".join(server.address for server in servers))
        rule = no_threads(faults)
        members = job.form()
        members[1].kill()
        members[1].report_exit()
        members[1] = job.member(1)
        job.wait(members[0], recovered(2))
        assert rule.hits
        finish(job, members)
        assert coordinator.stop() == 0

"""Both services as processes, against requests that nobody sane would send.

Every answer is one of the documented codes, comes in time, and leaves no trace of an exception; the process
lives, does its work afterwards, and has not grown.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_ft._pb import coordinator_pb2, log_pb2
from swift_ft.log import admin
from swift_ft.log.protocol import message_of, reason_of
from swift_ft.tokens import COORDINATOR, LOG
from tests.descriptors import is_map, is_repeated, requests_of_methods
from tests.health_probe import check_service
from tests.integration.logserver_world import serve
from tests.unit.log.frames import JOB, frame_of
from tests.unit.security.test_fuzz_decoders import changed, with_checksum
from tests.unit.security.world import code_of

GROWTH_MAX = 64 << 20
"""Bytes of resident memory that all examples of a test together may leave behind."""
TIMEOUT_S = 10.0

C = grpc.StatusCode
DOCUMENTED = {
    C.OK,
    C.INVALID_ARGUMENT,
    C.FAILED_PRECONDITION,
    C.OUT_OF_RANGE,
    C.ALREADY_EXISTS,
    C.DATA_LOSS,
    C.RESOURCE_EXHAUSTED,
    C.NOT_FOUND,
}
WAITS = {LOG + "Read", COORDINATOR + "Watch"}
"""These may wait for what is to come: a deadline that is met there is no fault."""

# What is valid comes up most: other checks stand behind those of names and generations.
NUMBERS = [0, *[1] * 8, 2, 3, (1 << 31) - 1, (1 << 32) - 1, (1 << 62), (1 << 63) - 1, (1 << 64) - 1]
NAMES = [
    *(JOB, "s0.F", "s1.B", "other", "", ".", "..", "../x", "a/b", "/etc", "x\0y", "é", "X"),
    *("x" * 64, "x" * 65),
]


def value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kinds = FieldDescriptor
    if field.type == kinds.TYPE_MESSAGE:
        return messages(field.message_type)
    if field.type == kinds.TYPE_STRING:
        if field.name in ("job", "stream", "incarnation"):
            valid = st.just(JOB if field.name == "job" else "s0.F")
            return valid | valid | st.sampled_from(NAMES) | st.text(max_size=80)
        return st.sampled_from(NAMES) | st.text(max_size=80)
    if field.type == kinds.TYPE_BYTES:
        valid = st.sampled_from([frame_of(sequence)[1] for sequence in range(3)])
        return valid | valid.flatmap(changed).map(with_checksum) | st.binary(max_size=300)
    if field.type == kinds.TYPE_BOOL:
        return st.booleans()
    signed = field.type in (
        kinds.TYPE_INT32,
        kinds.TYPE_INT64,
        kinds.TYPE_SINT32,
        kinds.TYPE_SINT64,
        kinds.TYPE_ENUM,  # an int32, of which an open enum takes any
    )
    bits = (
        32 if field.type in (kinds.TYPE_INT32, kinds.TYPE_UINT32, kinds.TYPE_SINT32, kinds.TYPE_ENUM) else 64
    )
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from([number for number in NUMBERS if number <= high]) | st.integers(low, high)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """A message with fields set to things that fit their types, and to nothing else."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.integers(0, 3)) == 0:
            continue
        if is_map(field):
            for key in draw(st.lists(st.text(max_size=20), max_size=3)):
                getattr(message, field.name)[key] = draw(st.text(max_size=20))
        elif is_repeated(field):
            for item in draw(st.lists(value(field), max_size=3)):
                (getattr(message, field.name).append)(item)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(value(field)))
        else:
            setattr(message, field.name, draw(value(field)))
    return message


@st.composite
def requests(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    made = draw(messages(descriptor)).SerializeToString()
    kind = draw(st.sampled_from(["as it is", "as it is", "changed", "random"]))
    if kind == "as it is":
        return made
    return draw(changed(made)) if kind == "changed" else draw(st.binary(max_size=200))


class Services:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        self._start(LOG, "logserver", "--jobs-max", "50")
        admin.fence(self.addresses[LOG], JOB, 1, TIMEOUT_S)
        # Not told of the log server: what one was asked is not to stand in the way of the other.
        self._start(COORDINATOR, "coordinator", "--jobs-max", "50")
        self.channels = {service: grpc.insecure_channel(where) for service, where in self.addresses.items()}

    def _start(self, service: str, name: str, *flags: str) -> None:
        self.processes[service], self.addresses[service] = serve(
            name, self.directory, *flags, OMP_NUM_THREADS="1"
        )

    def resident(self, method: str) -> int:
        service = method.rpartition("/")[0] + "/"
        return int(psutil.Process(self.processes[service].pid).memory_info().rss)

    def call(self, method: str, *messages: bytes) -> None:
        """Asserts that the answer is a documented one."""
        channel = self.channels[method.rpartition("/")[0] + "/"]
        timeout_s = 0.05 if method in WAITS else TIMEOUT_S
        answers = channel.stream_stream(method)(iter(messages), timeout=timeout_s)
        try:
            for _ in answers:
                if method in WAITS:
                    answers.cancel()
                    return
        except grpc.RpcError as error:
            code, said = code_of(error), message_of(error)
            if code is C.DEADLINE_EXCEEDED and method in WAITS:
                return
            assert code in DOCUMENTED, (method, code, said)
            assert "internal" not in said.lower()

    def check(self) -> None:
        """They live, serve, and have said nothing of an exception."""
        for service, process in self.processes.items():
            name = "logserver" if service == LOG else "coordinator"
            assert process.poll() is None
            assert check_service(self.addresses[service]).status == "SERVING"
            said = (self.directory / f"{name}.txt").read_text().splitlines()
            # Requests may by chance make a rank join, and then what is said of it is true.
            usual = re.compile("WARNING [a-z_]+ job=|(log server|coordinator) on ")
            assert [line for line in said if not usual.match(line)] == []

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for process in self.processes.values():
            process.terminate()
        codes = []
        for process in self.processes.values():
            try:
                codes.append(process.wait(10))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        assert codes == [0, 0]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("services"))
    try:
        yield services
        services.check()
    finally:
        services.close()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_frames_that_were_changed_after_a_proper_open(services: Services, data: st.DataObject) -> None:
    """The stream is open; what follows is a valid frame with something changed, its checksum made right or not."""
    stream = data.draw(st.sampled_from(["s0.F", "s7.F", "s8.F"]))
    opens = [log_pb2.Open(job=JOB, stream=stream, generation=1)]
    frames = []
    for _ in range(data.draw(st.integers(1, 3))):
        valid = frame_of(data.draw(st.integers(0, 4)), stream=stream)[1]
        mutant = data.draw(st.just(valid) | changed(valid))
        frames.append(with_checksum(mutant) if data.draw(st.booleans()) else mutant)
    messages = [log_pb2.AppendRequest(frames=frame).SerializeToString() for frame in frames]
    services.call(LOG + "Append", log_pb2.AppendRequest(opens=opens).SerializeToString(), *messages)


@pytest.mark.parametrize("method", requests_of_methods())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_request_gets_a_documented_answer(services: Services, method: str, data: st.DataObject) -> None:
    any_request = requests(requests_of_methods()[method])
    several = data.draw(st.lists(any_request, min_size=1, max_size=4 if method == LOG + "Append" else 1))
    services.call(method, *several)


@pytest.mark.parametrize("method", [LOG + "Append", LOG + "Inventory", COORDINATOR + "Join"])
def test_large_and_many_requests_leave_no_memory_behind(services: Services, method: str) -> None:
    """Megabytes that are refused; the first dozen fill the allocator's own reserve."""
    junk = b"\x0a\xff\xff\x3f" + bytes((1 << 20) - 1 - 4)
    for _ in range(12):
        services.call(method, junk)
    before = services.resident(method)
    for _ in range(150):
        services.call(method, junk)
    assert services.resident(method) - before < GROWTH_MAX
    services.check()


def test_a_number_of_ranks_that_no_job_has_costs_nothing(services: Services) -> None:
    member = coordinator_pb2.Member(rank=0, incarnation="i")
    before = services.resident(COORDINATOR)
    for world_size in ((1 << 31) - 1, 10_000_000):
        request = coordinator_pb2.JoinRequest(job=f"huge{world_size}", member=member, world_size=world_size)
        services.call(COORDINATOR + "Join", request.SerializeToString())
    assert services.resident(COORDINATOR) - before < GROWTH_MAX
    services.check()


def test_jobs_under_way_are_limited(services: Services) -> None:
    codes = set()
    join = services.channels[COORDINATOR].unary_unary(COORDINATOR + "Join")
    for number in range(60):
        member = coordinator_pb2.Member(rank=0, incarnation="i")
        request = coordinator_pb2.JoinRequest(job=f"many{number}", member=member, world_size=2)
        try:
            join(request.SerializeToString(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            codes.add((code_of(error), reason_of(error)))
    assert codes == {(C.RESOURCE_EXHAUSTED, "limit")}
    services.check()

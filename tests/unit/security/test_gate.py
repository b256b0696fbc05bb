"""The gate of a live log server: every call, every role; and that it tells nothing of jobs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from swift_ft import events, tokens
from swift_ft._pb import log_pb2
from swift_ft.credentials import AUTHORIZATION, BEARER, ENV_TOKEN_FILE, open_channel
from swift_ft.errors import AccessDenied, LogUnavailable
from swift_ft.log import admin
from swift_ft.log.protocol import client_options, message_of, reason_of
from swift_ft.tokens import LOG, MAY_CALL, Role
from swift_ft_services.authorization import Call, CallLimits, Gate, Lane, LaneLimits
from swift_ft_services.logserver.state import EngineConfig
from tests.descriptors import requests_of_methods
from tests.health_probe import check_service
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.append_call import opening
from tests.unit.log.frames import frame_of
from tests.unit.log.service import impatient_about
from tests.unit.security import world
from tests.unit.security.world import JOB, RANK, Guarded, Keys, append, code_of, documented_roles, put

DENIED, UNKNOWN_CALLER = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
REQUESTS = {
    method.removeprefix(LOG): make for method, make in world.REQUESTS.items() if method.startswith(LOG)
}


@pytest.fixture
def server(keys: Keys) -> Iterator[Guarded]:
    with Guarded(keys) as server:
        yield server


def call(address: str, name: str, request: bytes, token: str | None) -> tuple[grpc.StatusCode, str, str]:
    """(code, words, reason) of one call of any kind, all its answers taken."""
    metadata = ((AUTHORIZATION, BEARER + token),) if token is not None else ()
    with grpc.insecure_channel(address) as channel:
        answers = channel.stream_stream(LOG + name)(iter([request]), metadata=metadata, timeout=10)
        try:
            for _ in answers:
                pass
        except grpc.RpcError as error:
            return code_of(error), message_of(error), reason_of(error)
    return grpc.StatusCode.OK, "", ""


def test_every_call_of_both_services_has_its_roles() -> None:
    assert MAY_CALL.keys() == requests_of_methods().keys() == world.REQUESTS.keys()
    assert {method: set(roles) for method, roles in MAY_CALL.items()} == documented_roles()


def test_a_token_reaches_no_newer_generation(server: Guarded, keys: Keys) -> None:
    fenced = keys.mint(RANK, generation=1)

    first, second = opening(), opening(generation=2)
    assert call(server.address, "Append", first, fenced)[0] is grpc.StatusCode.OK
    server.engine.administration.fence(JOB, 2)
    assert call(server.address, "Append", first, fenced)[2] == "stale-generation"
    assert call(server.address, "Append", second, fenced)[2] == "denied"
    assert call(server.address, "Append", second, keys.mint(RANK, generation=2))[0] is grpc.StatusCode.OK
    bound = keys.mint([Role.COORDINATOR], generation=2)
    request = log_pb2.FenceRequest(job=JOB, generation=3).SerializeToString()
    assert call(server.address, "Fence", request, bound)[2] == "denied"


def test_a_reader_with_a_bound_token_ends_with_its_generation(server: Guarded, keys: Keys) -> None:
    request = log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True)
    readers = {}
    with ExitStack() as stack:
        for name, generation in (("bound", 1), ("free", None)):
            credentials = keys.client(keys.mint(RANK, generation=generation), name)
            channel = stack.enter_context(open_channel(server.address, client_options(1 << 20), credentials))
            read = channel.unary_stream(LOG + "Read", log_pb2.ReadRequest.SerializeToString, None)
            readers[name] = read(request, timeout=20)
        eventually(lambda: len(server.engine.state.core.jobs[JOB].readers) == 2)
        server.engine.administration.fence(JOB, 2)
        frames = log_pb2.AppendRequest(frames=frame_of(0, generation=2)[1]).SerializeToString()
        record = opening(generation=2) + frames  # messages of protobuf one after the other are one
        assert call(server.address, "Append", record, keys.mint(RANK))[0] is grpc.StatusCode.OK
        assert next(readers["free"])
        with pytest.raises(grpc.RpcError) as caught:
            next(readers["bound"])
        assert (code_of(caught.value), reason_of(caught.value)) == (DENIED, "denied")


def test_every_open_of_a_stream_is_checked(server: Guarded, keys: Keys) -> None:
    """The first one is in order, the second one names another job."""
    server.engine.administration.fence("other", 1)
    opens = [log_pb2.Open(job=job, stream="s0.F", generation=1) for job in (JOB, "other")]
    request = log_pb2.AppendRequest(opens=opens).SerializeToString()
    assert call(server.address, "Append", request, keys.mint(RANK))[0] is DENIED
    assert not server.engine.state.core.jobs["other"].streams


def test_an_open_stream_ends_with_its_token(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked in the middle of a call: the next message is the last one that is looked at."""
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    more = threading.Event()
    opening = REQUESTS["Append"](JOB).SerializeToString()

    def requests() -> Iterator[bytes]:
        yield opening
        more.wait(10)
        yield log_pb2.AppendRequest(frames=frame_of(0)[1]).SerializeToString()

    metadata = ((AUTHORIZATION, BEARER + keys.mint(RANK)),)
    with grpc.insecure_channel(server.address) as channel:
        answers = channel.stream_stream(LOG + "Append", None, log_pb2.AppendReply.FromString)(
            requests(), metadata=metadata, timeout=20
        )
        while not next(answers).opened:
            pass
        (keys.verifying / keys.signing.name).unlink()
        server.gate._authority._look_at = 0.0  # type: ignore[union-attr]
        more.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        assert code_of(caught.value) is UNKNOWN_CALLER
    assert server.engine.state.core.jobs[JOB].streams["s0.F"].appended == 0


def test_a_reader_ends_with_its_token_and_leaves_no_lease(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    other = Keys(keys.directory)
    monkeypatch.setenv(ENV_TOKEN_FILE, str(other.file("writer", other.mint(RANK))))
    writer = LogWriter([server.address], JOB, 1)
    server.gate._authority._look_at = 0.0  # type: ignore[union-attr]
    put(writer, 0)
    request = log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True)
    credentials = keys.client(keys.mint(RANK), "reader")
    with open_channel(server.address, client_options(1 << 20), credentials) as channel:
        read = channel.unary_stream(LOG + "Read", log_pb2.ReadRequest.SerializeToString, None)
        answers = read(request, timeout=20)
        next(answers)
        assert server.engine.state.core.jobs[JOB].readers
        (keys.verifying / keys.signing.name).unlink()
        put(writer, 1)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        assert code_of(caught.value) is UNKNOWN_CALLER
        eventually(lambda: not server.engine.state.core.jobs[JOB].readers)
    writer.close(5)


def test_a_newer_token_in_the_file_is_taken(
    server: Guarded, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_TOKEN_FILE, str(keys.file("rank", keys.mint(RANK, lifetime_s=-5))))
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    events.configure("test")
    writer = LogWriter([server.address], JOB, 1, patience_s=30)
    append(writer, 0)
    eventually(lambda: any(event["event"] == "denied" for event in events.read(tmp_path)))
    with pytest.raises(AccessDenied, match="expired"):
        admin.inventory(server.address, JOB, 5.0)
    keys.file("rank", keys.mint(RANK))
    writer.flush(20)
    writer.close(5)
    assert admin.inventory(server.address, JOB, 5.0)[0].records == 1


def test_a_writer_that_is_not_let_in_is_told_so(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_TOKEN_FILE, str(keys.file("rank", keys.mint([Role.REPLAYER]))))
    writer = LogWriter([server.address], JOB, 1)
    append(writer, 0)
    impatient_about(writer, server.address, "another job or role")
    with pytest.raises(LogUnavailable, match="another job or role"):
        writer.flush(10)
    with pytest.raises(LogUnavailable):
        writer.close(0.1)


def test_health_asks_nobody_and_says_how_the_server_is_protected(server: Guarded) -> None:
    health = check_service(server.address)
    assert (health.status, health.tokens, health.tls, health.insecure) == ("SERVING", True, False, False)


def test_calls_of_one_address_are_counted_and_given_back(keys: Keys) -> None:
    request = log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True)
    with Guarded(None, limits=CallLimits(per_peer=3)) as server:
        with grpc.insecure_channel(server.address) as channel:
            read = channel.unary_stream(LOG + "Read", log_pb2.ReadRequest.SerializeToString, None)
            waiting = [read(request) for _ in range(3)]
            eventually(lambda: len(server.engine.state.core.jobs[JOB].readers) == 3)
            inventory, reading = (REQUESTS[name](JOB).SerializeToString() for name in ("Inventory", "Read"))
            code, words, reason = call(server.address, "Read", reading, None)
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit")
            assert "--calls-per-peer" in words
            # Who fills the places of readers keeps nobody from asking something else.
            assert call(server.address, "Inventory", inventory, None)[0] is grpc.StatusCode.OK
            waiting[0].cancel()
            eventually(lambda: call(server.address, "Read", reading, None)[0] is grpc.StatusCode.OK)
        eventually(lambda: not server.gate._calls)


class Unheard:
    """The context of a call whose end gRPC has not reported yet."""

    cancelled = False

    def add_callback(self, _callback: Callable[[], None]) -> bool:
        return True

    def cancel(self) -> None:
        self.cancelled = True


def test_a_call_that_is_ended_to_make_room_leaves_its_place_at_once() -> None:
    gate, now = Gate(None, limits=CallLimits(per_peer=1)), [0.0]
    lane = Lane("control", LaneLimits(calls=1, part=1.0), lambda: now[0])

    def enter() -> tuple[Call, Unheard]:
        call, visit, context = lane.admit(""), gate.admit(LOG + "Fence", None), Unheard()
        assert call is not None
        call.begin(context)
        visit.enter("ipv4:10.0.0.1:1", call.lane)
        call.on_end = visit.leave
        return call, context

    late, context = enter()
    late.waits_since = 0.0
    now[0] = 1.0
    enter()
    assert context.cancelled


def limited(config: EngineConfig, *requests: tuple[str, bytes]) -> list[tuple[grpc.StatusCode, str]]:
    with Guarded(None, config=config) as server:
        return [
            (code, reason)
            for name, request in requests
            for code, _, reason in [call(server.address, name, request, None)]
        ]


OK, LIMITED = (grpc.StatusCode.OK, ""), (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit")


def test_jobs_are_limited_by_whatever_they_would_be_made() -> None:
    requests = [(name, REQUESTS[name]("second").SerializeToString()) for name in REQUESTS]
    answers = limited(EngineConfig(jobs_max=1), *requests)
    refused = {name for (name, _), answer in zip(requests, answers, strict=True) if answer == LIMITED}
    # What looks at, trims, resets or drops a job that is not there makes none.
    assert refused == {"Append", "Fence"}
    unknown = (grpc.StatusCode.NOT_FOUND, "unknown-job")
    assert {answer for answer in answers if answer != LIMITED} == {OK, unknown}


def test_streams_of_a_job_are_limited() -> None:
    requests = [("Append", opening(stream=stream)) for stream in ("a", "b", "c", "a")]
    answers = limited(EngineConfig(job_streams_max=2), *requests)
    assert answers == [OK, OK, LIMITED, OK]


def test_writers_of_a_job_are_limited_by_what_they_may_have_under_way() -> None:
    config = EngineConfig(credit_bytes=1000, body_bytes_max=1000, job_bytes_max=5000)
    assert 2 * config.writer_bytes_max <= config.job_bytes_max < 3 * config.writer_bytes_max
    opening = REQUESTS["Append"](JOB)
    with Guarded(None, config=config) as server, grpc.insecure_channel(server.address) as channel:
        append = channel.stream_stream(
            LOG + "Append", log_pb2.AppendRequest.SerializeToString, log_pb2.AppendReply.FromString
        )
        done = threading.Event()

        def requests() -> Iterator[log_pb2.AppendRequest]:
            yield opening
            done.wait(20)

        held = [append(requests()) for _ in range(2)]
        for answers in held:
            while not next(answers).opened:
                pass
        third = append(iter([opening]))
        with pytest.raises(grpc.RpcError) as caught:
            list(third)
        assert (code_of(caught.value), reason_of(caught.value)) == LIMITED
        held[0].cancel()
        eventually(lambda: call(server.address, "Append", opening.SerializeToString(), None)[0] == OK[0])
        done.set()


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "Append"])
def test_bytes_that_are_no_request_are_invalid_and_large_ones_too_large(name: str) -> None:
    large = b"\x0a" + b"\xff\xff\x7f" + b"x" * ((1 << 21) - 1)
    with Guarded(None) as server:
        assert call(server.address, name, b"\xff\xff\xff", None)[2] == "invalid"
        assert call(server.address, name, large, None)[2] == "oversize"

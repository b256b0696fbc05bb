"""Fault 41: no credential, an expired one, another job's. Both services as processes, over TLS.

Refused with UNAUTHENTICATED or PERMISSION_DENIED, and so that nobody learns whether a job is there.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import grpc
import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2, log_pb2, log_pb2_grpc
from swift_ft.coordinator_client import CoordinatorClient, make_member
from swift_ft.credentials import ENV_CA, ENV_TOKEN_FILE
from swift_ft.errors import AccessDenied
from swift_ft.log import admin
from swift_ft.tokens import COORDINATOR, EVERY_JOB, LOG, Role, SigningKey, new_key
from swift_ft.tools.credentials import CertificateAuthority
from tests.integration.logserver_world import serve
from tests.patience import eventually
from tests.unit.security.world import RANK, REQUESTS, Keys, documented_roles

JOB = "job"
MARK = "MARKEDTOKEN"


NOT_LET_IN = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class World:
    """A log server and a coordinator, TLS and tokens, with one job that rank 0 has joined."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.keys = Keys(directory / "keys")
        self.ca = CertificateAuthority(directory / "ca")
        self.pair = self.ca.issue("server", "127.0.0.1")
        self.processes: list[subprocess.Popen[bytes]] = []
        (directory / "events").mkdir()
        monkeypatch.setenv("SWIFT_EVENTS", str(directory / "events"))
        monkeypatch.setenv(ENV_CA, str(self.ca.certificate))
        to_logs = self.keys.mint([Role.COORDINATOR], job=EVERY_JOB)
        monkeypatch.setenv(ENV_TOKEN_FILE, str(self.keys.file("coordinator", to_logs)))
        self.log = self._start("logserver")
        self.coordinator = self._start("coordinator", "--log-servers", self.log, "--lease-s", "600")
        monkeypatch.setenv(ENV_TOKEN_FILE, str(self.keys.file("rank", self.keys.mint(RANK))))
        self.client = CoordinatorClient(self.coordinator, JOB, patience_s=10)
        self.client.join(coordinator_pb2.JoinRequest(member=make_member(0), world_size=1))

    def _start(self, name: str, *flags: str) -> str:
        flags += ("--token-keys", str(self.keys.verifying), "--log-level", "DEBUG")
        flags += ("--tls-cert", str(self.pair.certificate), "--tls-key", str(self.pair.key))
        process, address = serve(name, self.directory, *flags)
        self.processes.append(process)
        return address

    def inventory(self) -> log_pb2.InventoryReply:
        """What the log server has of the job, from generation 1 on."""
        token = self.keys.mint([Role.OPERATOR])
        tls = grpc.ssl_channel_credentials(self.ca.certificate.read_bytes())
        bearer = (("authorization", f"Bearer {token}"),)
        with grpc.secure_channel(self.log, tls) as channel:
            ask = log_pb2_grpc.LogStub(channel).Inventory

            def granted() -> log_pb2.InventoryReply | None:
                found: log_pb2.InventoryReply = ask(
                    log_pb2.InventoryRequest(job=JOB), metadata=bearer, timeout=10
                )
                return found if found.generation else None

            return eventually(granted, "generation 1")

    def call(self, method: str, request: bytes, authorization: str | None) -> tuple[grpc.StatusCode, str]:
        """(code, everything that was said) of one call, all its answers taken."""
        address = self.log if method.startswith(LOG) else self.coordinator
        metadata = () if authorization is None else (("authorization", authorization),)
        tls = grpc.ssl_channel_credentials(self.ca.certificate.read_bytes())
        with grpc.secure_channel(address, tls) as channel:
            answers = channel.stream_stream(method)(iter([request]), metadata=metadata, timeout=10)
            try:
                for _ in answers:
                    if method == COORDINATOR + "Watch":
                        answers.cancel()
                        return grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)  # noqa: PT017  (what fails is the call itself)
                return error.code(), f"{error.details()} {error.trailing_metadata()}"
        return grpc.StatusCode.OK, ""

    def close(self) -> None:
        self.client.close()
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0

    def written(self) -> str:
        """All that the services have said anywhere: output, events, and what they keep."""
        kept = [
            path
            for path in self.directory.rglob("*")
            if path.is_file() and self.keys.directory not in path.parents
        ]
        return "\n".join(path.read_bytes().decode(errors="replace") for path in kept)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.close()


def test_f41_no_credential_an_expired_one_or_another_jobs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = list(Role)
    stranger = SigningKey.load(new_key(tmp_path / "stranger")[0], "--key")
    refused = {
        "none": (None, grpc.StatusCode.UNAUTHENTICATED),
        "garbage": ("Bearer a.b.c", grpc.StatusCode.UNAUTHENTICATED),
        "expired": (f"Bearer {world.keys.mint(everything, lifetime_s=-5)}", grpc.StatusCode.UNAUTHENTICATED),
        "stranger": (f"Bearer {stranger.mint(JOB, everything, 60)}", grpc.StatusCode.UNAUTHENTICATED),
        "another": (f"Bearer {world.keys.mint(everything, 'another')}", grpc.StatusCode.PERMISSION_DENIED),
        "no role": (f"Bearer {world.keys.mint([])}", grpc.StatusCode.PERMISSION_DENIED),
    }
    logged = world.inventory()
    before = world.client.status().view
    for method, request in REQUESTS.items():
        for who, (authorization, code) in refused.items():
            answers = {
                world.call(method, request(job).SerializeToString(), authorization)
                for job in (JOB, "absent", "../up", "")
            }
            assert len(answers) == 1, (method, who, answers)
            if (method, who) == (COORDINATOR + "Jobs", "another"):
                code = grpc.StatusCode.OK  # of its own jobs, of which there is none
            assert answers.pop()[0] is code, (method, who)
    after = world.client.status().view
    for view in (before, after):  # the first fence may be answered meanwhile
        view.revision = 0
        view.waiting_for = ""
    assert after == before, "somebody did something"
    assert world.inventory() == logged
    assert not (tmp_path / "logserver" / "absent").exists()
    assert not (tmp_path / "logserver" / "another").exists()
    for job, seen in ((JOB, [JOB]), ("another", []), (EVERY_JOB, [JOB])):
        token = world.keys.mint([Role.OPERATOR], job)
        monkeypatch.setenv(ENV_TOKEN_FILE, str(world.keys.file("lists", token)))
        with CoordinatorClient(world.coordinator, "") as client:
            assert [one.job for one in client.jobs().jobs] == seen


def test_f41_every_role_may_call_what_the_document_says_and_nothing_else(world: World) -> None:
    """Both services. What ends the job or its log is asked last."""
    may_call, last = documented_roles(), (LOG + "Drop", COORDINATOR + "MemberExited", COORDINATOR + "Fail")
    for method, role in product(sorted(REQUESTS, key=lambda method: method in last), Role):
        token = f"Bearer {world.keys.mint([role])}"
        code, words = world.call(method, REQUESTS[method](JOB).SerializeToString(), token)
        if role in may_call[method]:
            assert code not in NOT_LET_IN, (method, role, code, words)
        else:
            assert (code, "denied" in words) == (grpc.StatusCode.PERMISSION_DENIED, True), (method, role)


def test_f41_a_token_of_one_generation_is_worth_nothing_in_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read with, joined with and watched with no more, although these calls name no generation."""
    world.client.call(coordinator_pb2.ReadyRequest(generation=1))
    world.client.watch().wait_for(lambda view: view.state == coordinator_pb2.RUNNING, 20)
    bound = f"Bearer {world.keys.mint(list(Role), generation=1)}"
    whole = {name: request(JOB).SerializeToString() for name, request in REQUESTS.items()}
    names_none = [COORDINATOR + name for name in ("Join", "Watch", "Status")] + [
        LOG + "Read",
        LOG + "Digests",
    ]
    for name in names_none:
        code = world.call(name, whole[name], bound)[0]
        assert code is not grpc.StatusCode.PERMISSION_DENIED, (name, code)
    world.client.call(coordinator_pb2.ExitRequest(pid=os.getpid(), exit_code=-9))
    world.client.watch().wait_for(lambda view: view.generation == 2, 20)
    inventory = log_pb2.InventoryRequest(job=JOB).SerializeToString()
    free = f"Bearer {world.keys.mint(list(Role))}"
    asks = LOG + "Inventory"
    eventually(lambda: world.call(asks, inventory, bound)[0] is not grpc.StatusCode.OK, "generation 2")
    monkeypatch.setenv(ENV_TOKEN_FILE, str(world.keys.file("bound", bound.removeprefix("Bearer "))))
    with CoordinatorClient(world.coordinator, "") as client:
        assert not client.jobs().jobs
    for name, request in whole.items():
        if name == COORDINATOR + "Jobs":
            continue
        code, words = world.call(name, request, bound)
        if name == LOG + "Append":
            assert code is grpc.StatusCode.FAILED_PRECONDITION  # generation 1, which it names, is over
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED, (name, code, words)
            assert "bound to generation 1" in words
    assert world.call(COORDINATOR + "Status", whole[COORDINATOR + "Status"], free)[0] is grpc.StatusCode.OK


def test_f41_a_launcher_whose_token_has_expired_tells_of_a_death_once_it_has_a_newer_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no member, but it was let in. A death that is not told costs a lease."""
    monkeypatch.setenv(ENV_TOKEN_FILE, str(world.keys.file("launcher", world.keys.mint(RANK))))
    with CoordinatorClient(world.coordinator, JOB, patience_s=30) as launcher:
        launcher.watch().wait_for(lambda view: True, 20)
        world.keys.file("launcher", world.keys.mint(RANK, lifetime_s=-5))
        told: list[str] = []

        def tell() -> None:
            launcher.call(coordinator_pb2.ExitRequest(pid=os.getpid(), exit_code=-9))
            told.append("exit")

        telling = threading.Thread(target=tell)
        telling.start()
        trail = world.directory / "events"
        eventually(lambda: any(event["event"] == "denied" for event in events.read(trail)))
        assert not told
        world.keys.file("launcher", world.keys.mint(RANK))
        telling.join(20)
        assert told == ["exit"]
        world.client.watch().wait_for(lambda view: view.state != coordinator_pb2.RUNNING, 20)


def test_f41_tokens_are_written_nowhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error path with a token that can be recognised; then all that was written is searched for it."""
    good = world.keys.mint(RANK)
    tokens = {
        "good": good,
        "expired": world.keys.mint(RANK, lifetime_s=-5),
        "other": world.keys.mint(RANK, "other"),
        "marked": f"{MARK}.{MARK}.{MARK}",
        "long": MARK * 600,
        "changed": f"{good}{MARK}",
    }
    marks = {MARK, *(part for token in tokens.values() for part in token.split(".") if len(part) > 40)}
    marks -= {good.split(".")[0]}  # the header, which names algorithm and key only
    said = []
    for name, token in tokens.items():
        for method, request in REQUESTS.items():
            for data in (request(JOB).SerializeToString(), request("../x").SerializeToString(), b"\xff"):
                if name == "good" and method == COORDINATOR + "Fail":
                    continue  # the job is to live on
                said.append(world.call(method, data, f"Bearer {token}")[1])
        said.append(world.call(LOG + "Inventory", b"", token)[1])
    for token in ("expired", "other", "marked"):
        monkeypatch.setenv(ENV_TOKEN_FILE, str(world.keys.file(token, tokens[token])))
        with CoordinatorClient(world.coordinator, JOB) as client:
            for call in (client.status, lambda: admin.inventory(world.log, JOB, 5.0)):
                words = "the token has expired" if token == "expired" else None
                with pytest.raises(AccessDenied, match=words) as caught:
                    call()
                assert "\n" not in str(caught.value)
                said.append(str(caught.value))
    assert any(event["event"] == "denied" for event in events.read(world.directory / "events"))
    everything = world.written() + "\n".join(said)
    assert "denied" in everything
    assert [mark for mark in marks if mark in everything] == []

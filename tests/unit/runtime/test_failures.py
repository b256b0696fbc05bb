"""A loss while the coordinator is away waits for it; and what is said of an error that ends a job."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import is_communication, words_of
from swift_ft.comm.gloo import GlooBackend
from swift_ft.comm.rank_store import stores_of
from swift_ft.errors import Divergence, Fenced, ServiceError
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member
from swift_ft.train.failures import Failures, Retries
from tests.patience import eventually
from tests.unit.control.test_client import Served
from tests.unit.runtime.wired import site_of

TIMEOUT_S = 2.0
AWAY_S = 1.2
LOST = RuntimeError("process group world: Connection closed by peer")


def failures_of(member: Member, communicator: Any) -> Failures:
    config = SessionConfig(suspicion_timeout_s=TIMEOUT_S)
    return Failures(site_of(config=config, member=member, communicator=communicator), Retries(0))


class World:
    """A rank whose connection has broken, and a coordinator that can go away and come back."""

    def __init__(self, patience_s: float) -> None:
        self.served = Served()
        self.member = Member(self.served.address, "j", 0, "i")
        self.member.client.patience_s = patience_s
        self.member.client.member = self.member.identity
        watcher: Any = SimpleNamespace(latest=None)
        self.member.watcher = watcher
        broken: Any = SimpleNamespace(lost_peer=lambda error: error is LOST, broken=None)
        self.failures = failures_of(self.member, broken)

    def heard(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.served.scripted.requests)

    def come_back(self, kind: type, *, notices: bool) -> threading.Thread:
        """After a while; the watcher has the notice a little after what is said was answered."""

        def come() -> None:
            time.sleep(AWAY_S)
            self.served.start()
            if notices:
                eventually(lambda: self.heard(kind))
                time.sleep(0.1)
                self.member._noticed += 1

        thread = threading.Thread(target=come)
        thread.start()
        return thread


@pytest.fixture(params=[60.0, AWAY_S / 4], ids=["patient", "impatient"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A call waits longer than the coordinator is away, or not."""
    made = World(request.param)
    yield made
    made.member.client.close()
    made.served.stop()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(LOST, pb.SuspectRequest), (Divergence("s1.F step 3"), pb.RefuseRequest)],
)
def test_a_loss_waits_for_a_coordinator_that_is_away(world: World, error: Exception, kind: type) -> None:
    world.served.stop()
    back = world.come_back(kind, notices=True)
    world.failures.handle(error, 1)
    back.join()
    assert world.member.noticed
    assert not world.heard(pb.FailRequest)


def test_one_that_answers_and_makes_no_generation_is_not_waited_for(world: World) -> None:
    world.served.stop()
    back = world.come_back(pb.SuspectRequest, notices=False)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        world.failures.handle(LOST, 1)
    back.join()
    assert time.monotonic() - began >= AWAY_S + TIMEOUT_S
    assert world.heard(pb.FailRequest)


def test_an_answer_that_refuses_ends_the_wait(world: World) -> None:
    world.served.scripted.script = [grpc.StatusCode.FAILED_PRECONDITION]
    with pytest.raises(Fenced):
        world.failures.handle(LOST, 1)


def test_what_is_said_to_nobody_is_said_again(world: World) -> None:
    world.served.stop()
    world.member.client.patience_s = 0.1
    client = world.member.client
    assert not world.member.say(
        lambda: client.call(pb.ReportRequest(generation=1, has_state=True, version=3))
    )
    assert not world.member.say(lambda: client.call(pb.ReadyRequest(generation=1, version=3)))
    assert not world.member.say(lambda: client.call(pb.FinishRequest(version=3)))
    world.served.start()
    client.patience_s = 60.0
    assert world.member.say(lambda: client.call(pb.ReportRequest(generation=1, has_state=True, version=3)))
    assert world.heard(pb.ReportRequest) == 1


def test_groups_that_cannot_be_built_while_it_is_away_are_no_error_of_the_trainer(world: World) -> None:
    world.served.stop()
    world.member.client.patience_s = 0.1
    with pytest.raises(RuntimeError, match=r"^process group: no answer from the coordinator") as raised:
        stores_of(world.member.client)(1).check(["built-1"])
    assert is_communication(raised.value, GlooBackend().is_lost_peer)


STICKY = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore of it")


def wrapped(error: Exception) -> Exception:
    """As pipelining wraps it."""
    outer = RuntimeError("[Stage 1] failed to run forward:")
    outer.__cause__ = error
    return outer


class Left(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr("os._exit", leave)


@pytest.mark.usefixtures("leaves")
@pytest.mark.parametrize("error", [STICKY, wrapped(STICKY)], ids=["plain", "wrapped"])
@pytest.mark.parametrize("noticed", [False, True], ids=["alone", "while another is lost"])
def test_a_rank_without_its_device_leaves_at_once_and_offers_nothing(
    world: World, error: Exception, noticed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    world.member._noticed += noticed
    for handle in (world.failures.handle, world.failures.await_notice):
        with pytest.raises(Left) as left:
            handle(error, 1)
        assert left.value.args == (ServiceError.exit_code,)  # the launcher checks the place, then replaces it
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("swift: rank 0 has lost its device")
    assert "an illegal memory access was encountered" in line
    assert world.served.scripted.requests == []


@pytest.mark.usefixtures("leaves")
def test_a_device_that_failed_behind_a_collective_is_lost_too(world: World) -> None:
    groups: Any = SimpleNamespace(lost_peer=lambda error: False, broken=STICKY)
    with pytest.raises(Left):
        failures_of(world.member, groups).handle(RuntimeError("process group"), 1)


def of_memory() -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = 2
    return error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), of_memory()])
def test_memory_that_is_used_up_is_the_trainers_error(world: World, error: Exception) -> None:
    with pytest.raises(type(error)):
        world.failures.handle(error, 1)
    assert world.heard(pb.FailRequest)


# -- errors --


def test_what_it_was_raised_from_is_said_too() -> None:
    """A worker of a DataLoader was killed; the job had failed because "[Stage 1] failed to run forward:"."""
    error = RuntimeError("\n    [Stage 1] failed to run forward:\n    args: ()\n")
    error.__cause__ = ValueError("no such token\nand more")
    assert words_of(error) == "RuntimeError: [Stage 1] failed to run forward: ValueError: no such token"
    assert words_of(error.__cause__) == "ValueError: no such token"
    assert words_of(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5678"),
            True,
        ),
        (RuntimeError("Process group world: connection of an ended generation"), True),
        (RuntimeError("process group: there is no generation yet"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection"), False),
    ],
)
def test_what_a_lost_peer_may_be_behind(error: Exception, expected: bool) -> None:
    lost_peer = GlooBackend().is_lost_peer
    assert is_communication(error, lost_peer) is expected
    assert is_communication(wrapped(error), lost_peer) is expected

"""A rank whose coordinator does not know its job any more: it runs on another directory, or on an emptied one."""

import math
import time
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import Fenced, ServiceError, SwiftError, UnknownJob
from swift_ft.train.coordinator_session import ENV_HAS_RUN, Holder, Member


class Asked:
    """The coordinator's client. ``answers``: to heartbeats, one after the other; then the rank is closed."""

    forgotten = "the coordinator does not know job j any more"

    def __init__(self, member: Member, *answers: SwiftError | None) -> None:
        self.calls: list[str] = []
        self.renewed_at = -math.inf
        self._member, self._answers = member, list(answers)

    def call(self, _beat: pb.HeartbeatRequest) -> None:
        self.calls.append("heartbeat")
        error = self._answers.pop(0)
        if not self._answers:
            self._member._closed.set()
        if error is not None:
            raise error

    def status(self) -> None:
        self.calls.append("status")
        if (error := self._answers.pop(0)) is not None:
            raise error

    def join(self, *_: object, **__: object) -> int:
        self.calls.append("join")
        raise ServiceError("no answer")


def asking(rank: int, *answers: SwiftError | None) -> tuple[Member, Asked]:
    member = Member("127.0.0.1:1", "j", rank, "i")
    member.client.close()
    asked: Any = Asked(member, *answers)
    member.client = asked
    member._measured_at = float("inf")
    member._holder = Holder()
    watcher: Any = None
    member.watcher = watcher
    member._say_wanted = lambda: None  # type: ignore[method-assign]
    return member, asked


def test_it_is_said_once_and_the_rank_goes_on_asking(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = UnknownJob("nobody knows job j")
    for rank, lines in ((0, 2), (1, 0)):
        member, asked = asking(rank, unknown, ServiceError("away"), unknown, None, unknown, unknown)
        member._beat(0.0)
        assert len(asked.calls) == 6
        said = capsys.readouterr().err.splitlines()
        assert (
            said
            == ["swift: nobody knows job j; training goes on, but the job can neither recover nor finish"]
            * lines
        )


def test_what_renews_the_lease_stands_for_a_beat() -> None:
    member, asked = asking(1, None)
    began = time.monotonic()
    asked.renewed_at = began + 0.15
    member._beat(0.1)
    assert time.monotonic() - began >= 0.25
    assert asked.calls == ["heartbeat"]


def test_the_sidecar_is_told_of_what_has_renewed_the_lease_and_of_nothing_else() -> None:
    member, asked = asking(1, ServiceError("away"), None)
    told: list[float] = []
    member.on_renewed = told.append
    began = time.monotonic()
    asked.renewed_at = began + 0.15
    member._beat(0.1)
    assert told[0] == asked.renewed_at
    assert len(told) == 2, "a report, and the heartbeat that was answered"
    assert told[1] >= began


@pytest.mark.parametrize(
    ("answer", "has_run", "error", "calls"),
    [
        (UnknownJob("no such job"), "1", UnknownJob, ["status"]),
        (UnknownJob("no such job"), "", ServiceError, ["join"]),
        (ServiceError("away"), "1", ServiceError, ["status", "join"]),
        (None, "1", ServiceError, ["status", "join"]),
    ],
)
def test_a_job_that_has_run_does_not_begin_anew_because_it_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
    answer: SwiftError | None,
    has_run: str,
    error: type[SwiftError],
    calls: list[str],
) -> None:
    monkeypatch.setenv(ENV_HAS_RUN, has_run)
    member, asked = asking(1, answer)
    with pytest.raises(error, match="any more" if error is UnknownJob else "no answer"):
        member.join(2, {}, {}, Holder())
    assert asked.calls == calls


@pytest.mark.parametrize("error", [Fenced("another one has it"), ServiceError("away")])
def test_whoever_must_hold_its_rank_asks(error: SwiftError) -> None:
    member, _ = asking(1, None, error)
    member.check_held()
    with pytest.raises(type(error), match=str(error)):
        member.check_held()


def test_a_device_that_hangs_is_told_once_and_taken_back_once() -> None:
    said: list[str] = []
    looks = iter(["", "it hangs", "it hangs still", "", ""])

    class Hanging(Holder):
        def hangs(self) -> str:
            return next(looks)

    member, asked = asking(0, None, None, None, None, None)
    beat = asked.call

    def call(request: Any) -> None:
        if isinstance(request, pb.SuspectRequest):
            assert not request.generation
            said.append(request.reason)
        else:
            beat(request)

    asked.call = call  # type: ignore[method-assign]
    member._holder = Hanging()
    member._beat(0.0)
    assert said == ["it hangs", ""]

"""Is this the version that all ranks save? What a rank does with what the View says."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import Divergence, LogInterrupted, LogUnavailable, ServiceError, SwiftError
from swift_ft.log.record import Dropped, Steps
from swift_ft.train.checkpointing import EarlyCheckpoint, UnloggedSteps, flush_at_end


class FakeMember:
    def __init__(self) -> None:
        self.watcher = SimpleNamespace(latest=None)
        self.identity = SimpleNamespace(rank=1)
        self.asked: list[int] = []

    def agree(self, version: int | None) -> None:
        self.watcher.latest = pb.View(checkpoint_at=version)

    def ask_checkpoint(self, after_version: int, reason: str) -> None:
        self.asked.append(after_version)


def saved(early: EarlyCheckpoint, versions: range) -> list[int]:
    return [version for version in versions if early.due(version)]


def test_it_is_saved_at_the_agreed_version_alone() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    assert saved(early, range(5)) == []
    member.agree(None)
    assert saved(early, range(5)) == []
    member.agree(7)
    assert saved(early, range(5, 12)) == [7]
    assert member.asked == []


def test_who_is_past_it_says_so_once() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    member.agree(7)
    assert saved(early, range(9, 12)) == []
    assert member.asked == [9]
    member.agree(11)
    assert saved(early, range(12, 13)) == []
    assert member.asked == [9, 12]
    member.agree(15)
    assert saved(early, range(13, 20)) == [15]
    assert member.asked == [9, 12]


def test_after_a_restore_the_same_number_means_another_checkpoint() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    member.agree(7)
    assert saved(early, range(6, 9)) == [7]
    assert saved(early, range(5, 9)) == [7]  # a replay, or a restore: saved again
    assert saved(early, range(5, 6)) == []
    assert saved(early, range(8, 9)) == []  # and missed in this life
    assert member.asked == [8]


def dropped(first: int, last: int) -> Dropped:
    return Dropped(Steps(first, last), 3, 300, ("s1.F",))


def told(member: FakeMember, *lost: Dropped | None, from_step: int = 10) -> list[int]:
    unlogged = UnloggedSteps(cast(Any, member), cast(Any, None))
    for step, what in enumerate(lost, from_step):
        unlogged.report(step, what)
    return member.asked


def test_unlogged_steps_ask_for_a_checkpoint_when_they_begin_and_when_they_end() -> None:
    lost = [dropped(step, step) for step in (11, 12, 13)]
    assert told(FakeMember(), None, *lost, None, None) == [11, 13]
    assert told(FakeMember(), None, lost[0], None, lost[2], None) == [11, 11, 13, 13]


def test_a_checkpoint_that_has_them_in_it_is_enough() -> None:
    member = FakeMember()
    member.agree(12)  # has step 11 in it
    assert told(member, None, dropped(11, 11), None) == []
    member.watcher.latest = pb.View(checkpoints=[0, 11])
    assert told(member, None, dropped(11, 11)) == [11]
    member.watcher.latest = pb.View(checkpoints=[0, 12])
    assert told(member, dropped(11, 11), None, from_step=11) == [11]


def test_after_a_restore_the_steps_that_were_dropped_are_of_no_history() -> None:
    member = FakeMember()
    unlogged = UnloggedSteps(cast(Any, member), cast(Any, None))
    unlogged.report(17, dropped(17, 17))
    unlogged.report(10, None)
    unlogged.report(11, None)
    assert member.asked == [17]


class Stuck:
    def __init__(self, error: SwiftError, drops: bool) -> None:
        self.error, self.drops = error, drops

    def flush(self, timeout_s: float) -> None:
        raise self.error


def test_a_run_that_is_done_does_not_fail_because_the_log_is_stuck() -> None:
    for error in (LogUnavailable("stuck"), ServiceError("not within 60 s")):
        flush_at_end(Stuck(error, drops=True), 0, 60.0)  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            flush_at_end(Stuck(error, drops=False), 0, 60.0)  # type: ignore[arg-type]
    for error in (LogInterrupted("a new generation"), Divergence("other bits")):
        with pytest.raises(type(error)):
            flush_at_end(Stuck(error, drops=True), 0, 60.0)  # type: ignore[arg-type]

"""Is this the version that all ranks save? What a rank does with what the View says."""

from types import SimpleNamespace

from swift._pb import coordinator_pb2 as pb
from swift.runtime.early import EarlyCheckpoint


class FakeMember:
    def __init__(self) -> None:
        self.watcher = SimpleNamespace(latest=None)
        self.asked: list[int] = []

    def agree(self, version: int | None) -> None:
        self.watcher.latest = pb.View(checkpoint_at=version)

    def ask_checkpoint(self, after_version: int, reason: str) -> None:
        self.asked.append(after_version)


def saved(member: FakeMember, early: EarlyCheckpoint, versions: range) -> list[int]:
    return [version for version in versions if early.due(version)]


def test_it_is_saved_at_the_agreed_version_alone() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    assert saved(member, early, range(5)) == []
    member.agree(None)
    assert saved(member, early, range(5)) == []
    member.agree(7)
    assert saved(member, early, range(5, 12)) == [7]
    assert member.asked == []


def test_who_is_past_it_says_so_once() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    member.agree(7)
    assert saved(member, early, range(9, 12)) == []
    assert member.asked == [9]
    member.agree(11)
    assert saved(member, early, range(12, 13)) == []
    assert member.asked == [9, 12]
    member.agree(15)
    assert saved(member, early, range(13, 20)) == [15]
    assert member.asked == [9, 12]


def test_after_a_restore_the_same_number_means_another_checkpoint() -> None:
    member = FakeMember()
    early = EarlyCheckpoint(member)  # type: ignore[arg-type]
    member.agree(7)
    assert saved(member, early, range(6, 9)) == [7]
    assert saved(member, early, range(5, 9)) == [7]  # a replay, or a restore: saved again
    assert saved(member, early, range(5, 6)) == []
    assert saved(member, early, range(8, 9)) == []  # and missed in this life
    assert member.asked == [8]

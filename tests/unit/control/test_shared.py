"""Copies of what the ranks of a generation share, against the coordinator's own part of it."""

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import cast

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm import rank_store
from swift_ft.comm.rank_store import CoordinatorStore, Known
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft_services.coordinator.driver import Sharing

TIMEOUT = timedelta(seconds=10)


class Coordinator:
    """One generation of one job, without a network."""

    def __init__(self, generation: int = 1) -> None:
        self.sharing = Sharing(generation, 4)
        self.calls = 0
        self.answers_lost = 0
        self._lock = threading.Condition()

    def begin(self, generation: int) -> None:
        self.sharing.begin(generation)

    def restart(self) -> None:
        self.sharing = Sharing(self.sharing.generation, 4)

    def line(self, incarnation: str) -> CoordinatorClient:
        return cast("CoordinatorClient", _Line(self, incarnation))

    def share(self, incarnation: str, asked: pb.ShareRequest) -> pb.ShareReply:
        generation = asked.generation
        with self._lock:
            self.calls += 1
            sharing = self.sharing
            over = pb.ShareReply(generation=sharing.generation)
            if generation != sharing.generation:
                return over
            if asked.epoch not in (0, sharing.epoch):
                return pb.ShareReply(generation=generation, epoch=sharing.epoch)
            after = []
            if changes := list(asked.changes):
                after = sharing.change(incarnation, asked.number, changes)
                while self.answers_lost:
                    self.answers_lost -= 1
                    after = sharing.change(incarnation, asked.number, changes)
                self._lock.notify_all()
            keys: Iterable[str] = list(asked.until)
            self._lock.wait_for(lambda: all(sharing._value(key) is not None for key in keys), asked.wait_s)
            news, revision, more = sharing.news(asked.seen)
        return pb.ShareReply(
            generation=generation, epoch=sharing.epoch, revision=revision, news=news, after=after, more=more
        )


class _Line:
    def __init__(self, coordinator: Coordinator, incarnation: str) -> None:
        self._coordinator = coordinator
        self._incarnation = incarnation

    def call(self, asked: pb.ShareRequest) -> pb.ShareReply:
        return self._coordinator.share(self._incarnation, asked)


def store(
    coordinator: Coordinator, rank: int, generation: int, known: Known | None = None
) -> CoordinatorStore:
    made = CoordinatorStore(coordinator.line(f"r{rank}"), generation, known)
    made.set_timeout(TIMEOUT)
    made.built()
    return made


def ranks(coordinator: Coordinator, count: int = 2, generation: int = 1) -> list[CoordinatorStore]:
    return [store(coordinator, rank, generation) for rank in range(count)]


def test_what_one_sets_the_other_gets() -> None:
    a, b = ranks(Coordinator())
    a.set("x", b"1")
    assert b.get("x") == b"1"
    a.set("x", b"2")
    a.set("empty", b"")
    assert b.check(["empty"])
    assert b.get("x") == b"2"
    assert b.get("empty") == b""
    assert (a.add("n", 2), b.add("n", 3)) == (2, 5)
    swapped = a.compare_set("s", b"", b"a"), b.compare_set("s", b"", b"b"), b.compare_set("t", b"x", b"y")
    assert swapped == (b"a", b"a", b"x")
    assert b.num_keys() == 4
    assert b.delete_key("x")
    assert not b.delete_key("x")
    assert not a.check(["x"])
    assert b.num_keys() == 3


def test_a_wait_ends_when_the_key_comes_and_a_missing_one_is_named() -> None:
    a, b = ranks(Coordinator())
    late = threading.Timer(0.05, lambda: a.set("x", b"1"))
    late.start()
    assert b.get("x") == b"1"
    late.join()
    with pytest.raises(DistStoreError, match=r"nobody has set y, z within 0\.05 s"):
        b.wait(["x", "y", "z"], timedelta(seconds=0.05))


def test_a_change_whose_answer_was_lost_counts_once() -> None:
    coordinator = Coordinator()
    a, b = ranks(coordinator)
    coordinator.answers_lost = 2
    assert a.add("n", 1) == 1
    assert b.add("n", 1) == 2


def test_what_is_set_once_goes_with_the_next_question() -> None:
    coordinator = Coordinator()
    a, b = ranks(coordinator)
    a.once = True
    a.set("x", b"1")
    assert (coordinator.calls, b.check(["x"]), coordinator.calls) == (0, False, 1)
    before = coordinator.calls
    a.wait(["x"])
    assert coordinator.calls == before + 1
    assert b.check(["x"])


def test_what_is_set_once_is_asked_for_once() -> None:
    coordinator = Coordinator()
    a, b = ranks(coordinator)
    b.once = True
    for n in range(20):
        a.set(f"k{n}", b"1")
    before = coordinator.calls
    for n in range(20):
        assert b.get(f"k{n}") == b"1"
    assert coordinator.calls == before + 1


def test_more_than_one_call_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_SAID_BYTES_MAX", 1000)
    coordinator = Coordinator()
    a, b = ranks(coordinator)
    a.once = True
    for n in range(40):
        a.set(f"k{n}", bytes([n]) * 300)
    a.check(["x"])
    assert coordinator.calls > 10
    assert all(b.get(f"k{n}") == bytes([n]) * 300 for n in range(40))


def test_a_newer_generation_and_a_coordinator_that_forgot_are_errors() -> None:
    for end, words in ((lambda c: c.begin(2), "it is 2 now"), (Coordinator.restart, "started again")):
        coordinator = Coordinator()
        a, _ = ranks(coordinator)
        a.set("x", b"1")
        end(coordinator)
        for call in (
            lambda a=a: a.set("y", b""),
            lambda a=a: a.check(["y"]),
            lambda a=a: a.get("y"),
        ):
            with pytest.raises(DistNetworkError, match=words):
                call()


def test_a_notice_ends_a_wait() -> None:
    a, _ = ranks(Coordinator())
    notice = threading.Timer(0.05, a.interrupt)
    notice.start()
    with pytest.raises(DistNetworkError):
        a.get("x")
    notice.join()


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_about_the_job_is_there_as_long_as_the_coordinator_or_one_rank_is(restarted: bool) -> None:
    """Rank 0 has said it and dies; the coordinator may have been started again before the next generation."""
    coordinator = Coordinator()
    known = [Known() for _ in range(3)]

    def rank(number: int, generation: int) -> CoordinatorStore:
        return store(coordinator, number, generation, known[number])

    first = [rank(number, 1) for number in range(2)]
    first[0].set("swift/shapes", b"s")
    first[0].set("swift/old", b"o")
    first[0].set("address", b"a")
    assert first[1].get("swift/shapes") == b"s"
    first[0].delete_key("swift/old")
    assert not first[1].check(["swift/old"])
    if restarted:
        coordinator.restart()
    coordinator.begin(2)
    second = [rank(number, 2) for number in (1, 2)]
    second[0].set("address2", b"b")
    assert second[1].get("swift/shapes") == b"s"
    assert second[1].get("address2") == b"b"
    assert not second[1].check(["swift/old"])
    assert not second[1].check(["address"])
    assert not second[0].check(["address"])

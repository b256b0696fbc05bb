"""What a rank says when it cannot do as planned."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.errors import RecordCorrupt, ReplayRefused, ServiceError, UsageError
from swift.runtime import restore
from swift.runtime.config import SessionConfig
from swift.runtime.faults import FaultInjector
from swift.runtime.restore import Restorer
from swift.runtime.state import TrainerState
from swift.runtime.updates import Updates


def test_a_step_that_cannot_be_taken_back_is_refused_and_leaves_no_state() -> None:
    updates = Updates(SessionConfig(), None, FaultInjector(0), lambda: None)
    state = TrainerState(1, updates)
    state.present = True

    def fails() -> list[Any]:
        raise ServiceError("this step cannot be taken back: the step made parameters NaN")

    updates.undo = fails  # type: ignore[method-assign]
    nothing: Any = None
    restorer = Restorer(0, nothing, nothing, state, nothing, FaultInjector(0), nothing)
    plan = pb.Plan(
        target_version=0, exact=True, ranks=[pb.RankPlan(rank=0, strategy=pb.UNDO, from_version=0)]
    )
    with pytest.raises(ReplayRefused, match="made parameters NaN"):
        restorer.follow(plan, nothing, [], lambda: None)
    assert not state.present  # the next report says so, and the plan copies or restores


class Opened:
    """A log as a restorer sees it: reader, writer and channel in one."""

    def __init__(self, drops: bool = False) -> None:
        self.expected: dict[tuple[str, str], dict[str, int]] = {}
        self.damaged: set[str] = set()
        self.drops = drops
        self.lacking: dict[str, tuple[int, int]] = {}
        self.floor = 0

    def forget_below(self, step: int) -> None:
        self.floor = step

    def lacks(self, stream: str, steps: tuple[int, int]) -> None:
        for server in ("l0", "l1"):  # a mark that is there already is not written again
            assert self.expected[stream, server] == {stream: steps[1]}
        self.lacking[stream] = steps

    def digests(self, stream: str, from_step: int, server: str, *, cancelled: Any) -> dict[str, int]:
        if server in self.damaged:
            raise RecordCorrupt(f"damaged on {server}")
        return {stream: from_step}

    def expect(self, stream: str, digests: dict[str, int], server: str) -> None:
        self.expected[stream, server] = dict(digests)

    def stream(self, stage: int, kind: str) -> str:
        return f"s{stage}.{kind}"

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("strategy", "lived", "asks"),
    [
        (pb.REPLAY, False, True),
        (pb.REPLAY, True, True),
        (pb.REPLICA, False, True),
        (pb.REPLICA, True, False),
        (pb.KEEP, True, False),
        (pb.KEEP, False, True),
    ],
)
def test_what_a_predecessor_logged_of_the_next_step_is_compared_where_nothing_is_replayed(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, lived: bool, asks: bool
) -> None:
    log = Opened()
    follow(monkeypatch, log, strategy, lived)
    assert (log.expected.get(("s1.F", "l0")) == {"s1.F": 3}) == asks
    assert (log.expected.get(("s1.F", "l1")) == {"s1.F": 3}) == asks
    assert bool(log.expected) == asks
    assert log.floor == 3  # what a sidecar's successor asks for may be trimmed below


def test_a_damaged_copy_is_taken_to_hold_what_the_other_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Opened()
    log.damaged.add("l0")
    follow(monkeypatch, log, pb.REPLAY, False)
    assert log.expected["s1.F", "l0"] == log.expected["s1.F", "l1"] == {"s1.F": 3}
    log.damaged.add("l1")
    with pytest.raises(RecordCorrupt, match="damaged on l0"):
        follow(monkeypatch, log, pb.REPLAY, False)


@pytest.mark.parametrize(
    ("strategy", "lived", "checkpoint", "lacks"),
    [
        (pb.REPLICA, False, 1, (1, 2)),
        (pb.REPLICA, False, 2, (2, 2)),
        (pb.REPLICA, False, 3, None),
        (pb.REPLICA, True, 1, None),
        (pb.REPLAY, False, 1, None),
    ],
)
def test_what_a_predecessor_may_have_dropped_is_declared_where_it_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    lived: bool,
    checkpoint: int,
    lacks: tuple[int, int] | None,
) -> None:
    log = Opened(drops=True)
    asked = follow(monkeypatch, log, strategy, lived, checkpoint)
    assert set(log.lacking.values()) == ({lacks} if lacks else set())
    assert set(log.lacking) == ({"s1.F", "s1.B", "s1.X", "s1.T", "r0.C"} if lacks else set())
    assert asked == ([2] if lacks else [])


def follow(
    monkeypatch: pytest.MonkeyPatch, log: Any, strategy: Any, lived: bool, checkpoint: int = 0
) -> list[int]:
    """A plan to version 3 of which nothing is replayed, and two log servers; gives what checkpoints were asked for."""
    asked: list[int] = []
    monkeypatch.setattr(restore, "LogReader", lambda servers, job: log)
    monkeypatch.setattr(Restorer, "_copy_replicas", lambda self, plan: None)
    state = TrainerState(1, Updates(SessionConfig(), None, FaultInjector(0), lambda: None))
    state.version, state.present, state.lived = 3, True, lived
    state.stages = [SimpleNamespace(stage_index=1)]
    state.load_state_dict = lambda values: None  # type: ignore[assignment, method-assign]
    store: Any = SimpleNamespace(load=lambda version: {})
    member: Any = SimpleNamespace(
        client=SimpleNamespace(job="job"),
        watcher=SimpleNamespace(latest=pb.View(checkpoints=[checkpoint])),
        ask_checkpoint=lambda after, reason: asked.append(after),
        noticed=False,
    )
    nothing: Any = None
    restorer = Restorer(0, member, log, state, store, FaultInjector(0), nothing)
    other = pb.RankPlan(rank=1, strategy=pb.KEEP, from_version=3)
    mine = pb.RankPlan(rank=0, strategy=strategy, from_version=3)
    plan = pb.Plan(target_version=3, exact=True, ranks=[mine, other])
    restorer.follow(plan, log, ["l0", "l1"], lambda: None)
    return asked


@pytest.mark.parametrize("setting", ["wait", ""])
def test_the_words_for_a_full_queue(setting: str) -> None:
    with pytest.raises(UsageError, match=r"log_when_full='.*'; give one of block, drop"):
        SessionConfig(log_when_full=setting)

"""What a rank says when it cannot do as planned."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.process_groups import Interrupted
from swift_ft.coordinator_messages import PublishedPlan
from swift_ft.errors import (
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ReplayRefused,
    ServiceError,
)
from swift_ft.log.reader import Holdings
from swift_ft.log.record import RecordKey, Steps, mark
from swift_ft.planner import Plan, RankPlan, Strategy
from swift_ft.train import replay, strategies
from swift_ft.train.replay import Restorer
from tests.unit.runtime.wired import site_of, state_of, updates_of


def test_a_step_that_cannot_be_taken_back_is_refused_and_leaves_no_state() -> None:
    updates = updates_of()
    state = state_of(1, updates)
    state.present = True

    def fails() -> list[Any]:
        raise ServiceError("this step cannot be taken back: the step made parameters NaN")

    updates.undo = fails  # type: ignore[method-assign]
    nothing: Any = None
    restorer = Restorer(site_of(state=state))
    plan = published(0, RankPlan(rank=0, strategy=Strategy.UNDO, from_version=0, reason=""))
    with pytest.raises(ReplayRefused, match="made parameters NaN"):
        restorer.follow(plan, nothing, [], lambda: None)
    assert not state.present  # the next report says so, and the plan copies or restores


class Opened:
    """A log as a restorer sees it: reader, writer and channel in one. All servers have the same."""

    drops = False

    def __init__(self) -> None:
        self.expected: dict[tuple[str, str], dict[RecordKey, bytes]] = {}
        self.damaged: set[str] = set()
        self.down: set[str] = set()
        self.called_off: set[str] = set()
        self.asked: list[str] = []
        self.witnesses: tuple[int, ...] = (1,)
        self.held: dict[str, list[RecordKey]] = {}
        self.lacking: dict[str, tuple[int, int]] = {}
        self.declared = False
        self.floor = self.trimmed = 0
        self.questions: list[tuple[str, str]] = []
        self.unlogged = self

    def forget_below(self, step: int) -> None:
        self.floor = step

    def lacks(self, stream: str, steps: tuple[int, int]) -> None:
        self.lacking[stream] = steps

    def declare(self) -> None:
        self.declared = True

    def holdings(self, server: str) -> Holdings | None:
        if server in self.damaged | self.called_off | self.down:
            return None
        return Holdings(frozenset(self.held), self.trimmed)

    def digests(self, stream: str, from_step: int, server: str, *, cancelled: Any) -> dict[RecordKey, bytes]:
        self.asked.append(server)
        self.questions.append((server, stream))
        if from_step < self.trimmed:
            raise RecordTrimmed(f"trimmed below {self.trimmed}")
        if server in self.damaged:
            raise RecordCorrupt(f"damaged on {server}")
        if server in self.called_off:
            raise LogInterrupted("called off")
        if server in self.down:
            raise LogUnavailable(f"{server} does not answer")
        return {key: b"" for key in self.held.get(stream, ()) if key.step >= from_step}

    def expect(self, stream: str, digests: dict[RecordKey, bytes], server: str) -> None:
        self.expected.setdefault((stream, server), {}).update(digests)

    def stream(self, stage: int, kind: str, rank: int = 0) -> str:
        return f"s{stage}c{rank}.{kind}"

    def close(self) -> None: ...


class Recovery:
    """Of rank 0, by a plan to version 3 without a replay. It has two log servers, and rank 1 a third one."""

    def __init__(self, log: Any, checkpoint: int = 0) -> None:
        self.log = log
        self.asked: list[int] = []
        """The checkpoints that it asked for."""
        state = state_of(1, updates_of())
        state.version, state.present = 3, True
        state.stages = [SimpleNamespace(stage_index=1)]
        state.destinations = state.shared_dict = dict  # type: ignore[method-assign, assignment]
        state.load_state_dict = lambda values: None  # type: ignore[assignment, method-assign]
        store: Any = SimpleNamespace(load=lambda version: {})
        copies = [pb.LogCopies(rank=0, servers=["l0", "l1"]), pb.LogCopies(rank=1, servers=["l2"])]
        self.member: Any = SimpleNamespace(
            client=SimpleNamespace(job="job"),
            watcher=SimpleNamespace(latest=pb.View(checkpoints=[checkpoint], log_copies=copies)),
            ask_checkpoint=lambda after, reason: self.asked.append(after),
            noticed=False,
            check=lambda: None,
        )
        self.site = site_of(member=self.member, channel=log, state=state, store=store)
        self.restorer = Restorer(self.site)

    def follow(
        self, strategy: Strategy, *, lived: bool = False, servers: Sequence[str] = ("l0", "l1")
    ) -> None:
        sources = (1,) if strategy is Strategy.REPLICA else ()
        self.site.state.lived = lived
        self.carry_out(ranked(0, strategy, sources), ranked(1, Strategy.KEEP), servers=servers)

    def carry_out(self, *ranks: RankPlan, servers: Sequence[str]) -> None:
        self.restorer.follow(published(3, *ranks), self.log, servers, lambda: None)


def ranked(rank: int, strategy: Strategy, sources: tuple[int, ...] = ()) -> RankPlan:
    return RankPlan(rank=rank, strategy=strategy, from_version=3, reason="", sources=sources)


def published(target: int, *ranks: RankPlan) -> PublishedPlan:
    plan = Plan(target_version=target, ranks=ranks, collective_source=-1, reason="")
    return PublishedPlan(generation=2, plan=plan, sources={})


Recovering = Callable[..., Recovery]


@pytest.fixture
def recovering(monkeypatch: pytest.MonkeyPatch) -> Recovering:
    """Makes a recovery out of that log."""

    def make(log: Opened, checkpoint: int = 0) -> Recovery:
        monkeypatch.setattr(replay, "LogReader", lambda servers, job: log)
        received = SimpleNamespace(state={}, bytes=0, seconds=0.0, digest="", witnesses=log.witnesses)
        monkeypatch.setattr(strategies, "receive_state", lambda *given, **named: received)
        return Recovery(log, checkpoint)

    return make


@pytest.mark.parametrize(
    ("strategy", "lived", "asks"),
    [
        (Strategy.REPLAY, False, True),
        (Strategy.REPLAY, True, True),
        (Strategy.REPLICA, False, True),
        (Strategy.REPLICA, True, False),
        (Strategy.KEEP, True, False),
        (Strategy.KEEP, False, True),
    ],
)
def test_what_a_predecessor_logged_of_the_next_step_is_compared_where_nothing_is_replayed(
    recovering: Recovering, strategy: Strategy, lived: bool, asks: bool
) -> None:
    log = Opened()
    log.held["s1c0.F"] = [RecordKey(step, 0, 0) for step in range(2, 4)]
    recovering(log, checkpoint=3).follow(strategy, lived=lived)
    for server in ("l0", "l1"):
        assert log.expected.get(("s1c0.F", server)) == ({RecordKey(3, 0, 0): b""} if asks else None)
    assert bool(log.expected) == asks
    assert log.floor == 3  # what a sidecar's successor asks for may be trimmed below
    assert not log.lacking


def test_a_damaged_copy_is_taken_to_hold_what_the_other_one_holds(recovering: Recovering) -> None:
    log = Opened()
    log.held["s1c0.F"] = [RecordKey(3, 0, 0)]
    log.damaged.add("l0")
    recovering(log).follow(Strategy.REPLAY)
    assert log.expected["s1c0.F", "l0"] == log.expected["s1c0.F", "l1"] == {RecordKey(3, 0, 0): b""}
    log.damaged.add("l1")
    with pytest.raises(RecordCorrupt, match="damaged on l0"):
        recovering(log).follow(Strategy.REPLAY)


def logged_to(last: int) -> Opened:
    """Rank 0 has logged its steps up to this one, its replica up to step 2; two microbatches each."""
    log = Opened()
    for dp_rank, steps in ((0, last + 1), (1, 3)):
        log.held[f"s1c{dp_rank}.F"] = [RecordKey(step, m, 0) for step in range(steps) for m in (0, 1)]
    return log


@pytest.mark.parametrize(
    ("strategy", "lived", "checkpoint", "last", "lacks"),
    [
        (Strategy.REPLICA, False, 0, 0, (1, 2)),
        (Strategy.REPLICA, False, 2, 0, (2, 2)),
        (Strategy.REPLICA, False, 3, 0, None),
        (Strategy.REPLICA, False, 0, 2, None),
        (Strategy.REPLICA, True, 0, 0, (1, 2)),
        (Strategy.REPLAY, False, 0, 0, None),
        (Strategy.CHECKPOINT, False, 0, 0, None),
        (Strategy.KEEP, False, 0, 0, None),
    ],
)
def test_what_a_predecessor_has_not_logged_is_declared_where_it_is_not_made_again(
    recovering: Recovering,
    strategy: Strategy,
    lived: bool,
    checkpoint: int,
    last: int,
    lacks: tuple[int, int] | None,
) -> None:
    log = logged_to(last)
    recovery = recovering(log, checkpoint)
    recovery.follow(strategy, lived=lived)
    assert log.lacking == ({"s1c0.F": lacks} if lacks else {})
    assert log.declared == bool(lacks)
    assert recovery.asked == ([2] if lacks else [])


@pytest.mark.parametrize("where", ["l0", "l2"])
def test_who_was_copied_in_a_recovery_that_was_superseded_still_declares(
    recovering: Recovering, where: str
) -> None:
    """A newer generation calls it off while it asks its own server, or the replica's."""
    log = logged_to(1)
    recovery = recovering(log)
    log.called_off.add(where)
    with pytest.raises(LogInterrupted):
        recovery.follow(Strategy.REPLICA)
    assert not log.lacking
    log.called_off.clear()
    recovery.follow(Strategy.KEEP)
    assert log.lacking == {"s1c0.F": (2, 2)}
    log.lacking.clear()
    recovery.follow(Strategy.KEEP)
    assert not log.lacking, "once is enough"


@pytest.mark.parametrize("got_out", [True, False])
def test_who_declares_what_another_generation_has_already_sent_asks_for_the_checkpoint(
    recovering: Recovering, got_out: bool
) -> None:
    """The marks that a call that was called off has left are due, and go out with the next report."""
    log = logged_to(1)
    recovery = recovering(log)

    def called_off() -> None:
        raise LogInterrupted("called off")

    log.declare = called_off  # type: ignore[method-assign]
    with pytest.raises(LogInterrupted):
        recovery.follow(Strategy.REPLICA)
    assert recovery.asked == []
    del log.declare
    if got_out:
        log.held["s1c0.F"].append(mark(Steps(*log.lacking["s1c0.F"])))
    log.lacking.clear()
    recovery.follow(Strategy.KEEP)
    assert recovery.asked == [2]
    assert log.declared != got_out


@pytest.mark.parametrize(
    ("marked", "asked"),
    [(Steps(0, 0), [0]), (Steps(1, 2), [2]), (Steps(2, 4), [4]), (Steps(3, 3), []), (None, [])],
)
def test_a_checkpoint_makes_up_for_what_a_predecessor_declared(
    recovering: Recovering, marked: Steps | None, asked: list[int]
) -> None:
    """It may have died before it asked."""
    log = logged_to(2)
    if marked is not None:
        log.held["s1c0.F"].append(mark(marked))
    recovery = recovering(log)
    recovery.follow(Strategy.REPLICA)
    assert recovery.asked == asked
    assert not log.declared
    recovery = recovering(log, checkpoint=3)
    recovery.follow(Strategy.REPLICA)
    assert recovery.asked == []


def test_a_server_of_its_own_that_does_not_answer_is_not_taken_to_have_nothing(
    recovering: Recovering,
) -> None:
    log = logged_to(2)
    log.down |= {"l0", "l1"}
    with pytest.raises(LogUnavailable):
        recovering(log).follow(Strategy.REPLICA, lived=True)
    assert not log.lacking


def test_one_replica_is_asked_and_then_none(recovering: Recovering) -> None:
    log = logged_to(2)
    log.held["s1c2.F"] = log.held["s1c1.F"]
    log.witnesses = (1, 2)
    copies = [pb.LogCopies(rank=rank, servers=[server]) for rank, server in enumerate(("l0", "l2", "l3"))]
    recovery = recovering(log)
    recovery.member.watcher.latest = pb.View(checkpoints=[0], log_copies=copies)
    recovery.follow(Strategy.REPLICA, servers=["l0"])
    assert set(log.asked) == {"l0", "l2"}
    assert not log.lacking


def test_a_recovery_that_is_superseded_asks_for_no_more_streams(recovering: Recovering) -> None:
    log = logged_to(1)
    recovery = recovering(log)

    def check() -> None:
        if log.asked:
            raise Interrupted("a newer generation")

    recovery.member.check = check
    with pytest.raises(Interrupted):
        recovery.follow(Strategy.REPLICA, lived=True)
    assert log.asked == ["l0"]


@pytest.mark.parametrize(("flushed", "copied"), [(True, False), (False, False), (True, True)])
def test_a_source_is_a_witness_if_it_has_flushed_and_declared(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch, flushed: bool, copied: bool
) -> None:
    log = logged_to(1)
    recovery = recovering(log)
    recovery.site.state.state_dict = dict  # type: ignore[method-assign, assignment]
    told: list[bool] = []

    def send(*_: Any, logged: bool, **__: Any) -> Any:
        told.append(logged)
        return SimpleNamespace(bytes=0, seconds=0.0, digest="")

    monkeypatch.setattr(strategies, "send_state", send)
    if copied:
        log.called_off.add("l0")
        with pytest.raises(LogInterrupted):
            recovery.follow(Strategy.REPLICA, servers=["l0"])
        log.called_off.clear()
    recovery.site.flushed = flushed
    recovery.carry_out(ranked(0, Strategy.KEEP), ranked(1, Strategy.REPLICA, (0,)), servers=["l0"])
    assert told == [flushed and not copied]


def test_a_checkpoint_after_the_copy_leaves_nothing_to_declare(recovering: Recovering) -> None:
    log = logged_to(1)
    recovery = recovering(log)
    log.damaged |= {"l0", "l1"}
    with pytest.raises(RecordCorrupt):
        recovery.follow(Strategy.REPLICA)
    log.damaged.clear()
    recovery.follow(Strategy.REPLAY)
    assert not log.lacking


def test_a_replica_whose_log_cannot_be_read_is_no_witness(recovering: Recovering) -> None:
    log = logged_to(2)
    log.witnesses = ()
    recovering(log).follow(Strategy.REPLICA)
    assert log.lacking["s1c0.F"] == (2, 2), "it has told that it could not log everything"
    log.witnesses = (1,)
    log.down.add("l2")
    recovering(log).follow(Strategy.REPLICA)
    assert log.lacking["s1c0.F"] == (2, 2)  # it may lack a record
    log.down.clear()
    log.damaged.add("l2")
    recovering(log).follow(Strategy.REPLICA)
    assert log.lacking["s1c0.F"] == (2, 2)


def test_streams_that_a_server_does_not_have_are_not_asked_for(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logged_to(1)
    recovering(log).follow(Strategy.REPLICA)
    assert {stream for _, stream in log.questions} == {"s1c0.F", "s1c1.F"}
    lacking, expected = dict(log.lacking), dict(log.expected)
    monkeypatch.setattr(Opened, "holdings", lambda log, server: None)  # it has not answered
    log = logged_to(1)
    recovering(log).follow(Strategy.REPLICA)
    assert {"s1c0.B", "r0.C", "r1.C"} < {stream for _, stream in log.questions}
    assert (log.lacking, log.expected) == (lacking, expected), "it is the same"


def test_what_is_trimmed_is_not_taken_to_have_been_empty(recovering: Recovering) -> None:
    log = logged_to(1)
    log.trimmed = 4
    with pytest.raises(RecordTrimmed):
        recovering(log).follow(Strategy.KEEP)

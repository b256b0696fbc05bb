"""What a rank makes of the log's servers between two generations."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import PublishedPlan
from swift_ft.errors import (
    Divergence,
    Fenced,
    LogUnavailable,
    RecordCorrupt,
    ReplayRefused,
    SequenceConflict,
    ServiceError,
    SwiftError,
    UsageError,
)
from swift_ft.planner import Plan, RankPlan, Strategy
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member, own_servers
from swift_ft.train.engine import Engine
from tests.unit.runtime import wired
from tests.unit.runtime.wired import state_of, step_of, updates_of

SERVERS = [("l0:1", ""), ("l1:1", ""), ("l2:1", "")]


def view_of(*copies: str, lost: tuple[int, ...] = (), again: str = "", generation: int = 2) -> pb.View:
    """Rank 1 has its copies there. ``again``: an address that has come once more."""
    places = [
        pb.LogServerPlace(address=address, lost="was given up" if number in lost else "")
        for number, (address, _) in enumerate(SERVERS)
    ]
    places += [pb.LogServerPlace(address=again)] if again else []
    kept = [
        pb.LogCopies(rank=0, servers=["l0:1"]),
        pb.LogCopies(rank=1, servers=copies),
    ]
    return pb.View(generation=generation, state=pb.PLANNING, log_places=places, log_copies=kept)


class Told:
    """The coordinator's client, and a writer."""

    def __init__(self, trouble: SwiftError | None = None) -> None:
        self.trouble = trouble
        self.deaf: SwiftError | None = None
        """It does not even take the generation."""
        self.lost: SwiftError | None = None
        self.moves: list[tuple[int, list[str], list[str]]] = []
        self.reports: list[int] = []
        self.unlogged = self

    def set_generation(self, generation: int, servers: list[str], emptied: list[str]) -> None:
        self.moves.append((generation, servers, emptied))
        if self.deaf is not None:
            raise self.deaf

    def flush(self, timeout_s: float) -> None:
        if self.trouble is not None:
            raise self.trouble

    def refusal(self) -> SwiftError | None:
        lost, self.lost = self.lost, None
        return lost

    def call(self, report: pb.ReportRequest) -> None:
        self.reports.append(report.generation)


def engine_of(told: Told) -> Engine:
    """Its log is open."""
    state = state_of(1, updates_of())
    channel: Any = SimpleNamespace()
    member: Any = SimpleNamespace(client=told, lease={}, say=lambda statement: statement() is None)
    engine = wired.engine_of(1, SessionConfig(), member=member, channel=channel, state=state)
    engine.log._writer = told  # type: ignore[assignment]
    return engine


def test_a_server_is_known_by_its_number() -> None:
    assert own_servers(view_of("l2:1", "l0:1"), 1) == {"l2:1": 2, "l0:1": 0}
    assert own_servers(view_of("l0:1", "l1:1", lost=(0,), again="l0:1"), 1) == {"l0:1": 3, "l1:1": 1}
    assert own_servers(view_of(), 1) == {}


def test_a_writer_hears_which_server_was_emptied_though_no_view_without_it_was_seen() -> None:
    told = Told()
    engine = engine_of(told)
    engine.log._place(view_of("l0:1", "l1:1"))
    engine.report(view_of("l0:1", "l1:1"))
    engine.report(view_of("l0:1", "l1:1", lost=(0,), again="l0:1", generation=4))
    engine.report(view_of("l0:1", "l1:1", lost=(0,), again="l0:1", generation=4))  # said again
    both = ["l0:1", "l1:1"]
    assert told.moves == [(2, both, []), (4, both, ["l0:1"]), (4, both, [])]


@pytest.mark.parametrize(
    "trouble",
    [
        RecordCorrupt("s1.F: records 0 to 4 were acknowledged and are gone"),
        SequenceConflict("stream s1.F is quarantined"),
        ServiceError("the log has not acknowledged everything within 60 s"),
        LogUnavailable("log server l0:1 has acknowledged nothing for 60 s"),
        Divergence("s1.F step 3"),
    ],
)
def test_a_survivor_reports_its_state_whatever_is_wrong_with_its_log(trouble: SwiftError) -> None:
    told = Told(trouble)
    engine = engine_of(told)
    engine.report(view_of("l0:1"))
    assert told.reports == [2]
    assert not engine._restorer._site.flushed, "its log is no witness"
    told.trouble = None
    engine.report(view_of("l0:1"))
    assert engine._restorer._site.flushed
    told.deaf = trouble
    engine.report(view_of("l0:1"))
    assert told.reports == [2, 2, 2]
    assert not engine._restorer._site.flushed


@pytest.mark.parametrize("away", [ServiceError("no answer from the coordinator"), Fenced("generation 7")])
def test_a_trainers_own_error_is_raised_whoever_cannot_be_told_of_it(away: SwiftError) -> None:
    def fail(request: pb.FailRequest, patience_s: float) -> None:
        assert (request.reason, patience_s < 10) == ("KeyError: 'a mistake'", True)
        raise away

    told = Told()
    told.call = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="a mistake"):
        engine_of(told).failures._fail(KeyError("a mistake"))


@pytest.mark.parametrize("when", ["before", "with", "after"])
def test_a_record_that_was_not_taken_is_refused_however_many_generations_come_between(when: str) -> None:
    told = Told()
    engine = engine_of(told)
    followed: list[Any] = []
    engine._restorer.follow = lambda published, *_: followed.append(published.plan.ranks[0].strategy)  # type: ignore[method-assign]
    if when != "after":
        told.lost = Divergence("s1.F step 3 is not the same")
        told.trouble = told.lost if when == "with" else None
        engine.report(view_of("l0:1"))
        told.trouble = None
        engine.report(view_of("l0:1", generation=3))
        assert not engine._restorer._site.flushed
    else:
        told.lost = ServiceError("s1.F step 3 cannot be logged")
    for strategy in (Strategy.KEEP, Strategy.REPLICA, Strategy.KEEP):
        with pytest.raises(ReplayRefused, match="what rank 1 has done is not in the log: s1"):
            engine._follow(plan_of(strategy), lambda: None)
    assert followed == []
    restored: list[int] = []
    engine._saving.restores = restored.append  # type: ignore[method-assign]
    for strategy in (Strategy.CHECKPOINT, Strategy.KEEP):  # it does these steps again
        engine._follow(plan_of(strategy), lambda: None)
    assert followed == [Strategy.CHECKPOINT, Strategy.KEEP]
    assert len(restored) == 1


def plan_of(strategy: Strategy) -> PublishedPlan:
    mine = RankPlan(rank=1, strategy=strategy, from_version=3, reason="")
    plan = Plan(target_version=3, ranks=(mine,), collective_source=-1, reason="")
    return PublishedPlan(generation=2, plan=plan, sources={})


def test_what_no_generation_makes_good_is_still_raised() -> None:
    told = Told(UsageError("start it with a larger --body-bytes-max"))
    engine = engine_of(told)
    with pytest.raises(UsageError):
        engine.report(view_of("l0:1"))


class Watched:
    """A watcher: what it shows next comes once somebody waits for a change."""

    def __init__(self, *views: pb.View) -> None:
        self.latest, *self.coming = views

    def wait_for(self, predicate: Any, timeout_s: float | None) -> pb.View:
        if not predicate(self.latest):
            self.latest = self.coming.pop(0)
        return self.latest


def test_ready_is_said_once_for_each_change_though_the_view_that_was_entered_is_old() -> None:
    """The log may be granted, or another server come, while this rank loads its state: the View has moved on then."""
    engine = engine_of(Told())
    entered, granted, running = (
        pb.View(generation=2, revision=revision, state=state)
        for revision, state in [
            (1, pb.FORMING),
            (2, pb.FORMING),
            (3, pb.RUNNING),
        ]
    )
    member: Any = Member("127.0.0.1:1", "j", 1, "i")
    member.watcher = Watched(granted, running)
    engine._site.member = member
    engine._site.faults = SimpleNamespace(while_others_replay=lambda version: None)  # type: ignore[assignment]
    said: list[int] = []

    def say() -> None:
        assert len(said) < 10, "it is said again and again"
        said.append(1)

    engine._await_running(entered, say)
    member.client.close()
    assert len(said) == 1


def test_who_calls_the_end_in_a_step_that_it_replays_has_called_it() -> None:
    """Its predecessor had called it, and was lost with the word. The replay comes before the loop over the steps."""
    engine = engine_of(Told())
    engine._site.member.watcher = SimpleNamespace(latest=None)  # type: ignore[assignment]
    engine._site.member.await_change = lambda _view: None  # type: ignore[method-assign]
    ended: list[int] = []

    def replay(_train_step: Any) -> None:
        engine.ending.begin_step(step_of(20))
        engine.ending.call("enough")
        engine._site.state.version = 21
        engine.ending.after_step(step_of(20))

    def go_on(_train_step: Any) -> None:
        raise AssertionError("no step comes behind it")

    engine._rejoin = replay  # type: ignore[method-assign]
    engine._site.faults = SimpleNamespace(at=lambda *_: None)  # type: ignore[assignment]
    engine._site.member.check = lambda: None  # type: ignore[method-assign]
    engine._steps.run = go_on  # type: ignore[method-assign]
    engine.ending.finish = lambda *_: ended.append(engine._site.state.version)  # type: ignore[method-assign]
    engine._lines = SimpleNamespace(cut=lambda _version: None)  # type: ignore[assignment]
    engine.membership._view = pb.View(state=pb.RUNNING)
    engine.run(lambda _step: None, 30)
    assert ended == [21]

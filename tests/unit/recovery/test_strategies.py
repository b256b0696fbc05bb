"""The table of strategies: what each reaches, and what follows from a plan that has it."""

from typing import Any

import pytest

from swift_ft.planner import SETTINGS, Help, Plan, RankPlan, Report, Strategy
from swift_ft.planner.strategies import TABLE, Begins, refused_with
from swift_ft.train.strategies import TABLE as RESTORES

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, SNAPSHOT, LOSSY_FORWARD = Strategy
TARGET = 7


def plan_of(*ranks: tuple[Strategy, int], source: int = -1, **changes: Any) -> Plan:
    rank_plans = tuple(
        RankPlan(rank=rank, strategy=strategy, from_version=version, reason="")
        for rank, (strategy, version) in enumerate(ranks)
    )
    return Plan(target_version=TARGET, ranks=rank_plans, collective_source=source, reason="", **changes)


def test_both_sides_have_every_strategy() -> None:
    assert set(TABLE) == set(RESTORES) == set(Strategy)
    assert all(policy.strategy is strategy for strategy, policy in TABLE.items())


def test_from_the_cheapest_to_the_costliest() -> None:
    assert list(TABLE) == [
        KEEP,
        ROLL_FORWARD,
        LOSSY_FORWARD,
        UNDO,
        REPLICA,
        CATCH_UP,
        REPLAY,
        SNAPSHOT,
        CHECKPOINT,
    ]
    assert plan_of((KEEP, TARGET), (UNDO, TARGET), (REPLICA, TARGET)).costliest is REPLICA


def test_what_a_rank_reaches_by_itself() -> None:
    report = Report(rank=0, version=4, undo_to=3, undo_exact=False, forward_to=5, finish_to=6)
    reached = {strategy: policy.reach(report) for strategy, policy in TABLE.items()}
    found = {strategy: (way.version, way.exact) for strategy, way in reached.items() if way is not None}
    assert found == {KEEP: (4, True), ROLL_FORWARD: (5, True), LOSSY_FORWARD: (6, True), UNDO: (3, False)}
    assert not any(policy.reach(Report(rank=0, version=None)) for policy in TABLE.values())


@pytest.mark.parametrize(
    ("setting", "excluded"),
    [
        ("auto", {LOSSY_FORWARD}),
        ("replica", {CATCH_UP, REPLAY, SNAPSHOT, LOSSY_FORWARD}),
        ("replay", {REPLICA, SNAPSHOT, LOSSY_FORWARD}),
        ("snapshot", {REPLICA, CATCH_UP, REPLAY, LOSSY_FORWARD}),
        ("checkpoint", set(Strategy) - {CHECKPOINT}),
        ("reinit", set(Strategy) - {CHECKPOINT}),
        ("shrink", {CATCH_UP, REPLAY, SNAPSHOT, LOSSY_FORWARD}),
        ("rollback", {CATCH_UP, REPLAY, ROLL_FORWARD, SNAPSHOT, LOSSY_FORWARD}),
        ("lossy-forward", {CATCH_UP, REPLAY, SNAPSHOT}),
    ],
)
def test_what_is_permitted(setting: str, excluded: set[Strategy]) -> None:
    assert SETTINGS[setting].permits == set(Strategy) - excluded


def test_one_replay_that_is_refused_is_all_of_them() -> None:
    assert refused_with(CATCH_UP) == refused_with(REPLAY) == {CATCH_UP, REPLAY}
    assert refused_with(REPLICA) == {REPLICA}


class TestWhatFollowsFromAPlan:
    def test_who_replays_and_whose_collectives_are_read(self) -> None:
        plan = plan_of(
            (CATCH_UP, 5), (KEEP, TARGET), (ROLL_FORWARD, 6), (UNDO, TARGET), (REPLICA, TARGET), source=3
        )
        assert plan.replayed_from == {0: 5, 2: 6}
        assert plan.reads_log
        assert plan.log_readers == {0, 2}
        assert plan.collective_sources == (3, 1)
        assert plan_of((KEEP, TARGET)).collective_sources == ()

    @pytest.mark.parametrize(
        ("strategy", "version", "was_logged"),
        [
            (KEEP, TARGET, False),
            (CATCH_UP, 5, False),
            (UNDO, 6, False),
            (ROLL_FORWARD, 6, False),
            (REPLICA, TARGET, False),
            (REPLICA, 6, True),
            (REPLAY, 5, True),
            (REPLAY, TARGET, True),
            (CHECKPOINT, TARGET, False),
            (SNAPSHOT, TARGET, False),
        ],
    )
    def test_whose_next_step_may_be_logged_already(
        self, strategy: Strategy, version: int, was_logged: bool
    ) -> None:
        assert plan_of((strategy, version)).was_logged(0) is was_logged

    def test_what_becomes_of_the_log(self) -> None:
        assert plan_of((CHECKPOINT, TARGET)).gives_up_log
        assert plan_of((SNAPSHOT, TARGET), (SNAPSHOT, TARGET)).gives_up_log
        assert not plan_of((REPLAY, 5), exact=False).gives_up_log
        assert plan_of((UNDO, TARGET), exact=False).gives_up_log
        assert not plan_of((KEEP, TARGET)).gives_up_log

    def test_copies_come_in_one_order_for_all(self) -> None:
        plan = plan_of((REPLICA, TARGET), (KEEP, TARGET), (REPLICA, TARGET))
        backwards = Plan(target_version=TARGET, ranks=plan.ranks[::-1], collective_source=-1, reason="")
        assert [copy.rank for copy in plan.copies] == [copy.rank for copy in backwards.copies] == [0, 2]
        assert all(copy.policy.begins is Begins.COPY for copy in plan.copies)

    def test_who_helps_whom(self) -> None:
        shared = Help(owner=0, helpers=(2,), until=TARGET)
        plan = plan_of((REPLAY, 5), (KEEP, TARGET), (KEEP, TARGET), help=(shared,))
        assert [plan.help_of(rank) for rank in range(3)] == [shared, None, shared]
        assert plan.log_readers == {0, 2}
        assert plan.predicted_s(0) is None

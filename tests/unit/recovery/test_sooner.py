"""Under "auto" all go back to snapshots where the steps since take less time than a replay; figures of test_cost."""

from collections.abc import Collection

from swift_ft.planner import HeldSnapshot, Plan, PlanConfig, Refusals, Report, Strategy, plan
from tests.unit.recovery.test_cost import full_log, measured, one_stage_each

RANKS, LOST, NEWEST = 4, 2, 15
"""A replay of the ten steps since the checkpoint takes 10 * (8 * 0.3 + 0.1) = 25 s, and a step of all ranks 5 s."""


def decided(
    *taken: int,
    known: bool = True,
    strategy: str = "auto",
    keeps: Collection[int] = range(RANKS),
    refused: Refusals = Refusals(),  # noqa: B008  (frozen)
    logged: bool = True,
) -> Plan:
    """`taken`: versions of snapshots. `keeps`: the ranks of which somebody has copies."""
    reports = [
        Report(
            rank=rank,
            version=None if rank == LOST else NEWEST,
            snapshots=()
            if rank == LOST
            else tuple(
                HeldSnapshot(of, at) for at in taken for of in (rank, (rank - 1) % RANKS) if of in keeps
            ),
        )
        for rank in range(RANKS)
    ]
    log = full_log(range(RANKS), 0, NEWEST - 1) if logged else {}
    config = PlanConfig(strategy=strategy, helpers=0)
    said = measured(RANKS) if known else {}
    checkpoints = (5,)
    outcome, reason = plan(reports, one_stage_each(RANKS), log, checkpoints, config, refused, said)
    assert outcome is not None, reason
    return outcome


def went_back(outcome: Plan) -> int | None:
    """To which snapshot all went back; None: they did not."""
    strategies = {rank.strategy for rank in outcome.ranks}
    return outcome.target_version if strategies == {Strategy.SNAPSHOT} else None


def test_the_shorter_way_is_taken_and_its_reason_has_both_times() -> None:
    outcome = decided(8, 12)
    assert went_back(outcome) == 12
    assert "3 steps again take 15 s, and a replay 25 s" in outcome.reason


def test_where_a_replay_is_shorter_it_is_replayed() -> None:
    outcome = decided(10)  # 5 steps take 25 s as well, and then nothing is given up for it
    assert went_back(outcome) is None
    assert outcome.target_version == NEWEST


def test_what_is_not_known_is_no_reason() -> None:
    assert went_back(decided(12, known=False)) is None
    assert went_back(decided(12, keeps=[0, 1, 3])) is None, "nobody has a copy of rank 2"
    assert went_back(decided()) is None


def test_under_another_strategy_there_are_none() -> None:
    assert went_back(decided(12, strategy="replay")) is None


def test_where_nothing_can_be_replayed_they_stand_before_the_checkpoint() -> None:
    assert went_back(decided(8, known=False, logged=False)) == 8
    outcome = decided(logged=False)
    assert {rank.strategy for rank in outcome.ranks} == {Strategy.CHECKPOINT}
    assert "snapshot" not in outcome.reason, "there never were any"


def test_what_was_refused_is_not_gone_back_to() -> None:
    refused = Refusals().and_of([Strategy.SNAPSHOT], "it was damaged")
    assert went_back(decided(12, refused=refused)) is None

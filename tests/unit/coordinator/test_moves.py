"""Which moves a coordinator asks for, and how long (`services.coordinator.moves`)."""

from dataclasses import replace
from typing import Any

import pytest

from services.coordinator.moves import Moves, keep
from services.coordinator.row import End, Holder, JobRow, State
from services.coordinator.timing import Timing
from swift.recovery import RankMeasured
from swift.recovery.measured import StageMeasured

TIMING = Timing()
CONFIG = {"strategy": "adaptive", "lost_shard": "reroute", "replicas": "3", "move_losses": "True"}


def holder(rank: int) -> Holder:
    return Holder(rank=rank, incarnation=f"a{rank}", pid=rank, host="h", since_generation=1, member=rank)


def job(**changes: Any) -> JobRow:
    """Two stages; ranks 3 and 4, of the second one, were lost at version 5."""
    given: dict[str, Any] = {
        "job": "j",
        "world_size": 6,
        "config": CONFIG,
        "fingerprint": {},
        "log_servers": [],
        "state": State.RUNNING,
        "holders": {rank: holder(rank) for rank in (0, 1, 2, 5)},
        "vacant": {3: 5, 4: 5},
        "run_of": dict.fromkeys(range(6), "r"),
    }
    return JobRow(**{**given, **changes})


def measured(*ranks: int) -> dict[int, RankMeasured]:
    return {
        rank: RankMeasured(
            step=9,
            steps=5,
            microbatches=12 if rank == 5 else 4,
            step_s=1.0,
            update_s=0.0,
            stages=(StageMeasured(stage=rank // 3, forward_s=0.1, backward_s=0.1),),
        )
        for rank in ranks
    }


def test_it_pays_once_it_has() -> None:
    row = job()
    moves = Moves(row, TIMING)
    assert not moves.look(measured(0, 1, 2, 5), 6, 0.0)
    assert moves.look(measured(0, 1, 2, 5), 900, 0.0)
    assert row.move == [0, 3]
    assert not moves.look(measured(0, 1, 2, 5), 901, 1.0), "it is under way"


@pytest.mark.parametrize("known", [(5,), (0,), (0, 1, 2), (3, 4), (0, 3), ()])
def test_a_stage_that_nobody_has_measured_is_waited_for(known: tuple[int, ...]) -> None:
    """After the coordinator has begun anew, say. What a rank that is gone has said does not count."""
    row = job()
    assert not Moves(row, TIMING).look(measured(*known), 900, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.FENCING},
        {"state": State.FINISHED},
        {"vacant": {}},
        {"vacant": {3: None, 4: 5}},  # of one it is not known yet since when: the other one is alone
        {"finished": {0: 1000}},
        {"end": End(version=1000, num_steps=2000, rank=0, reason="enough")},
        {"config": {**CONFIG, "move_losses": "False"}},
        {"config": {**CONFIG, "strategy": "shrink", "lost_shard": "redistribute"}},
        {"run_of": {rank: "r" if rank in (3, 4) else "other" for rank in range(6)}},  # of another machine
        {"run_of": dict.fromkeys((0, 1, 2, 5), "r")},  # nobody knows which launcher had them
    ],
)
def test_what_stands_against_it(changes: dict[str, Any]) -> None:
    row = job(**changes)
    assert not Moves(row, TIMING).look(measured(0, 1, 2, 5), 900, 0.0)
    assert row.move == []


@pytest.mark.parametrize(
    ("fetches", "rank", "gives"), [(False, 1, True), (True, 1, False), (True, 0, True), (True, 2, True)]
)
def test_the_last_one_of_a_pipeline_whose_batches_only_it_has_gives_nothing(
    fetches: bool, rank: int, gives: bool
) -> None:
    """To rank 3, of pipeline 0. Pipeline 1 has lost rank 4, so it has rank 1 alone; pipeline 0 will have rank 3."""
    config = {**CONFIG, "fetch_batches": str(fetches)}
    beside = {other: "r" if other in (rank, 3) else f"other {other}" for other in range(6)}
    row = job(config=config, run_of=beside)
    assert Moves(row, TIMING).look(measured(0, 1, 2, 5), 900, 0.0) is gives
    assert row.move == ([rank, 3] if gives else [])
    row = job(config=config, move=[rank, 3], holders={other: holder(other) for other in (0, 1, 2, 3, 5)})
    keep(row)
    assert bool(row.move) is gives


def test_a_rank_that_has_finished_and_gone_gives_nothing() -> None:
    holders = {rank: holder(rank) for rank in (0, 1, 2, 5)}
    holders[0] = replace(holders[0], gone=True)
    row = job(holders=holders)
    assert Moves(row, TIMING).look(measured(0, 1, 2, 5), 900, 0.0)
    assert row.move == [1, 3]


def test_who_does_not_come_is_waited_for_and_then_given_up() -> None:
    row = job()
    moves = Moves(row, TIMING)
    moves.look(measured(0, 1, 2, 5), 900, 0.0)
    late = TIMING.replaced_within_s + 1
    assert not moves.look({}, 900, late - 1)
    assert moves.look({}, 900, late)
    assert row.move == []
    assert moves.look(measured(0, 1, 2, 5), 900, late)
    assert row.move == [0, 4], "the other place may have more luck"
    row.generation, row.move = 9, []
    assert moves.look(measured(0, 1, 2, 5), 900, late)
    assert row.move == [0, 3], "and in another generation so may this one"


def test_a_lost_rank_that_comes_back_in_another_way_ends_its_move() -> None:
    row = job()
    moves, late = Moves(row, TIMING), TIMING.replaced_within_s
    moves.look(measured(0, 1, 2, 5), 900, 0.0)
    assert row.move == [0, 3]
    row.vacant, row.holders[3] = {4: 5}, holder(3)
    assert not moves.look({}, 900, late - 1)
    assert not moves.look({}, 900, 2 * late - 2), (
        "the other one is ended once the job runs: it is waited for that"
    )
    assert moves.look({}, 900, 2 * late)
    assert row.move == []


def test_a_coordinator_that_begins_anew_waits_anew() -> None:
    row = job(move=[0, 3])
    moves = Moves(row, TIMING)
    assert not moves.look({}, 900, 1e6)
    assert not moves.look({}, 900, 1e6 + TIMING.replaced_within_s)
    assert moves.look({}, 900, 1e6 + TIMING.replaced_within_s + 1)


@pytest.mark.parametrize(
    ("there", "goes_on"),
    [
        ((0, 1, 2, 3, 5), True),
        ((0, 2, 3, 5), True),
        ((0, 3, 5), False),  # all that its stage has left
        ((1, 2, 3, 5), False),  # it is lost itself
        ((0, 1, 2, 5), False),  # the other has not joined
    ],
)
def test_what_happens_meanwhile_comes_first(there: tuple[int, ...], goes_on: bool) -> None:
    row = job(move=[0, 3], holders={rank: holder(rank) for rank in there})
    keep(row)
    assert row.move == ([0, 3] if goes_on else [])

"""What a drill tells ranks of the faults that it is given, and the shape of its job. `test_command.py` has what it
refuses."""

import json
from typing import Any

import pytest

from swift_ft import fault_grammar
from swift_ft.fault_grammar import CorruptFault
from swift_ft.lab.drill import faults
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.faults import to_environment
from swift_ft.lab.drill.topology import SCHEDULES, Topology
from swift_ft.planner.groups import RecoveryGroups

ALONE = RecoveryGroups()


def topology(**changes: object) -> Topology:
    values: dict[str, object] = {
        "pipeline_ranks": 4,
        "steps": 30,
        "microbatches": 8,
        "schedule": "1f1b",
        "checkpoint_every": 10,
    }
    return Topology(**{**values, **changes})  # type: ignore[arg-type]


def planned(*specs: str, shape: Topology | None = None, **options: Any) -> DrillConfig:
    faults = tuple(map(fault_grammar.parse, specs))
    return DrillConfig(topology=shape or topology(), faults=faults, **options)


def told(asked: DrillConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(to_environment(asked))
    return found


def test_environment_holds_only_the_rank_under_corruption() -> None:
    asked = planned(
        "service=logserver,step=3", "rank=2,step=17", "corrupt=log,step=17", "rank=1,phase=replay"
    )
    assert told(asked) == [
        {"id": "fault1", "rank": 2, "step": 17, "microbatch": 0, "phase": "backward", "hold": True},
        {"id": "fault3", "rank": 1, "step": None, "microbatch": 0, "phase": "replay"},
    ]
    assert faults.corrupted_stream(CorruptFault(step=17), asked) == "s1.F"


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        (
            "rank=0,step=8 service=logserver,step=8 rank=1,step=9 rank=3,step=8,phase=reduce "
            "rank=2,phase=copy rank=1,step=8,phase=replay rank=2,step=12 corrupt=log,step=12",
            [[0, 3], [6]],
        ),
        ("rank=2,step=17 log=0,step=17 rank=1,step=20", [[0]]),
        ("rank=1,step=17 corrupt=checkpoint,rank=3,step=17", [[0]]),
    ],
)
def test_victims_of_one_step_wait_for_each_other_and_for_what_is_done_before(
    specs: str, groups: list[list[int]]
) -> None:
    assert fault_grammar.held_together(list(map(fault_grammar.parse, specs.split()))) == groups


def test_who_dies_with_half_an_update_applied_waits_for_its_replicas() -> None:
    specs = ("rank=3,step=8,phase=update", "rank=0,step=9,phase=reduce", "rank=1,step=10,phase=reduce")
    options: dict[str, Any] = {"shape": topology(pipeline_ranks=1, replicas=4), "updates": "wait_free"}
    assert [fault.get("beside") for fault in told(planned(*specs, **options))] == [[0, 1, 2], None, None]
    lossy = planned(*specs, **options, strategy="lossy-forward", allow_inexact=True)
    # Each is without those that are lost before.
    assert [fault.get("beside") for fault in told(lossy)] == [[0, 1, 2], [1, 2], [2]]


@pytest.mark.parametrize(
    ("specs", "all_come"),
    [
        (["rank=0,step=8,microbatch=1", "rank=3,step=8,phase=forward"], True),  # of two data-parallel ranks
        (["rank=0,step=8,phase=idle", "rank=2,step=8,phase=idle"], True),
        (["rank=0,step=8", "rank=2,step=8"], False),  # rank 0 waits for the gradient that rank 2 would send
        (["rank=0,step=8,phase=idle", "rank=2,step=8"], False),
        (["rank=0,step=8", "rank=1,step=8,phase=reduce"], False),  # with whom would it reduce?
    ],
)
def test_victims_that_need_nothing_of_each_other_are_all_waited_for(specs: list[str], all_come: bool) -> None:
    shape = topology(pipeline_ranks=2, replicas=2)
    assert faults.all_get_there([fault_grammar.parse(spec) for spec in specs], shape) is all_come


def test_a_v_has_no_boundary_inside_its_last_rank() -> None:
    shape = topology(schedule="zbv")
    assert shape.stages_of(3) == (3, 4)
    assert shape.replay_streams(3, ALONE) == ("s2.F", "s5.B")
    assert shape.replay_streams(0, ALONE) == ("s1.B", "s6.F")


@pytest.mark.parametrize("pipeline_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_dp_rank_has_every_stage_once(schedule: str, pipeline_ranks: int) -> None:
    shape = topology(schedule=schedule, pipeline_ranks=pipeline_ranks, replicas=3)
    every = range(3 * pipeline_ranks)
    assert shape.ranks == len(every)
    assert [(shape.pipeline_rank(rank), shape.place(rank)) for rank in every] == [
        divmod(rank, 3) for rank in every
    ]
    for dp_rank in range(3):
        ranks = [rank for rank in every if shape.place(rank) == dp_rank]
        assert sorted(stage for rank in ranks for stage in shape.stages_of(rank)) == list(range(shape.stages))
    assert shape.replicas_of(4) == (3, 4, 5)
    assert len({shape.stages_of(rank) for rank in shape.replicas_of(4)}) == 1


def test_a_replay_reads_the_streams_of_its_own_dp_rank() -> None:
    shape = topology(pipeline_ranks=3, replicas=2)
    assert shape.replay_streams(3, ALONE) == ("s0c1.F", "s2c1.B")
    assert topology(pipeline_ranks=1, replicas=2).replay_streams(1, ALONE) == ()

"""What a drill refuses of the faults that it is given, and what it tells ranks of them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from swift_ft import fault_grammar
from swift_ft.errors import UsageError
from swift_ft.fault_grammar import CorruptFault
from swift_ft.lab.drill import faults
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.faults import to_environment
from swift_ft.lab.drill.topology import SCHEDULES, Topology


def topology(**changes: object) -> Topology:
    values: dict[str, object] = {
        "pipeline_ranks": 4,
        "steps": 30,
        "microbatches": 8,
        "schedule": "1f1b",
        "checkpoint_every": 10,
    }
    return Topology(**{**values, **changes})  # type: ignore[arg-type]


def check(planned: Sequence[fault_grammar.Fault], shape: Topology, **options: Any) -> None:
    DrillConfig(topology=shape, faults=tuple(planned), **options)


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        (["rank=4,step=3"], "rank must be 0 to 3"),
        (["rank=2,step=30"], "step must be 0 to 29"),
        (["rank=2,step=3,microbatch=8"], "microbatch must be 0 to 7"),
        (["rank=2,step=3,phase=reduce"], "phases here: forward, backward, optimizer, idle, save, replay"),
        (["rank=2,step=17,phase=save"], "no checkpoint is written behind that step"),
        (["rank=2,phase=replay"], "nothing replays"),
        (["service=logserver,step=30"], "step must be 0 to 29"),
        (["log=2,step=3"], "log must be 0 to 1"),
        (["log=1,step=30"], "step must be 0 to 29"),
        (["log=1,phase=replay"], "nothing replays"),
        (["log=1,step=3", "log=0,step=9"], "no log server would be left"),
        (["service=coordinator,state=recovering"], "kill a rank as well"),
        (["corrupt=log,step=17"], "no rank is killed at that step"),
        (["rank=2,step=20", "corrupt=log,step=20"], "no multiple of 10"),
        (["rank=2,step=17", "corrupt=log,step=17,stream=s2.F"], "only the streams s1.F, s3.B"),
    ],
)
def test_refuses_what_the_topology_cannot_have(specs: list[str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        check([fault_grammar.parse(spec) for spec in specs], topology(), log_servers=2)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "specs",
    [
        ["rank=0,step=0", "rank=3,step=29,phase=idle"],
        ["rank=0,step=9,phase=save", "rank=3,step=29,phase=save"],
        ["rank=2,step=17", "rank=2,phase=replay"],
        ["rank=2,step=17", "service=coordinator,state=recovering"],
        ["service=coordinator,state=running"],
        ["log=1,step=29"],
        ["rank=2,step=17", "log=1,phase=replay"],
        ["rank=2,step=17", "corrupt=log,step=17,stream=s3.B"],
    ],
)
def test_accepts(specs: list[str]) -> None:
    check([fault_grammar.parse(spec) for spec in specs], topology(), log_servers=2)


HYBRID = {"pipeline_ranks": 2, "replicas": 2}


@pytest.mark.parametrize(
    ("specs", "options", "word"),
    [
        (["rank=4,step=3"], {}, "rank must be 0 to 3"),
        (
            ["rank=3,step=3,phase=update"],
            {},
            "phases here: forward, backward, reduce, optimizer, idle, save, replay, copy",
        ),
        (["rank=1,phase=copy"], {}, "nothing copies"),
        (["rank=1,phase=copy", "rank=2,phase=copy"], {}, "nothing copies"),
        (["rank=1,step=3", "rank=1,phase=copy"], {"strategy": "replay"}, "--strategy replay copies nothing"),
        (
            ["rank=1,step=3", "rank=1,phase=replay"],
            {"strategy": "replica"},
            "--strategy replica replays nothing",
        ),
        (["rank=1,step=3", "rank=1,phase=copy"], {"strategy": "checkpoint"}, "--strategy checkpoint copies"),
        (["rank=1,step=7", "corrupt=log,step=7"], {}, "add --strategy replay"),
        (["rank=1,step=7", "corrupt=copy,rank=2"], {}, "rank 2 is given no state"),
        (["rank=1,step=7", "corrupt=copy,rank=1"], {"strategy": "replay"}, "nothing is copied with"),
        (
            ["rank=1,step=7", "corrupt=log,step=7,stream=s1.B"],
            {"strategy": "replay"},
            "only the streams s1c1.B",
        ),
    ],
)
def test_refuses_what_replicas_cannot_have(specs: list[str], options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        check([fault_grammar.parse(spec) for spec in specs], topology(**HYBRID), **options)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        (["rank=3,step=3,phase=reduce", "rank=1,step=3", "rank=2,phase=copy"], {}),
        (["rank=0,step=3,phase=update"], {"updates": "wait_free"}),
        (["rank=3,step=7", "corrupt=log,step=7"], {"strategy": "replay"}),
        (["rank=3,step=7", "rank=0,phase=replay"], {}),
        (["rank=3,step=7", "rank=0,phase=copy"], {"strategy": "replica"}),
    ],
)
def test_accepts_with_replicas(specs: list[str], options: dict[str, str]) -> None:
    check([fault_grammar.parse(spec) for spec in specs], topology(**HYBRID), **options)


def test_a_pipeline_of_one_rank_has_no_stream_to_corrupt() -> None:
    planned = [fault_grammar.parse("rank=1,step=7"), fault_grammar.parse("corrupt=log,step=7")]
    with pytest.raises(UsageError, match="reads no stream"):
        check(planned, topology(pipeline_ranks=1, replicas=2), strategy="replay")


@pytest.mark.parametrize("extra", ["rank=2,phase=replay", "corrupt=log,step=17"])
def test_the_checkpoint_strategy_replays_nothing(extra: str) -> None:
    planned = [fault_grammar.parse("rank=1,step=17"), fault_grammar.parse(extra)]
    check(planned, topology())
    with pytest.raises(UsageError, match="--strategy checkpoint"):
        check(planned, topology(), strategy="checkpoint")


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        (["rank=1,step=17", "corrupt=checkpoint,rank=4,step=17"], "rank must be 0 to 3"),
        (["rank=1,step=17", "corrupt=checkpoint,rank=1,step=30"], "step must be 0 to 29"),
        (["rank=1,step=17", "corrupt=checkpoint,rank=1,step=16"], "no rank is killed at that step"),
        (["rank=1,step=20", "corrupt=checkpoint,rank=1,step=20"], "no multiple of it"),
        (["rank=1,step=7", "corrupt=checkpoint,rank=1,step=7"], "one before it"),
    ],
)
def test_a_checkpoint_is_damaged_where_all_load_it_and_have_one_before(specs: list[str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check([fault_grammar.parse(spec) for spec in specs], topology(), strategy="checkpoint")
    good = [fault_grammar.parse(spec) for spec in ("rank=1,step=17", "corrupt=checkpoint,rank=3,step=17")]
    check(good, topology(), strategy="checkpoint")
    assert fault_grammar.held_together(good) == [[0]], "its victim waits until that is done"
    with pytest.raises(UsageError, match="only with --strategy checkpoint"):
        check(good, topology())


def test_environment_holds_only_the_rank_under_corruption() -> None:
    planned = [
        fault_grammar.parse(spec)
        for spec in (
            "service=logserver,step=3",
            "rank=2,step=17",
            "corrupt=log,step=17",
            "rank=1,phase=replay",
        )
    ]
    assert json.loads(to_environment(planned)) == [
        {"id": "fault1", "rank": 2, "step": 17, "microbatch": 0, "phase": "backward", "hold": True},
        {"id": "fault3", "rank": 1, "step": None, "microbatch": 0, "phase": "replay"},
    ]
    assert faults.corrupted_stream(CorruptFault(step=17), planned, topology()) == "s1.F"


def test_victims_of_one_step_wait_for_each_other() -> None:
    specs = ["rank=0,step=8", "service=logserver,step=8", "rank=1,step=9", "rank=3,step=8,phase=reduce"]
    specs += ["rank=2,phase=copy", "rank=1,step=8,phase=replay", "rank=2,step=12", "corrupt=log,step=12"]
    planned = [fault_grammar.parse(spec) for spec in specs]
    assert fault_grammar.held_together(planned) == [[0, 3], [6]]
    held = [fault["id"] for fault in json.loads(to_environment(planned)) if fault.get("hold")]
    assert held == ["fault0", "fault3", "fault6"]


def test_who_dies_with_half_an_update_applied_waits_for_its_replicas() -> None:
    planned = [
        fault_grammar.parse(spec) for spec in ("rank=3,step=8,phase=update", "rank=0,step=9,phase=reduce")
    ]
    shape = topology(pipeline_ranks=2, replicas=3)
    found = json.loads(to_environment(planned, topology=shape))
    assert [fault.get("beside") for fault in found] == [[4, 5], None]
    found = json.loads(to_environment(planned, topology=shape, strategy="lossy-forward"))
    assert [fault.get("beside") for fault in found] == [[4, 5], [1, 2]]
    planned.append(fault_grammar.parse("rank=1,step=10,phase=reduce"))
    found = json.loads(to_environment(planned, topology=shape, strategy="lossy-forward"))
    assert found[2]["beside"] == [2], "rank 0 is lost before"


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


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pipeline_ranks": 1}, "--stages must be at least 2"),
        ({"replicas": 65}, "make 260 ranks"),
        ({"pipeline_ranks": 300, "microbatches": 300}, "make 300 ranks"),
        ({"pipeline_ranks": 0, "replicas": 2}, "--stages must be at least 1"),
        ({"replicas": 0}, "--replicas must be at least 1"),
        ({"pipeline_ranks": 1, "replicas": 2, "schedule": "zbv"}, "use 1f1b or gpipe"),
        ({"steps": 0}, "--steps"),
        ({"checkpoint_every": 0}, "--checkpoint-every"),
        ({"schedule": "1f2b"}, "1f1b, gpipe, interleaved1f1b, interleavedzerobubble, zbv, dualpipev"),
        ({"microbatches": 3}, "must be 4 or more"),
        ({"schedule": "dualpipev", "microbatches": 7}, "must be 8 or more"),
        ({"schedule": "interleaved1f1b", "microbatches": 9}, "multiple of 2"),
    ],
)
def test_topology_refuses(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        topology(**changes)
    assert word in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_is_on_one_rank(schedule: str) -> None:
    shape = topology(schedule=schedule)
    stages = [stage for rank in range(4) for stage in shape.stages_of(rank)]
    assert sorted(stages) == list(range(shape.stages))


def test_a_v_has_no_boundary_inside_its_last_rank() -> None:
    shape = topology(schedule="zbv")
    assert shape.stages_of(3) == (3, 4)
    assert shape.replay_streams(3) == ("s2.F", "s5.B")
    assert shape.replay_streams(0) == ("s1.B", "s6.F")


def test_a_microbatch_in_a_phase_that_comes_once_a_step_has_no_meaning() -> None:
    assert fault_grammar.parse("rank=2,step=3,microbatch=1,phase=idle") == fault_grammar.parse(
        "rank=2,step=3,phase=idle"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_dp_rank_has_every_stage_once(schedule: str) -> None:
    shape = topology(schedule=schedule, pipeline_ranks=2, replicas=3)
    assert shape.ranks == 6
    assert [(shape.pipeline_rank(r), shape.place(r)) for r in range(6)] == [
        (pipeline_rank, dp_rank) for pipeline_rank in range(2) for dp_rank in range(3)
    ]
    for dp_rank in range(3):
        ranks = [rank for rank in range(6) if shape.place(rank) == dp_rank]
        assert sorted(stage for rank in ranks for stage in shape.stages_of(rank)) == list(range(shape.stages))
    assert shape.replicas_of(4) == (3, 4, 5)
    assert len({shape.stages_of(rank) for rank in shape.replicas_of(4)}) == 1


def test_a_replay_reads_the_streams_of_its_own_dp_rank() -> None:
    shape = topology(pipeline_ranks=3, replicas=2)
    assert shape.replay_streams(3) == ("s0c1.F", "s2c1.B")
    assert topology(pipeline_ranks=1, replicas=2).replay_streams(1) == ()


def test_a_victim_waits_until_the_log_server_of_its_step_is_gone() -> None:
    specs = [fault_grammar.parse(spec) for spec in ("rank=2,step=17", "log=0,step=17", "rank=1,step=20")]
    assert fault_grammar.held_together(specs) == [[0]]

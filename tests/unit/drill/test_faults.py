"""The kill grammar: what is read, what is refused and with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.drill import faults
from swift.drill.faults import CoordinatorFault, CorruptFault, Fault, LogServerFault, RankFault
from swift.drill.topology import SCHEDULES, Topology
from swift.errors import UsageError


def topology(**changes: object) -> Topology:
    values: dict[str, object] = {
        "ranks": 4,
        "steps": 30,
        "microbatches": 8,
        "schedule": "1f1b",
        "checkpoint_every": 10,
    }
    return Topology(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (
            "rank=2,step=17,microbatch=3,phase=backward",
            RankFault(rank=2, step=17, microbatch=3, phase="backward"),
        ),
        (" Rank=2, step=17 ,phase=BACKWARD", RankFault(rank=2, step=17)),
        ("rank=2,step=17", RankFault(rank=2, step=17)),
        ("rank=0,step=0,phase=optimizer", RankFault(rank=0, step=0, phase="optimizer")),
        ("rank=2,phase=replay", RankFault(rank=2, phase="replay")),
        (
            "rank=2,step=12,microbatch=1,phase=replay",
            RankFault(rank=2, step=12, microbatch=1, phase="replay"),
        ),
        ("service=logserver,step=3", LogServerFault(step=3)),
        ("service=coordinator,state=fencing", CoordinatorFault(state="fencing")),
        ("corrupt=log,step=17,stream=s1.F", CorruptFault(step=17, stream="s1.F")),
        ("corrupt=log,step=17,stream=S1.f", CorruptFault(step=17, stream="s1.F")),
        ("corrupt=log,step=17", CorruptFault(step=17)),
    ],
)
def test_parses(spec: str, fault: Fault) -> None:
    assert faults.parse(spec) == fault


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("", "key=value"),
        ("rank", "key=value"),
        ("rank=2,,step=3", "key=value"),
        ("step=3", "names no victim"),
        ("rank=two,step=3", "rank must be a number"),
        ("rank=-1,step=3", "rank must be a number"),
        ("rank=2,step=1e3", "step must be a number"),
        ("rank=2,step=9999999999", "step must be a number"),
        ("rank=2", "step is missing"),
        ("rank=2,step=3,step=4", "twice"),
        ("rank=2,step=3,phase=sleep", "forward, backward, reduce, optimizer, idle, replay"),
        ("rank=2,step=3,stage=1", "unknown key 'stage'"),
        ("rank=2,service=logserver", "unknown key 'service'"),
        ("service=database,step=1", "logserver or coordinator"),
        ("service=logserver", "step is missing"),
        ("service=coordinator", "running, fencing, planning, recovering"),
        ("service=coordinator,state=asleep", "running, fencing, planning, recovering"),
        ("corrupt=memory,step=1", "corrupt=log"),
        ("corrupt=log,step=1,stream=../x", "s<stage>.F"),
    ],
)
def test_refuses_to_parse(spec: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.parse(spec)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    number = st.integers(0, 999)
    kind = draw(st.sampled_from(["rank", "logserver", "coordinator", "corrupt"]))
    if kind == "logserver":
        return LogServerFault(step=draw(number))
    if kind == "coordinator":
        return CoordinatorFault(state=draw(st.sampled_from(faults.STATES)))
    if kind == "corrupt":
        return CorruptFault(step=draw(number), stream=draw(st.sampled_from(["", "s0.F", "s12.B"])))
    phase = draw(st.sampled_from(faults.PHASES))
    return RankFault(
        rank=draw(number),
        phase=phase,
        step=draw(st.none() | number) if phase == "replay" else draw(number),
        microbatch=draw(number) if phase in faults.MICROBATCH_PHASES else 0,
    )


@given(any_fault())
def test_round_trips(fault: Fault) -> None:
    assert faults.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        (["rank=4,step=3"], "rank must be 0 to 3"),
        (["rank=2,step=30"], "step must be 0 to 29"),
        (["rank=2,step=3,microbatch=8"], "microbatch must be 0 to 7"),
        (["rank=2,step=3,phase=reduce"], "phases here: forward, backward, optimizer, idle, replay"),
        (["rank=2,phase=replay"], "nothing replays"),
        (["service=logserver,step=30"], "step must be 0 to 29"),
        (["service=coordinator,state=recovering"], "kill a rank as well"),
        (["corrupt=log,step=17"], "no rank is killed at that step"),
        (["rank=2,step=20", "corrupt=log,step=20"], "no multiple of 10"),
        (["rank=2,step=17", "corrupt=log,step=17,stream=s2.F"], "only the streams s1.F, s3.B"),
    ],
)
def test_refuses_what_the_topology_cannot_have(specs: list[str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.check([faults.parse(spec) for spec in specs], topology())
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "specs",
    [
        ["rank=0,step=0", "rank=3,step=29,phase=idle"],
        ["rank=2,step=17", "rank=2,phase=replay"],
        ["rank=2,step=17", "service=coordinator,state=recovering"],
        ["service=coordinator,state=running"],
        ["rank=2,step=17", "corrupt=log,step=17,stream=s3.B"],
        [],
    ],
)
def test_accepts(specs: list[str]) -> None:
    faults.check([faults.parse(spec) for spec in specs], topology())


@pytest.mark.parametrize("extra", ["rank=2,phase=replay", "corrupt=log,step=17"])
def test_the_checkpoint_strategy_replays_nothing(extra: str) -> None:
    planned = [faults.parse("rank=1,step=17"), faults.parse(extra)]
    faults.check(planned, topology())
    with pytest.raises(UsageError, match="--strategy checkpoint"):
        faults.check(planned, topology(), strategy="checkpoint")


def test_environment_holds_only_the_rank_under_corruption() -> None:
    planned = [
        faults.parse(spec)
        for spec in (
            "service=logserver,step=3",
            "rank=2,step=17",
            "corrupt=log,step=17",
            "rank=1,phase=replay",
        )
    ]
    assert json.loads(faults.to_environment(planned)) == [
        {"id": "fault1", "rank": 2, "step": 17, "microbatch": 0, "phase": "backward", "hold": True},
        {"id": "fault3", "rank": 1, "step": None, "microbatch": 0, "phase": "replay"},
    ]
    assert faults.corrupted_stream(CorruptFault(step=17), planned, topology()) == "s1.F"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ranks": 1}, "--stages must be at least 2"),
        ({"replicas": 2}, "--replicas"),
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
    assert faults.parse("rank=2,step=3,microbatch=1,phase=idle") == faults.parse("rank=2,step=3,phase=idle")

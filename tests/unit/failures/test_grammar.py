"""One failure in words: what is read, what is refused and with which words."""

import pytest
from hypothesis import given

from swift_ft import fault_grammar
from swift_ft.errors import UsageError
from swift_ft.fault_grammar import (
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    LogServerFault,
    RankFault,
)
from tests.unit.failures.drawn import any_fault


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
        ("rank=2,phase=copy", RankFault(rank=2, phase="copy")),
        ("rank=2,step=3,microbatch=1,phase=update", RankFault(rank=2, step=3, phase="update")),
        (
            "rank=2,step=12,microbatch=1,phase=replay",
            RankFault(rank=2, step=12, microbatch=1, phase="replay"),
        ),
        ("service=logserver,step=3", LogServerFault(step=3)),
        ("log=1,step=3", LogLossFault(server=1, step=3)),
        ("LOG=0,phase=Replay", LogLossFault(server=0)),
        ("service=coordinator,state=fencing", CoordinatorFault(state="fencing")),
        ("corrupt=log,step=17,stream=s1.F", CorruptFault(step=17, stream="s1.F")),
        ("corrupt=log,step=17,stream=S1.f", CorruptFault(step=17, stream="s1.F")),
        ("corrupt=log,step=17", CorruptFault(step=17)),
        ("corrupt=log,step=17,stream=S1C0.b", CorruptFault(step=17, stream="s1c0.B")),
        ("corrupt=copy,rank=3", CorruptCopyFault(rank=3)),
        ("rank=2,step=9,phase=save", RankFault(rank=2, step=9, phase="save")),
        ("Corrupt=Checkpoint,rank=1,step=17", CorruptCheckpointFault(rank=1, step=17)),
        ("kind=stop,rank=1,step=3,for=2.5", RankFault(rank=1, step=3, kind="stop", for_s=2.5)),
        ("kind=HANG,rank=1,step=3", RankFault(rank=1, step=3, kind="hang")),
        ("kind=slow,rank=1,at=4,factor=3,for=1", RankFault(rank=1, at_s=4, kind="slow", factor=3, for_s=1)),
        ("rank=1,at=3", RankFault(rank=1, at_s=3.0)),
        ("rank=1,step=3,layer=Blocks.1", RankFault(rank=1, step=3, layer="Blocks.1")),
        ("rank=1,step=3,phase=update,bucket=2", RankFault(rank=1, step=3, phase="update", bucket=2)),
        ("service=coordinator,step=3", CoordinatorFault(step=3)),
        ("service=logserver,at=3", LogServerFault(at_s=3.0)),
        ("log=1,at=2", LogLossFault(server=1, at_s=2.0)),
    ],
)
def test_parses(spec: str, fault: Fault) -> None:
    assert fault_grammar.parse(spec) == fault


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
        ("rank=2,step=3,phase=sleep", "forward, backward, weights, reduce, update, optimizer, idle, save"),
        ("rank=2,step=3,phase=copy", "takes no step"),
        ("rank=2,phase=update", "step is missing"),
        ("rank=2,step=3,stage=1", "unknown key 'stage'"),
        ("rank=2,service=logserver", "unknown key 'service'"),
        ("service=database,step=1", "logserver or coordinator"),
        ("service=logserver", "step is missing"),
        ("log=0", "give a step, or phase=replay"),
        ("log=0,step=3,phase=replay", "give a step, or phase=replay"),
        ("log=0,phase=copy", "give a step, or phase=replay"),
        ("log=all,step=3", "log must be a number"),
        ("log=0,rank=1,step=3", "unknown key 'log'"),
        ("service=coordinator", "running, fencing, planning, recovering"),
        ("service=coordinator,state=asleep", "running, fencing, planning, recovering"),
        ("corrupt=memory,step=1", "corrupt must be log, checkpoint or copy"),
        ("corrupt=log,step=1,stream=../x", "s<stage>.F"),
        ("corrupt=checkpoint,step=1", "rank is missing"),
        ("corrupt=checkpoint,rank=1", "step is missing"),
        ("kind=burn,rank=1,step=3", "unknown kind 'burn': one of kill, stop, hang, device, slow"),
        ("rank=1,step=3,for=2", "a kill is for good"),
        ("kind=slow,rank=1,step=3,for=2", "kind=slow needs factor=F"),
        ("kind=slow,rank=1,step=3,factor=2", "kind=slow needs for=SECONDS"),
        ("kind=slow,rank=1,step=3,factor=0.5,for=2", "factor must be a number from 1 to 1000"),
        ("kind=stop,rank=1,step=3,factor=2", "factor needs kind=slow"),
        ("kind=stop,rank=1,phase=replay", "a phase that is not of a recovery"),
        ("rank=1,step=3,at=4", "step and at are both given"),
        ("rank=1,at=4,phase=idle", "phase needs a step"),
        ("rank=1,at=-4", "at must be a number from 0"),
        ("rank=1,step=3,layer=a/b", "a module's name"),
        ("rank=1,step=3,phase=idle,layer=a", "layer needs phase=forward or phase=backward"),
        ("rank=1,step=3,bucket=1", "bucket needs phase=reduce"),
        ("service=coordinator,state=running,step=3", "not both"),
    ],
)
def test_refuses_to_parse(spec: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        fault_grammar.parse(spec)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@given(any_fault())
def test_round_trips(fault: Fault) -> None:
    assert fault_grammar.parse(str(fault)) == fault


def test_a_refusal_names_the_flag() -> None:
    with pytest.raises(UsageError, match=r"^run: --failures 'rank=x,step=1': rank must be a number"):
        fault_grammar.parse("rank=x,step=1", "run: --failures")

"""Drills of the strategy "lossy-forward": what can be asked for, and its verdict, with all evidence broken once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swift_ft.lab.drill import console, report
from swift_ft.lab.drill.calculation import Calculation
from swift_ft.lab.drill.command import parse
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence
from swift_ft.lab.drill.report import FAIL, PASS
from swift_ft.lab.drill.trainer import make_parser
from tests.unit.drill.evidence import Trace, digest

STEPS, CUT, RANKS, LOST = 4, 1, 3, 2
LEFT = (0, 1)
COMMAND = "--stages 1 --replicas 3 --steps 4 --checkpoint-every 2 --microbatches 1 --model tiny"
LOSSY = f"{COMMAND} --strategy lossy-forward --allow-inexact"
KILL = f"--kill rank={LOST},step={CUT},phase=reduce"
Buckets = list[dict[str, Any]]


@pytest.mark.parametrize("more", ["", "--updates wait_free", "--kill rank=1,phase=finish", "--grow step=2"])
def test_what_can_be_asked_for(more: str) -> None:
    config = parse(f"{LOSSY} {KILL} {more}".split())
    assert config.drops
    assert config.finishes_cut_steps


def asked() -> DrillConfig:
    return parse(f"{LOSSY} {KILL}".split())


class Run(Calculation):
    """What the run itself has computed, right or wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__(make_parser().parse_args(asked().trainer_arguments()))
        self.wrong = wrong

    def cut_step(self, step: int, buckets: Sequence[Mapping[str, Any]]) -> None:
        if step == CUT and self.wrong:
            kept, finished = copy.deepcopy(list(buckets))
            match self.wrong:
                case "divisor":
                    finished["divisor"] = RANKS
                case "contributor":
                    kept["contributors"] = [0, 1]
                case "set":
                    finished["contributors"], finished["divisor"] = [0, 1, 2], RANKS
            buckets = [kept, finished]
        super().cut_step(step, buckets)

    def _gradients(self, step: int, origin: int) -> list[torch.Tensor]:
        gradients = super()._gradients(step, origin)
        if (self.wrong, step, origin) == ("bit", CUT, 0):
            flat = gradients[3].view(-1)
            flat.view(torch.int32)[int(flat.abs().argmax())] ^= (
                1 << 8
            )  # not so low that the sum rounds it away
        return gradients


def told_buckets() -> Buckets:
    """The first half was averaged before the loss."""
    count = len(list(Run()._parameters))
    return [
        {"parameters": list(range(count // 2)), "contributors": [0, 1, 2], "divisor": 3},
        {"parameters": list(range(count // 2, count)), "contributors": [0, 1], "divisor": 2},
    ]


def digests_of(run: Calculation, buckets: Buckets | None) -> dict[int, dict[str, Any]]:
    """Version -> digests. `buckets`: None: nobody was lost."""
    found: dict[int, dict[str, Any]] = {0: dict(run.digests())}
    for step in range(STEPS):
        if buckets is not None and step == CUT:
            run.cut_step(step, buckets)
        else:
            run.step(step, LEFT if buckets is not None and step > CUT else range(RANKS))
        found[step + 1] = dict(run.digests())
    return found


def trace_of(buckets: Buckets) -> list[dict[str, Any]]:
    trace = Trace()
    trace.state("FORMING", 1)
    trace.state("RUNNING", 1)
    for step in range(CUT + 1):
        for rank in range(RANKS):
            trace.rank(rank, "step_begin", step=step)
        for rank in range(RANKS) if step < CUT else ():
            trace.rank(rank, "step_end", step=step)
    trace.rank(LOST, "fault", id="fault0", phase="reduce", step=CUT, microbatch=0)
    trace.add("launcher", "child_exit", rank=LOST, pid=trace.pids[LOST], code=-9)
    trace.state("FENCING", 2, reason=f"rank {LOST} was killed by signal 9")
    trace.add("coordinator", "left_vacant", rank=LOST)
    trace.state("PLANNING", 2)
    trace.plan(2, CUT + 1, dict.fromkeys(LEFT, ("LOSSY_FORWARD", CUT + 1)))
    trace.add("coordinator", "not_exact", reason="nobody computes its batches")
    trace.state("RECOVERING", 2)
    for rank in LEFT:
        trace.rank(rank, "lossy_step", step=CUT, buckets=buckets)
        trace.rank(rank, "step_end", step=CUT)
    trace.state("RUNNING", 2)
    for step in range(CUT + 1, STEPS):
        for name in ("step_begin", "step_end"):
            for rank in LEFT:
                trace.rank(rank, name, step=step)
    for rank in LEFT:
        trace.rank(rank, "finished", version=STEPS)
    trace.state("FINISHED", 2)
    return trace.events


@pytest.fixture(scope="module")
def full_world() -> dict[int, dict[str, Any]]:
    return digests_of(Run(), None)


@pytest.fixture(scope="module")
def right() -> dict[int, dict[str, Any]]:
    return digests_of(Run(), told_buckets())


def result_of(
    run: dict[int, dict[str, Any]],
    full_world: dict[int, dict[str, Any]],
    right: dict[int, dict[str, Any]],
    events: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """`run`: what it computed, `right`: what is calculated from what it told."""

    def seen(version: int, by: dict[int, dict[str, Any]]) -> dict[str, Any]:
        return {**digest(0, version), **by[version]}

    found = Evidence(
        events=trace_of(told_buckets()) if events is None else events,
        digests={
            **{f"rank{rank}-v{CUT + 1}-g2": seen(CUT + 1, run) for rank in LEFT},
            **{f"rank{rank}-v{STEPS}": seen(STEPS, run) for rank in LEFT},
        },
        twin_digests={f"rank{r}-v{v}": seen(v, full_world) for r in range(RANKS) for v in range(STEPS + 1)},
        exit_code=0,
        twin_exit_code=0,
        fired=frozenset({"fault0"}),
        log={"records": 400, "bytes": 1 << 20},
        negative_control={"caught": True},
        calculated=right,
    )
    return report.build(asked(), replace(found))


def wrong(result: dict[str, Any]) -> set[str]:
    return {check["name"] for check in result["checks"] if check["answer"] is False}


@pytest.mark.timeout(300)
def test_a_step_that_was_cut_short_is_held_against_a_calculation(
    full_world: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]
) -> None:
    result = result_of(right, full_world, right)
    assert result["verdict"] == PASS, result["reason"]
    assert (result["exact"], result["bitwise_equal"]) == (False, False)
    (cut,) = result["lossy"]
    assert cut["step"] == CUT
    assert [(b["contributors"], b["divisor"]) for b in cut["buckets"]] == [([0, 1, 2], 3), ([0, 1], 2)]
    said = "step 1: buckets that are means: 1 of ranks 0, 1, 2; 1 of ranks 0, 1"
    assert ("cut short", said) in console.fact_rows(result)
    assert right[STEPS] != full_world[STEPS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["divisor", "contributor", "set", "bit"])
def test_a_run_that_did_other_than_it_tells_fails(
    what: str, full_world: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]
) -> None:
    result = result_of(digests_of(Run(what), told_buckets()), full_world, right)
    assert result["verdict"] == FAIL
    assert wrong(result) == {f"digests at version {CUT + 1}", "digests at the end"}


def _of_rank(events: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    (event,) = (e for e in events if e["event"] == "lossy_step" and e["rank"] == rank)
    return event


def _otherwise(events: list[dict[str, Any]]) -> None:
    _of_rank(events, 1)["buckets"] = copy.deepcopy(told_buckets())[::-1]


def _of_all(events: list[dict[str, Any]], change: Callable[[Buckets], object]) -> None:
    for rank in LEFT:
        event = _of_rank(events, rank)
        event["buckets"] = copy.deepcopy(event["buckets"])
        change(event["buckets"])


MEANS = f"the buckets of step {CUT} are means of ranks that were there together"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("breaks", "name"),
    [
        (_otherwise, "all tell the same of these buckets"),
        (lambda events: _of_all(events, lambda b: b[1].update(divisor=3)), MEANS),
        (lambda events: _of_all(events, lambda b: b[1].update(contributors=[0, 2])), MEANS),
        (lambda events: _of_all(events, lambda b: b[0]["parameters"].pop(0)), MEANS),
        (lambda events: _of_all(events, lambda b: b[1]["parameters"].append(0)), MEANS),
    ],
)
def test_what_cannot_be_told_fails(
    breaks: Callable[[list[dict[str, Any]]], None],
    name: str,
    full_world: dict[int, dict[str, Any]],
    right: dict[int, dict[str, Any]],
) -> None:
    events = trace_of(told_buckets())
    breaks(events)
    result = result_of(right, full_world, right, events)
    assert result["verdict"] == FAIL
    assert wrong(result) == {name}


@pytest.mark.timeout(300)
def test_a_step_that_was_dropped_instead_fails(
    full_world: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]
) -> None:
    events = [event for event in trace_of(told_buckets()) if event["event"] != "lossy_step"]
    (plan,) = (event for event in events if event["event"] == "plan")
    plan["ranks"] = [{**entry, "strategy": "KEEP"} for entry in plan["ranks"]]
    result = result_of(right, full_world, right, events)
    assert "steps whose reductions were cut short are finished" in wrong(result)

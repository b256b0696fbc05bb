"""Drills of the strategy "lossy-forward": what can be asked for, and its verdict, with all evidence broken once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from swift_ft.lab.drill import console, report
from swift_ft.lab.drill.calculation import Calculation
from swift_ft.lab.drill.command import parse
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Twin
from swift_ft.lab.drill.report import FAIL, PASS
from swift_ft.lab.drill.trainer import make_parser
from tests.unit.drill.evidence import Trace, digest, good, wrong

pytestmark = pytest.mark.timeout(300)
STEPS, CUT, RANKS, LOST = 4, 1, 3, 2
LEFT = (0, 1)
COMMAND = "--stages 1 --replicas 3 --steps 4 --checkpoint-every 2 --microbatches 1 --model tiny"
LOSSY = f"{COMMAND} --strategy lossy-forward --allow-inexact"
KILL = f"--kill rank={LOST},step={CUT},phase=reduce"
Buckets = list[dict[str, Any]]
Digests = dict[int, dict[str, Any]]
"""Of each version."""


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


def digests_of(run: Calculation, buckets: Buckets | None) -> Digests:
    """`buckets`: None: nobody was lost."""
    found: Digests = {0: dict(run.digests())}
    for step in range(STEPS):
        if buckets is not None and step == CUT:
            run.cut_step(step, buckets)
        else:
            run.step(step, LEFT if buckets is not None and step > CUT else range(RANKS))
        found[step + 1] = dict(run.digests())
    return found


def trace_of(buckets: Buckets) -> list[dict[str, Any]]:
    trace = Trace.begun(CUT, RANKS)
    trace.kill(LOST, CUT)
    trace.add("coordinator", "left_vacant", rank=LOST)
    trace.there = [*LEFT]
    trace.recovers(2, CUT + 1, dict.fromkeys(LEFT, ("LOSSY_FORWARD", CUT + 1)))
    trace.add("coordinator", "not_exact", reason="nobody computes its batches")
    for rank in LEFT:
        trace.rank(rank, "lossy_step", step=CUT, buckets=buckets)
        trace.rank(rank, "step_end", step=CUT)
    trace.state("RUNNING", 2)
    return trace.end(CUT + 1, STEPS).events


@pytest.fixture(scope="module")
def full_world() -> Digests:
    return digests_of(Run(), None)


@pytest.fixture(scope="module")
def right() -> Digests:
    """What is calculated from what the run tells."""
    return digests_of(Run(), told_buckets())


Built = Callable[..., dict[str, Any]]


@pytest.fixture
def built(full_world: Digests, right: Digests) -> Built:
    """Returns the report of a run. `run`: what it computed; `events`: what it told."""

    def build(run: Digests = right, events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        def seen(version: int, by: Digests) -> dict[str, Any]:
            return {**digest(0, version), **by[version]}

        ours = {f"rank{rank}-v{CUT + 1}-g2": seen(CUT + 1, run) for rank in LEFT}
        ours |= {f"rank{rank}-v{STEPS}": seen(STEPS, run) for rank in LEFT}
        twin = {f"rank{r}-v{v}": seen(v, full_world) for r in range(RANKS) for v in range(STEPS + 1)}
        found = good(
            events=trace_of(told_buckets()) if events is None else events,
            digests=ours,
            twin=Twin(digests=twin, exit_code=0),
            calculated=right,
        )
        return report.build(asked(), found)

    return build


def test_a_step_that_was_cut_short_is_held_against_a_calculation(
    built: Built, full_world: Digests, right: Digests
) -> None:
    result = built()
    assert result["verdict"] == PASS, result["reason"]
    assert (result["exact"], result["bitwise_equal"]) == (False, False)
    (cut,) = result["lossy"]
    assert cut["step"] == CUT
    assert [(b["contributors"], b["divisor"]) for b in cut["buckets"]] == [([0, 1, 2], 3), ([0, 1], 2)]
    said = "step 1: buckets that are means: 1 of ranks 0, 1, 2; 1 of ranks 0, 1"
    assert ("cut short", said) in console.fact_rows(result)
    assert right[STEPS] != full_world[STEPS]


@pytest.mark.parametrize("what", ["divisor", "contributor", "set", "bit"])
def test_a_run_that_did_other_than_it_tells_fails(what: str, built: Built) -> None:
    result = built(digests_of(Run(what), told_buckets()))
    assert result["verdict"] == FAIL
    assert wrong(result) == {f"digests at version {CUT + 1}": False, "digests at the end": False}


def told_by(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank tells of the step, with buckets of its own."""
    told = [event for event in events if event["event"] == "lossy_step"]
    for event in told:
        event["buckets"] = copy.deepcopy(event["buckets"])
    return told


def _of_all(events: list[dict[str, Any]], change: Callable[[Buckets], object]) -> None:
    for event in told_by(events):
        change(event["buckets"])


MEANS = f"the buckets of step {CUT} are means of ranks that were there together"


@pytest.mark.parametrize(
    ("breaks", "name"),
    [
        (lambda events: told_by(events)[1]["buckets"].reverse(), "all tell the same of these buckets"),
        (lambda events: _of_all(events, lambda b: b[1].update(divisor=3)), MEANS),
        (lambda events: _of_all(events, lambda b: b[1].update(contributors=[0, 2])), MEANS),
        (lambda events: _of_all(events, lambda b: b[0]["parameters"].pop(0)), MEANS),
        (lambda events: _of_all(events, lambda b: b[1]["parameters"].append(0)), MEANS),
    ],
)
def test_what_cannot_be_told_fails(
    breaks: Callable[[list[dict[str, Any]]], None], name: str, built: Built
) -> None:
    events = trace_of(told_buckets())
    breaks(events)
    assert wrong(built(events=events)) == {name: False}


def test_a_step_that_was_dropped_instead_fails(built: Built) -> None:
    events = [event for event in trace_of(told_buckets()) if event["event"] != "lossy_step"]
    (plan,) = (event for event in events if event["event"] == "plan")
    plan["ranks"] = [{**entry, "strategy": "KEEP"} for entry in plan["ranks"]]
    result = built(events=events)
    assert "steps whose reductions were cut short are finished" in wrong(result)

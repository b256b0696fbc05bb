"""Drills of the strategy "shrink": what can be asked for, and its verdict, with each piece of evidence broken once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.lab.drill import report
from swift_ft.lab.drill.calculation import Calculation
from swift_ft.lab.drill.command import parse
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence, Twin
from swift_ft.lab.drill.report import FAIL, INCONCLUSIVE, PASS
from swift_ft.lab.drill.trainer import make_parser
from tests.unit.drill.evidence import STEPS, Trace, digest, good, judged, wrong
from tests.unit.drill.test_report import without

KILL_STEP, GROWN_AT, LOST, LEFT = 5, 9, 2, [0, 1, 3]
COMMAND = "--stages 1 --replicas 4 --steps 12 --checkpoint-every 5 --microbatches 4 --strategy shrink"
KILL = f"--kill rank={LOST},step={KILL_STEP},microbatch=3"
Events = list[dict[str, Any]]
Digests = dict[int, dict[str, Any]]
"""Of each version."""


def config(more: str = "") -> DrillConfig:
    return parse(f"{COMMAND} {KILL} {more}".split())


def trace_of(*, grows: bool) -> Trace:
    trace, back_at = Trace.begun(KILL_STEP), GROWN_AT if grows else STEPS
    trace.kill(LOST, KILL_STEP)
    trace.add("coordinator", "left_vacant", rank=LOST)
    trace.there = LEFT
    trace.recovers(2, KILL_STEP, dict.fromkeys(LEFT, ("KEEP", KILL_STEP)))
    trace.state("RUNNING", 2)
    for step in range(KILL_STEP, back_at):
        trace.step(step)
        trace.rank(0, "adopted_step", step=step, origin=LOST)
    if grows:
        plan = {**dict.fromkeys(LEFT, ("KEEP", GROWN_AT)), LOST: ("REPLICA", GROWN_AT)}
        trace.recovers(3, GROWN_AT, plan, "rank 2 has come back")
        where = {"generation": 3, "version": GROWN_AT}
        trace.rank(LOST, "restore_begin", **where)
        trace.rank(LOST, "replica_received", digest="d", sources=[{"rank": 0, "digest": "d"}], **where)
        trace.rank(LOST, "restore_end", **where)
        trace.state("RUNNING", 3)
        trace.there = [0, 1, 2, 3]
    return trace.end(back_at)


def evidence(events: Events | None = None, *, grows: bool = False, **changes: Any) -> Evidence:
    there = range(4) if grows else LEFT
    ours = {f"rank{rank}-v{KILL_STEP}-g2": digest(0, KILL_STEP) for rank in LEFT}
    if grows:
        ours |= {f"rank{rank}-v{GROWN_AT}-g3": digest(0, GROWN_AT) for rank in there}
    ours |= {f"rank{rank}-v{STEPS}": digest(0, STEPS) for rank in there}
    twin = {f"rank{r}-v{v}": digest(0, v) for r in range(4) for v in range(STEPS + 1)}
    changes = {"digests": ours, "twin": Twin(digests=twin, exit_code=0), **changes}
    return good(events=trace_of(grows=grows).events if events is None else events, **changes)


def built(found: Evidence, *, grows: bool = False) -> dict[str, Any]:
    return report.build(config("--grow step=8" if grows else ""), found)


def test_the_others_go_on_and_those_that_are_left_are_compared() -> None:
    result = built(evidence())
    assert result["verdict"] == PASS, result["reason"]
    assert result["exact"] is True
    assert result["bitwise_equal"] is True
    assert result["survivors_kept"] is True
    assert result["shrink"]["vacant_after"] == [[LOST]]
    assert result["shrink"]["compared_at_end"] == [0, 1, 3]
    assert result["shrink"]["batches_computed_for"] == [{"rank": LOST, "by": 0, "steps": STEPS - KILL_STEP}]
    assert result["recovery_seconds"]["total"] > 0
    assert result["throughput"]["after"] is not None


def test_one_that_comes_back_is_compared_at_the_end() -> None:
    result = built(evidence(grows=True), grows=True)
    assert result["verdict"] == PASS, result["reason"]
    assert result["shrink"]["vacant_after"] == [[LOST], []]
    assert result["shrink"]["returned"] == {str(LOST): GROWN_AT}
    assert result["shrink"]["compared_at_end"] == [0, 1, 2, 3]
    assert [recovery["recovery_seconds"]["detect"] for recovery in result["recoveries"]][1] == 0.0


def test_a_slot_that_the_coordinator_did_not_leave_vacant_fails() -> None:
    events = without("left_vacant")(trace_of(grows=False).events)
    assert wrong(built(evidence(events))) == {"the slots of lost ranks were left vacant": False}


def test_a_survivor_that_is_not_in_the_plan_is_asked_for_its_digest() -> None:
    trace = trace_of(grows=False)
    (plan,) = (event for event in trace.events if event["event"] == "plan")
    plan["ranks"] = [entry for entry in plan["ranks"] if entry["rank"] != 3]
    found = evidence(trace.events)
    ours = {name: value for name, value in found.digests.items() if not name.startswith("rank3-")}
    assert built(replace(found, digests=ours))["verdict"] == INCONCLUSIVE


def test_one_that_did_not_come_back_fails() -> None:
    result = built(evidence(), grows=True)
    assert result["verdict"] == FAIL
    assert wrong(result)["lost ranks came back when they were to"] is False


def test_one_that_came_back_unasked_fails() -> None:
    result = built(evidence(grows=True))
    assert result["verdict"] == FAIL
    assert wrong(result) == {"they stayed vacant": False}


# --- batches that nobody computes ---

DROP = "--lost-shard drop --allow-inexact"


class FullWorld(Calculation):
    """Divides by the number of all origins."""

    def cut_step(self, step: int, buckets: Sequence[Mapping[str, Any]]) -> None:
        super().cut_step(step, [{**bucket, "divisor": 4} for bucket in buckets])


class Halved(Calculation):
    """Takes one origin too few."""

    def step(self, step: int, origins: Sequence[int]) -> None:
        super().step(step, origins[:-1] if len(origins) < 4 else origins)


class Late(Calculation):
    """Is without the lost origin one step too late."""

    def step(self, step: int, origins: Sequence[int]) -> None:
        super().step(step, range(4) if step == KILL_STEP else origins)


def calculated(kind: type[Calculation], config: DrillConfig, *, lost: bool = True) -> Digests:
    calculation = kind(make_parser().parse_args(config.trainer_arguments()))
    found: Digests = {0: dict(calculation.digests())}
    for step in range(STEPS):
        gone = lost and step >= KILL_STEP
        calculation.step(step, [origin for origin in range(4) if not (gone and origin == LOST)])
        found[step + 1] = dict(calculation.digests())
    return found


def dropping() -> DrillConfig:
    smaller = COMMAND.replace("--microbatches 4", "--microbatches 1")
    return parse(f"{smaller} --model tiny {DROP} --kill rank={LOST},step={KILL_STEP}".split())


@pytest.fixture(scope="module")
def full_world() -> Digests:
    return calculated(Calculation, dropping(), lost=False)


@pytest.fixture(scope="module")
def right() -> Digests:
    return calculated(Calculation, dropping())


@pytest.mark.timeout(400)  # a small transformer, again and again: 92 s of processor time in all four cases
@pytest.mark.parametrize(
    ("kind", "verdict"), [(Calculation, PASS), (FullWorld, FAIL), (Halved, FAIL), (Late, FAIL)]
)
def test_what_is_dropped_is_held_against_a_calculation(
    kind: type[Calculation], verdict: str, full_world: Digests, right: Digests
) -> None:
    """`kind`: what the run itself computed."""
    asked = dropping()
    run = calculated(kind, asked)
    events = [event for event in trace_of(grows=False).events if event["event"] != "adopted_step"]
    events.insert(-1, {**events[-1], "event": "not_exact", "reason": "nobody computes its batches"})

    def told(version: int, by: Digests) -> dict[str, Any]:
        return {**digest(0, version), **by[version]}

    ours = {f"rank{rank}-v{KILL_STEP}-g2": told(KILL_STEP, run) for rank in LEFT}
    ours |= {f"rank{rank}-v{STEPS}": told(STEPS, run) for rank in LEFT}
    twin = {f"rank{r}-v{v}": told(v, full_world) for r in range(4) for v in range(STEPS + 1)}
    found = evidence(events, digests=ours, twin=Twin(digests=twin, exit_code=0), calculated=right)
    result = judged(asked, found, verdict)
    assert result["exact"] is False
    assert result["bitwise_equal"] is False
    if verdict == PASS:
        assert "independent calculation" in result["reason"]
        judged(asked, replace(found, calculated={}), INCONCLUSIVE)
        other = {version: {**digests, "optimizer": "other"} for version, digests in right.items()}
        judged(asked, replace(found, calculated=other), FAIL)
    else:
        assert wrong(result) == {"digests at the end": False}

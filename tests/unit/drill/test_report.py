"""The verdict: each piece of evidence is broken or taken away once."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.lab.drill import report, timeline
from swift_ft.lab.drill.facts import Evidence
from swift_ft.lab.drill.report import FAIL, INCONCLUSIVE, PASS
from swift_ft.lab.drill.verdict_checks import DIGEST_FIELDS
from tests.unit.drill.evidence import (
    CHECKPOINT,
    KILL_STEP,
    NEW_PID,
    RANKS,
    STEPS,
    Trace,
    carried_out,
    config,
    digests,
    good,
    good_trace,
    judged,
    kept,
)

CONTRACT = """
    verdict seed rerun versions topology faults strategy exact bitwise_equal digests timeline
    recovery_seconds steps_lost steps_replayed microbatches_recomputed survivors_kept log
    negative_control throughput recoveries
"""


def without(event: str, **fields: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def take_away(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept_events = [
            e for e in events if e["event"] != event or any(e.get(k) != v for k, v in fields.items())
        ]
        assert len(kept_events) < len(events), "the test takes nothing away"
        return kept_events

    return take_away


def test_a_good_run_passes_with_every_field_of_the_contract() -> None:
    result = judged(config(), good())
    assert set(CONTRACT.split()) <= set(result)
    assert json.loads(json.dumps(result)) == result
    assert result["exact"] is True
    assert result["bitwise_equal"] is True
    assert result["strategy"] == {"0": "keep", "1": "keep", "2": "replay", "3": "keep"}
    assert result["steps_lost"] == 0
    assert result["steps_replayed"] == KILL_STEP - CHECKPOINT
    assert result["microbatches_recomputed"] == 4 * (KILL_STEP - CHECKPOINT)
    assert result["survivors_kept"] is True
    assert result["log"] == {
        "records": 400,
        "bytes": 1 << 20,
        "verified_sends": 24,
        "placement": {},
        "moved": [],
        "lost": [],
    }
    assert result["faults"][0]["spec"] == "rank=2,step=8,microbatch=3,phase=backward"
    assert result["rerun"].endswith("--kill rank=2,step=8,microbatch=3,phase=backward")
    assert all(check["answer"] for check in result["checks"])


def test_how_long_survivors_were_blocked() -> None:
    assert report.build(config(), good())["survivors_freed_seconds"] == pytest.approx(0.009)
    events = without("freed")(good_trace().events)
    assert report.build(config(), good(events=events))["survivors_freed_seconds"] is None


def test_phases_sum_to_the_total() -> None:
    seconds = report.build(config(), good())["recovery_seconds"]
    assert set(seconds) == {"detect", "fence", "plan", "rebuild", "restore", "replay", "rejoin", "total"}
    assert sum(seconds.values()) - seconds["total"] == pytest.approx(seconds["total"])
    # The last one is to the step_begin of the last rank.
    wanted = {"detect": 0.03, "fence": 0.042, "plan": 0.05, "rebuild": 0.06, "restore": 0.03, "replay": 0.35}
    assert {name: seconds[name] for name in (*wanted, "rejoin")} == pytest.approx({**wanted, "rejoin": 0.06})


@pytest.mark.parametrize("field", DIGEST_FIELDS)
@pytest.mark.parametrize("name", [f"rank1-v{STEPS}", f"rank2-v{KILL_STEP}-g2"])
def test_a_differing_digest_fails(name: str, field: str) -> None:
    changed = copy.deepcopy(digests((KILL_STEP, 2)))
    changed[name][field] = "0" * 64
    result = judged(config(), good(digests=changed), FAIL)
    assert result["bitwise_equal"] is False
    assert result["exact"] is False
    assert field in result["reason"]


@pytest.mark.parametrize("field", ["", *DIGEST_FIELDS])
@pytest.mark.parametrize("name", [f"rank3-v{STEPS}", f"rank0-v{KILL_STEP}-g2"])
def test_a_missing_digest_is_inconclusive(name: str, field: str) -> None:
    """`field`: empty: all of them."""
    fewer = digests((KILL_STEP, 2))
    if field:
        del fewer[name][field]
    else:
        del fewer[name]
    result = judged(config(), good(digests=fewer), INCONCLUSIVE)
    assert result["bitwise_equal"] is None
    assert result["exact"] is False


TWIN = good().twin


@pytest.mark.parametrize("version", [KILL_STEP, STEPS])
def test_a_twin_without_the_digest_is_inconclusive(version: int) -> None:
    known = {name: d for name, d in TWIN.digests.items() if name != f"rank1-v{version}"}
    judged(config(), good(twin=replace(TWIN, digests=known)), INCONCLUSIVE)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"negative_control": None}, INCONCLUSIVE),
        ({"negative_control": {"caught": None, "reason": "no segment file"}}, INCONCLUSIVE),
        ({"negative_control": {"caught": False}}, FAIL),
        ({"exit_code": 1}, FAIL),
        ({"exit_code": None}, FAIL),
        ({"exit_code": 3, "events": Trace.begun(3).events}, INCONCLUSIVE),
        ({"exit_code": None, "events": Trace.begun(3).events}, INCONCLUSIVE),
        ({"twin": replace(TWIN, exit_code=1)}, INCONCLUSIVE),
        ({"twin": replace(TWIN, exit_code=None)}, INCONCLUSIVE),
        ({"twin": replace(TWIN, recoveries=1)}, INCONCLUSIVE),
        ({"events": []}, INCONCLUSIVE),
    ],
)
def test_broken_evidence(changes: dict[str, Any], verdict: str) -> None:
    result = judged(config(), good(**changes), verdict)
    assert result["reason"]


@pytest.mark.parametrize(
    "take_away",
    [
        without("fault"),
        without("plan"),
        without("replay_end"),
        without("state"),
        without("state", state="RUNNING", generation=2),
    ],
)
def test_a_missing_event_is_never_pass(take_away: Callable[[list[dict[str, Any]]], Any]) -> None:
    result = report.build(config(), good(events=take_away(good_trace().events)))
    assert result["verdict"] != PASS
    assert result["exact"] is False


@pytest.mark.parametrize("event", ["finished", "group_built", "restore_begin", "restore_end", "replay_begin"])
def test_some_events_only_make_the_phases_finer(event: str) -> None:
    judged(config(), good(events=without(event)(good_trace().events)))


def test_a_fault_that_left_no_trace_did_not_happen() -> None:
    events = without("child_exit")(without("fault")(good_trace().events))
    result = report.build(config(), good(events=events))
    assert result["verdict"] != PASS
    (check,) = [c for c in result["checks"] if c["name"] == "every fault was carried out"]
    assert check["answer"] is None
    assert "rank=2" in check["detail"]


@pytest.mark.parametrize("ranks", [{0, 1, 2, 3}, {3}])
def test_a_rank_without_a_step_after_the_recovery_is_inconclusive(ranks: set[int]) -> None:
    trace = good_trace()
    back = next(e["t"] for e in trace.events if e.get("state") == "RUNNING" and e["generation"] == 2)
    events = [
        e
        for e in trace.events
        if e["t"] <= back or e["event"] not in ("step_begin", "finished") or e["rank"] not in ranks
    ]
    result = judged(config(), good(events=events), INCONCLUSIVE)
    assert result["recovery_seconds"] is None


def test_a_rank_that_changed_its_process_fails() -> None:
    events = copy.deepcopy(good_trace().events)
    for event in events[-20:]:
        if event["who"] == "rank1":
            event["pid"] = NEW_PID + 1
    result = judged(config(), good(events=events), FAIL)
    assert result["survivors_kept"] is False
    assert "rank 1 changed pid" in result["reason"]


def test_a_rank_that_died_untold_fails() -> None:
    trace = good_trace()
    trace.add("launcher", "child_exit", rank=1, pid=101, code=-6)
    judged(config(), good(trace), FAIL, "rank 1 (exit code -6)")


def test_a_replay_that_verified_nothing_is_inconclusive() -> None:
    events = copy.deepcopy(good_trace().events)
    next(e for e in events if e["event"] == "replay_end")["verified"] = 0
    judged(config(), good(events=events), INCONCLUSIVE, "verified")


# What else can happen in a recovery.


def fallen_back_evidence(trace: Trace | None = None) -> Evidence:
    """The replacement refuses to replay; everybody goes back to the checkpoint."""
    reason = "record s1.F is corrupt"
    trace = trace or Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    trace.recovers(2, KILL_STEP, kept())
    trace.rank(2, "restore_begin", generation=2)
    trace.rank(2, "restore_end", 0.5, generation=2)
    trace.recovers(3, CHECKPOINT, dict.fromkeys(range(RANKS), ("CHECKPOINT", CHECKPOINT)), reason)
    trace.restored(3, CHECKPOINT)
    trace.state("RUNNING", 3)
    return good(trace.end(CHECKPOINT), digests=digests((CHECKPOINT, 3)))


def test_a_fallback_nobody_asked_for_fails() -> None:
    result = judged(config(), fallen_back_evidence(), FAIL)
    assert result["bitwise_equal"] is True
    assert result["exact"] is False
    assert "corrupt" in result["reason"]


CORRUPT = (f"rank=2,step={KILL_STEP},microbatch=3", f"corrupt=log,step={KILL_STEP}")


def flipped(trace: Trace) -> Trace:
    return carried_out(trace, "corrupted", stream="s1.F", file="x", bit=7, record="r")


def test_a_fallback_from_a_corrupt_log_passes_but_not_as_exact() -> None:
    result = judged(config(*CORRUPT), fallen_back_evidence(flipped(Trace.begun(KILL_STEP))))
    assert result["exact"] is False
    assert set(result["strategy"].values()) == {"checkpoint"}
    assert "corrupt" in result["recoveries"][0]["plan_reason"]
    assert result["steps_lost"] == KILL_STEP - CHECKPOINT
    assert result["recoveries"][0]["generations"] == [2, 3]
    assert result["recovery_seconds"]["superseded"] > 0.5
    assert result["reason"].startswith("nothing was replayed: ")


def test_a_corrupt_log_that_was_replayed_fails() -> None:
    judged(config(*CORRUPT), good(flipped(good_trace())), FAIL, "flipped bit was replayed")


def test_a_corruption_that_never_happened_is_inconclusive() -> None:
    judged(config(*CORRUPT), fallen_back_evidence(), INCONCLUSIVE)


def test_a_coordinator_killed_in_a_recovery_may_lose_a_state() -> None:
    specs = (f"rank=2,step={KILL_STEP},microbatch=3", "service=coordinator,state=planning")
    trace = carried_out(good_trace(), "service_killed", service="coordinator", state="PLANNING")
    events = without("state", state="PLANNING")(trace.events)
    assert judged(config(*specs), good(events=events))["recovery_seconds"]["plan"] == 0


def test_two_victims_one_after_the_other() -> None:
    trace = Trace.begun(KILL_STEP)
    for generation, victim in ((2, 2), (3, 1)):
        trace.kill(victim, KILL_STEP, f"fault{generation - 2}")
        trace.pids[victim] = NEW_PID + victim
        trace.recovery(generation, victim)
        trace.state("RUNNING", generation)
        for rank in range(RANKS):
            trace.rank(rank, "step_begin", step=KILL_STEP)
    planned = config(*(f"rank={rank},step={KILL_STEP},microbatch=3" for rank in (2, 1)))
    evidence = good(trace.end(KILL_STEP), digests=digests((KILL_STEP, 2), (KILL_STEP, 3)))
    result = judged(planned, evidence)
    assert [recovery["faults"] for recovery in result["recoveries"]] == [["fault0"], ["fault1"]]
    assert result["steps_replayed"] == 2 * (KILL_STEP - CHECKPOINT)
    assert result["strategy"] == {"0": "keep", "1": "replay", "2": "replay", "3": "keep"}
    total = sum(recovery["recovery_seconds"]["total"] for recovery in result["recoveries"])
    assert result["recovery_seconds"]["total"] == pytest.approx(total)


def test_a_replay_is_no_step_after_the_recovery_before_it() -> None:
    """Rank 1 dies before it has begun a step after the first recovery: that one lasts until it really does."""
    trace = Trace.begun(KILL_STEP)
    for generation, victim in ((2, 2), (3, 1)):
        trace.rank(victim, "fault", id=f"fault{generation - 2}", phase="idle", step=KILL_STEP, microbatch=0)
        trace.pids[victim] = NEW_PID + victim
        trace.recovery(generation, victim)
        trace.state("RUNNING", generation)
        if generation == 2:
            for rank in (0, 2, 3):
                trace.rank(rank, "step_begin", step=KILL_STEP)
    planned = config(*(f"rank={rank},step={KILL_STEP},phase=idle" for rank in (2, 1)))
    found = good(trace.end(KILL_STEP), digests=digests((KILL_STEP, 2), (KILL_STEP, 3)))
    result = judged(planned, found)
    first, second = (recovery["recovery_seconds"] for recovery in result["recoveries"])
    assert first["rejoin"] > second["total"]


@pytest.mark.parametrize("seen", ["after", "before"])
def test_a_rank_that_dies_as_a_recovery_ends_is_for_the_next_one(seen: str) -> None:
    """Rank 1 has said that it is ready. Its launcher sees it gone only after RUNNING; or before, and the coordinator
    hears of it after."""
    trace = Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    for generation, victim in ((2, 2), (3, 1)):
        trace.recovery(generation, victim)
        if generation == 2:
            trace.rank(1, "fault", id="fault1", phase="replay", step=KILL_STEP, microbatch=0)
            gone = {"rank": 1, "pid": trace.pids[1], "code": -9}
            if seen == "before":
                trace.add("launcher", "child_exit", **gone)
        trace.state("RUNNING", generation)
        if generation == 2:
            if seen == "after":
                trace.add("launcher", "child_exit", **gone)
            trace.add("coordinator", "fenced", rank=1)
            trace.pids[1] = NEW_PID + 1
    planned = config(f"rank=2,step={KILL_STEP},microbatch=3", "rank=1,phase=replay")
    found = good(trace.end(KILL_STEP), digests=digests((KILL_STEP, 2), (KILL_STEP, 3)))
    result = judged(planned, found)
    assert [recovery["faults"] for recovery in result["recoveries"]] == [["fault0"], ["fault1"]]


def test_a_drill_on_services_alone_needs_no_recovery() -> None:
    trace = carried_out(Trace.begun(4), "service_killed", "fault0", service="logserver")
    result = judged(config("service=logserver,step=4"), good(trace.end(4), digests=digests()))
    assert result["recoveries"] == []
    assert result["recovery_seconds"] is None
    assert result["throughput"]["before"] > 0


def test_throughput_before_during_and_after() -> None:
    rates = report.build(config(), good())["throughput"]
    # A step takes 8 events of 10 ms.
    assert rates["before"] == pytest.approx(1 / 0.08)
    assert rates["during"] == 0
    assert rates["after"] == pytest.approx(1 / 0.08)


def test_a_step_that_all_ranks_end_after_the_kill_is_done_during_the_failure() -> None:
    ended = [(0, 1.0), (1, 3.0), (2, 6.0), (3, 7.0)]
    events = [
        {"event": "step_end", "step": step, "rank": rank, "t": t} for step, t in ended for rank in (0, 1)
    ]
    events.append({"event": "step_begin", "step": 2, "rank": 0, "t": 5.0})
    fault = {"rank": 2, "t": 2.0}
    recovery = timeline.Recovery(began_t=2.1, ended_t=4.0, faults=[fault])
    rates = timeline.throughput(events, [recovery], ranks=2)
    assert rates == {"before": None, "during": 1 / 3, "after": 1.0}

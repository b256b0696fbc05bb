"""Replays in the report: how long they took, what an interruption cost."""

from typing import Any

import pytest

from swift_ft.lab.drill import report, timeline
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, NEW_PID, Trace, good, kept

STEPS_REPLAYED = KILL_STEP - CHECKPOINT


def test_how_long_it_took() -> None:
    evidence = good()
    events = [{**e, "seconds": 0.3} if e["event"] == "replay_end" else e for e in evidence.events]
    (recovery,) = timeline.recoveries(events)
    assert report.replays(recovery) == [{"rank": 2, "steps": STEPS_REPLAYED, "seconds": 0.3}]


def interrupted(again: bool = False, kept_steps: int = 2) -> Trace:
    """Rank 1 helps rank 2, and is killed in it."""
    trace = Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    trace.recovers(2, KILL_STEP, kept())
    trace.rank(2, "replay_begin", generation=2, version=CHECKPOINT)
    trace.rank(2, "help_begin", generation=2, helpers=[1, 3], shares=[2, 1, 1])
    for step in range(CHECKPOINT, CHECKPOINT + kept_steps):
        trace.rank(2, "step_begin", step=step, replay=True)
        trace.rank(2, "step_end", 0.1, step=step, replay=True)
    trace.rank(2, "step_begin", step=CHECKPOINT + kept_steps, replay=True)
    trace.rank(1, "fault", id="fault1", phase="replay", step=CHECKPOINT + kept_steps, microbatch=1)
    trace.add("launcher", "child_exit", 0.1, rank=1, pid=trace.pids[1], code=-9)
    trace.pids[1] = NEW_PID + 1
    caught_up = {1: ("REPLAY", CHECKPOINT), 2: ("CATCH_UP", CHECKPOINT + kept_steps)}
    trace.recovers(3, KILL_STEP, {**kept(), **caught_up})
    trace.rank(2, "replay_begin", 0.3, generation=3, version=CHECKPOINT + kept_steps)
    trace.rank(2, "help_begin", 0.2, generation=3, helpers=[3], shares=[2, 2])
    for step in range(CHECKPOINT + kept_steps - again, KILL_STEP):
        trace.rank(2, "step_begin", 0.05, step=step, replay=True)
        trace.rank(2, "step_end", 0.1, step=step, replay=True)
    trace.rank(
        2, "replay_end", generation=3, steps=1, records=1, microbatches=4, verified=1, filled=0, seconds=0.3
    )
    trace.state("RUNNING", 3, 0.1)
    return trace.end(KILL_STEP)


def cut(trace: Trace) -> dict[str, Any]:
    (recovery,) = timeline.recoveries(trace.events)
    (one,) = report.interruptions(recovery)
    return one


class TestAHelperThatDied:
    def test_what_it_cost(self) -> None:
        one = cut(interrupted())
        assert (one["helper"], one["owner"], one["steps_kept"], one["steps_again"]) == (1, 2, 2, 0)
        assert one["helpers_after"] == [3]
        assert one["seconds"] == pytest.approx(0.69)

    def test_a_step_that_was_done_twice_is_told(self) -> None:
        one = cut(interrupted(again=True))
        assert one["steps_again"] == 1
        (check,) = report.replay_checks([{"interruptions": [one]}])
        assert check.answer is False

    def test_one_that_had_done_all_by_then(self) -> None:
        one = cut(interrupted(kept_steps=STEPS_REPLAYED))
        assert one["steps_kept"] == STEPS_REPLAYED
        assert one["seconds"] is None

    def test_a_death_in_another_recovery_or_of_another_rank_is_none(self) -> None:
        evidence = good()
        (recovery,) = timeline.recoveries(evidence.events)
        assert report.interruptions(recovery) == []

"""Lost log servers in the report."""

import pytest

from swift_ft.lab.drill.report import FAIL, INCONCLUSIVE, PASS
from tests.unit.drill.evidence import (
    CHECKPOINT,
    KILL_STEP,
    RANKS,
    Trace,
    carried_out,
    config,
    digests,
    good,
    judged,
    kept,
)

LOST = "log server h:1 is lost: it has not answered for 6.0 s"
BOTH = (f"rank=2,step={KILL_STEP},microbatch=3", f"log=0,step={KILL_STEP}")


def lost_alone(*, given_up: bool = True) -> Trace:
    """The log server dies in step 5, and is given up in step 8."""
    trace = Trace()
    for rank in range(RANKS):
        trace.rank(rank, "log_placed", generation=1, servers=["h:1"] if rank % 2 else ["h:2"], instead_of=[])
    trace.state("RUNNING", 1)
    for step in range(KILL_STEP):
        if step == 5:
            carried_out(trace, "service_killed", "fault0", service="logserver0", lost=True, number=0)
        trace.step(step)
    keep = dict.fromkeys(range(RANKS), ("KEEP", KILL_STEP))
    trace.recovers(2, KILL_STEP, keep, LOST if given_up else "rank 3 refused KEEP")
    if given_up:
        trace.add("coordinator", "log_server_lost", server=0, reason=LOST)
    for rank in (1, 3):
        trace.rank(rank, "log_placed", generation=2, servers=["h:2"], instead_of=["h:1"])
    trace.state("RUNNING", 2)
    return trace.end(KILL_STEP)


def lost_with_a_rank(reason: str) -> Trace:
    trace = Trace.begun(KILL_STEP)
    carried_out(trace, "service_killed", service="logserver0", lost=True, number=0)
    trace.kill(2, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    trace.add("coordinator", "log_server_lost", server=0, reason=LOST)
    if reason:
        trace.recovers(3, CHECKPOINT, dict.fromkeys(range(RANKS), ("CHECKPOINT", CHECKPOINT)), reason)
        trace.restored(3, CHECKPOINT)
    else:
        trace.recovers(3, KILL_STEP, kept(), LOST)
        trace.replay(2, 3, CHECKPOINT, KILL_STEP)
    trace.state("RUNNING", 3, 0.02)
    return trace.end(CHECKPOINT if reason else KILL_STEP)


def test_a_lost_log_server_costs_nobody_its_state_and_what_moved_is_told() -> None:
    result = judged(config("log=0,step=5", log_servers=2), good(lost_alone()))
    assert result["log"]["placement"] == {"0": ["h:2"], "1": ["h:1"], "2": ["h:2"], "3": ["h:1"]}
    assert result["log"]["moved"] == [
        {"rank": rank, "generation": 2, "from": ["h:1"], "to": ["h:2"]} for rank in (1, 3)
    ]
    assert result["log"]["lost"] == [LOST]
    assert result["recovery_seconds"]["detect"] > 0


def test_a_recovery_that_no_lost_server_explains_fails_the_drill() -> None:
    judged(
        config("log=0,step=5", log_servers=2),
        good(lost_alone(given_up=False)),
        FAIL,
        "a recovery of itself",
        "0 of 1 were given up",
    )


@pytest.mark.parametrize(
    ("copies", "reason", "verdict"),
    [
        (2, "", PASS),
        (1, f"s1.F is empty ({LOST})", PASS),
        (1, "s1.F is corrupt", FAIL),
        (2, f"s1.F is empty ({LOST})", FAIL),
    ],
)
def test_fault_37_a_rank_and_a_log_server_at_once(copies: int, reason: str, verdict: str) -> None:
    """The second copy, else the checkpoint with the reason said."""
    found = (CHECKPOINT if reason else KILL_STEP, 3)
    evidence = good(lost_with_a_rank(reason), digests=digests(found))
    result = judged(config(*BOTH, log_servers=2, copies=copies), evidence, verdict)
    if verdict == PASS and reason:
        assert LOST in result["reason"]


def test_without_the_servers_end_nothing_is_shown() -> None:
    trace = lost_alone()
    next(event for event in trace.events if event["event"] == "service_killed")["id"] = "another"
    judged(config("log=0,step=5", log_servers=2), good(trace), INCONCLUSIVE)

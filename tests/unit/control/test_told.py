"""What a launcher says of what its job waits for, and of its end."""

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.agent import LATE_S, Told
from swift_ft.rpc.views import end_words


def waiting(words: str, state: pb.State = pb.FENCING) -> pb.View:
    return pb.View(generation=2, state=state, waiting_for=words)


def test_what_a_job_waits_for_is_said_once_when_it_takes_long() -> None:
    told = Told()
    assert told.late(None, 0.0) == ""
    join = waiting("rank 0 to join")
    assert told.late(join, 1.0) == ""
    assert told.late(join, LATE_S) == ""
    assert told.late(join, LATE_S + 1.0) == (
        f"the job has waited for {LATE_S:g} s for rank 0 to join "
        "(if a machine is lost, start the same command on another one)"
    )
    assert told.late(join, 2 * LATE_S) == ""
    log = waiting("log server l0: connection refused")
    assert told.late(log, 3 * LATE_S) == ""
    assert told.late(log, 4 * LATE_S) == (
        f"the job has waited for {LATE_S:g} s for log server l0: connection refused "
        "(if a log server is lost for good, swift-ft logs --lost names it, and --add another one)"
    )
    report = waiting("rank 0 to report", pb.PLANNING)
    told.late(report, 5 * LATE_S)
    assert told.late(report, 6 * LATE_S) == f"the job has waited for {LATE_S:g} s for rank 0 to report"


def test_a_job_that_is_started_again_says_so_and_not_that_its_ranks_hold_nothing() -> None:
    entry = pb.RankPlan(strategy=pb.CHECKPOINT, reason="no rank holds a state")
    plan = pb.Plan(ranks=[entry], target_version=7, exact=True)
    view = pb.View(generation=2, state=pb.RECOVERING, reason="rank 0 was killed by signal 9", plan=plan)
    assert Told().of(view) == ["no rank holds a state; restored version 7; exact"]
    view.reason = "started again at version 7: it was stopped"
    assert Told().of(view) == ["started again at version 7: it was stopped; exact"]


def test_a_job_that_goes_on_waits_for_nothing() -> None:
    told = Told()
    told.late(waiting("rank 0 to join"), 0.0)
    assert told.late(waiting("rank 0 to be ready", pb.RECOVERING), LATE_S) == ""
    assert told.late(waiting("rank 0 to join"), LATE_S) == ""
    assert told.late(waiting("", pb.RUNNING), 2 * LATE_S) == ""
    assert told.late(waiting("rank 0 to join"), 2 * LATE_S) == ""


def test_the_end_that_a_trainer_has_made_is_said() -> None:
    stopped = pb.View(
        state=pb.FINISHED,
        reason="stopped at step 6: enough",
        ends_at=7,
        ends_of=10,
        final_version=7,
    )
    goes_on = "stopped at step 6: enough; with more than 10 steps it goes on"
    assert end_words(stopped) == [goes_on]


def test_of_a_run_that_has_done_its_steps_there_is_nothing_to_say() -> None:
    done = pb.View(state=pb.FINISHED, final_version=10)
    assert end_words(done) == []
    done.inexact_since, done.inexact_reason = 5, "why"
    assert end_words(done) == ["not exact since version 5: why"]

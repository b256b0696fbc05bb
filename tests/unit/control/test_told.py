"""What a launcher says of what its job waits for."""

from swift._pb import coordinator_pb2 as pb
from swift.views import LATE_S, Told


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


def test_a_job_that_goes_on_waits_for_nothing() -> None:
    told = Told()
    told.late(waiting("rank 0 to join"), 0.0)
    assert told.late(waiting("rank 0 to be ready", pb.RECOVERING), LATE_S) == ""
    assert told.late(waiting("rank 0 to join"), LATE_S) == ""
    assert told.late(waiting("", pb.RUNNING), 2 * LATE_S) == ""
    assert told.late(waiting("rank 0 to join"), 2 * LATE_S) == ""

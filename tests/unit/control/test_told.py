"""What a launcher says of what its job waits for, and of its end."""

from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import end_words
from swift_ft.launch.agent import LATE_S, Told


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


def a_view(generation: int, state: pb.State, holders: dict[int, str], **more: Any) -> pb.View:
    """`holders`: rank -> its machine."""
    members = [pb.Member(rank=rank, host=host, incarnation=f"{rank}") for rank, host in holders.items()]
    return pb.View(generation=generation, state=state, members=members, **more)


def test_a_missing_machine_is_said_where_it_is_not_and_so_is_that_the_job_goes_on() -> None:
    all_there = {0: "a01", 1: "a01", 2: "a02", 3: "a02"}
    here, there = Told(), Told()
    plan = pb.Plan(ranks=[pb.RankPlan(strategy=pb.KEEP)], target_version=7, exact=True)
    views = [
        a_view(1, pb.FORMING, {0: "a01"}),
        a_view(1, pb.RUNNING, all_there),
        a_view(2, pb.FENCING, {0: "a01", 1: "a01"}, reason="ranks 2, 3 were silent for 5 s"),
        a_view(2, pb.PLANNING, {0: "a01", 1: "a01"}, reason="ranks 2, 3 were silent for 5 s"),
        a_view(2, pb.RUNNING, all_there, plan=plan),
        a_view(3, pb.FENCING, {0: "a01", 1: "a01", 2: "a02"}, reason="rank 3 was killed by signal 9"),
        a_view(3, pb.RUNNING, {0: "a01", 1: "a01", 2: "a02"}, vacant=[3]),
    ]
    assert [line for view in views for line in here.of(view, mine=[0, 1])] == [
        "machine a02 is missing: ranks 2, 3 were silent for 5 s",
        "the job goes on at step 7",
        "rank 3 was killed by signal 9 (on a02)",
        "the job goes on, without rank 3",
    ]
    # Where it is known already.
    assert [line for view in views[-2:] for line in there.of(view, mine=[2, 3])] == []


def test_a_log_server_that_was_given_up_is_said_once() -> None:
    told = Told()
    view = a_view(2, pb.FENCING, {})
    view.log_places.add(address="a01:1")
    assert told.of(view) == []
    view.log_places.add(address="a02:1", lost="it has not answered for 30 s")
    assert told.of(view) == ["log server a02:1 was given up: it has not answered for 30 s"]
    assert told.of(view) == []

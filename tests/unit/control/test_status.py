"""`swift-ft status`: what an operator sees of a job, and of a replay."""

import json
import time

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.coordinator_messages import as_json
from swift_ft.tools import status
from swift_ft.tools import status as asking


def said(*, seconds_left: float | None = 3.24, replays: bool = True) -> pb.StatusReply:
    view = pb.View(
        job="j",
        state=pb.RECOVERING,
        generation=3,
        reason="rank 1 was killed by signal 9",
        waiting_for="ranks 0, 1 to be ready",
        members=[
            pb.Member(rank=0, pid=70, host="a01", id=1),
            pb.Member(rank=1, pid=81, host="a02", id=2),
        ],
        checkpoints=[0, 5],
        plan=pb.Plan(reason="target version 15: KEEP on rank 0; REPLAY on rank 1", target_version=15),
    )
    replay = pb.ReplayProgress(version=7, target=15, seconds_left=seconds_left) if replays else None
    ranks = [
        pb.RankStatus(rank=0, version=15, lease_age_s=0.25),
        pb.RankStatus(rank=1, version=7, lease_age_s=0.1, replay=replay),
    ]
    suspicion = pb.Suspicion(rank=0, reason="its neighbour is gone", age_s=2.0, told=True)
    return pb.StatusReply(view=view, ranks=ranks, suspicions=[suspicion])


def test_for_people() -> None:
    assert status.lines(said()) == [
        "job j: RECOVERING, generation 3",
        "because rank 1 was killed by signal 9",
        "waits for ranks 0, 1 to be ready",
        "plan: target version 15: KEEP on rank 0; REPLAY on rank 1",
        "not rehearsed",
        "newest checkpoint: version 5; goes on at step 15",
        "rank 0: process 70 on a01, version 15, heard 0.2 s ago",
        "rank 1: process 81 on a02, version 7, heard 0.1 s ago; replays: version 7 of 15, about 3.2 s left",
        "rank 0 said 2 s ago: its neighbour is gone",
    ]


def test_a_place_that_is_not_fit_is_named() -> None:
    told = said(replays=False)
    why = pb.Suspicion(rank=1, reason="exit code 1: ECC error", age_s=4.0, told=True, unfit=True)
    told.suspicions.append(why)
    assert status.lines(told)[-2:] == [
        "rank 0 said 2 s ago: its neighbour is gone",
        "rank 1: its place failed the health check 4 s ago (exit code 1: ECC error)",
    ]


def test_a_vacant_slot_is_named() -> None:
    told = said(replays=False)
    told.view.state = pb.FINISHED
    told.view.vacant.append(2)
    told.view.plan.Clear()
    lines = status.lines(told)
    assert "rank 2: its slot is vacant" in lines
    assert "newest checkpoint: version 5; started again with more steps it goes on at step 5" in lines


def test_a_spare_is_named() -> None:
    told = said(replays=False)
    told.view.vacant.append(told.ranks[0].rank)
    del told.view.members[0]
    lines = status.lines(told)
    assert "rank 0: its slot is vacant; its process is a spare" in lines
    assert not any(line.startswith("rank 0: process") for line in lines)


def test_nobody_listens_to_the_ranks_of_a_job_that_is_over() -> None:
    told = said(replays=False)
    told.view.state, told.view.reason, told.view.waiting_for = pb.FINISHED, "", ""
    assert status.lines(told)[3:5] == [
        "rank 0: was process 70 on a01, version 15",
        "rank 1: was process 81 on a02, version 7",
    ]


@pytest.mark.parametrize(
    ("state", "checkpoints", "words"),
    [
        (pb.RUNNING, [5, 10], "newest checkpoint: version 10"),
        (pb.FORMING, [], "no checkpoint is complete"),
        (pb.STOPPED, [], "no checkpoint is complete: started again it begins at step 0"),
        (pb.STOPPED, [5, 10], "newest checkpoint: version 10; started again it goes on at step 10"),
        (pb.FAILED, [0], "newest checkpoint: version 0; started again it goes on at step 0"),
        (
            pb.FINISHED,
            [20],
            "newest checkpoint: version 20; started again with more steps it goes on at step 20",
        ),
    ],
)
def test_from_which_step_a_job_goes_on(
    state: "pb.State.ValueType", checkpoints: list[int], words: str
) -> None:
    assert status.goes_on_words(pb.View(state=state, checkpoints=checkpoints)) == words


def test_with_whose_checkpoint_a_job_has_begun() -> None:
    view = pb.View(job="k", state=pb.RUNNING, from_job="j", from_version=10, checkpoints=[10])
    assert status.lines(pb.StatusReply(view=view))[1:] == [
        "not rehearsed",
        "began with version 10 of job j",
        "newest checkpoint: version 10",
    ]
    view = pb.View(job="k", state=pb.FAILED, from_job="j", from_version=10)
    assert status.goes_on_words(view) == (
        "no checkpoint is complete: started again it begins with a checkpoint of job j"
    )


def test_who_waits_for_a_rank_that_hangs_is_not_accused() -> None:
    """All ranks of a pipeline are as late as the one that hangs."""
    late = [pb.Suspicion(rank=rank, reason="its step has run for 41.0 s", age_s=11.0) for rank in (0, 1)]
    shown = status.lines(pb.StatusReply(view=pb.View(job="j", state=pb.RUNNING), suspicions=late))
    assert shown[-3:] == [
        "rank 0: its step has run for 41.0 s",
        "rank 1: its step has run for 41.0 s",
        "one of these hangs, or something that they all wait for",
    ]
    assert "suspect" not in "".join(shown)


def test_before_there_is_a_pace_and_without_a_replay() -> None:
    assert status.lines(said(seconds_left=None))[7].endswith("; replays: version 7 of 15, no pace yet")
    assert status.lines(said(replays=False))[7] == "rank 1: process 81 on a02, version 7, heard 0.1 s ago"


def test_for_programs() -> None:
    shown = json.loads(json.dumps(status.as_json(said())))
    assert shown["view"]["state"] == "RECOVERING"
    assert shown["ranks"][1]["replay"] == {"version": 7, "target": 15, "seconds_left": 3.24}
    assert shown["ranks"][0]["replay"] is None
    assert shown["ranks"][0]["rank"] == 0, "zero is a value"
    assert shown["view"]["generation"] == 3
    assert shown["view"]["inexact_since"] is None
    assert shown["view"]["log_servers"] == []
    member = {"rank": 1, "incarnation": "", "pid": 81, "host": "a02", "id": 2}
    assert shown["view"]["members"][1] == member


def test_every_field_of_every_message_is_there() -> None:
    view = pb.View(revoked={"a": "over"}, checkpoints=[5, 10], inexact_since=0)
    shown = as_json(view)
    assert set(shown) == {field.name for field in pb.View.DESCRIPTOR.fields}
    assert shown["revoked"] == {"a": "over"}
    assert (shown["checkpoints"], shown["inexact_since"], shown["final_version"]) == ([5, 10], 0, None)
    assert (shown["state"], shown["plan"]) == ("STATE_UNSPECIFIED", None)


def test_nobody_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 1.0)
    assert status.main(["--coordinator", "127.0.0.1:1", "--job", "j"]) == 3
    at_once, in_the_end = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:1 does not answer (Connection refused" in at_once
    assert "no answer from the coordinator at 127.0.0.1:1 within 1 s" in in_the_end
    assert status.main(["--coordinator", "127.0.0.1:1", "--job", "j", "--watch=-1"]) == 2


def summary(job: str, state: "pb.State.ValueType" = pb.RUNNING) -> pb.JobSummary:
    return pb.JobSummary(job=job, state=state, generation=1, world_size=2, live_ranks=2, version=3)


@pytest.mark.parametrize(
    ("jobs", "chosen"),
    [
        ([summary("a")], "a"),
        ([summary("a", pb.FAILED)], "a"),
        ([summary("a"), summary("b", pb.FINISHED)], "a"),
        ([summary("a"), summary("b")], None),
        ([summary("a", pb.STOPPED), summary("b", pb.FINISHED)], None),
        ([], None),
    ],
)
def test_the_only_job_needs_no_name(
    jobs: list[pb.JobSummary],
    chosen: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(client: CoordinatorClient, *, history: bool = False) -> pb.StatusReply:
        return pb.StatusReply(view=pb.View(job=client.job, state=pb.RUNNING))

    monkeypatch.setenv("SWIFT_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(CoordinatorClient, "jobs", lambda self: pb.JobsReply(jobs=jobs))
    monkeypatch.setattr(CoordinatorClient, "status", told)
    assert status.main([]) == 0
    listed = "\n".join(status.job_lines(pb.JobsReply(jobs=jobs)))
    shown = capsys.readouterr()
    assert shown.out.startswith(f"job {chosen}: RUNNING" if chosen else listed)
    for command in ("events", "logs"):
        assert status.main([], command) == (0 if chosen else 2)
        names = ", ".join(job.job for job in jobs)
        problem = f"name one of the jobs with --job: {names}" if names else "there are no jobs"
        assert capsys.readouterr().err == ("" if chosen else f"swift: {problem}\n")


def test_it_is_shown_again_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [pb.JobsReply(jobs=[summary("a")]), pb.JobsReply(jobs=[summary("a", pb.FINISHED)])]

    def told(client: CoordinatorClient) -> pb.JobsReply:
        if not answers:
            raise KeyboardInterrupt
        return answers.pop(0)

    monkeypatch.setattr(CoordinatorClient, "jobs", told)
    with pytest.raises(KeyboardInterrupt):
        status.main(["--coordinator=127.0.0.1:1", "--watch=0.001"], "jobs")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        *("state", "RUNNING"),
        *("state", "FINISHED"),
    ]


def test_a_history_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    reply = pb.StatusReply(view=pb.View(job="j", state=pb.STOPPED, generation=9))
    entry = pb.Entry
    first = [entry(state=pb.FENCING, at=1e9, reason="rank 1 was killed by signal 9")]
    rest = [entry(state=pb.PLANNING, at=1e9 + 0.03), entry(state=pb.RECOVERING, at=1e9 + 0.1)]
    reply.history.add(
        number=8, entries=[*first, *rest, entry(state=pb.RUNNING, at=1e9 + 7200)], plan="all KEEP"
    )
    over = entry(state=pb.STOPPED, at=1e9 + 7402, reason="its launcher was told to stop")
    reply.history.add(
        number=9, entries=[entry(state=pb.FENCING, at=1e9 + 7400, reason="rank 0 exited"), over]
    )
    assert status.event_lines(reply) == [
        "job j: STOPPED, generation 9",
        "generations before 8 are no longer known",
        "generation 8, 2001-09-09 01:46:40+00:00: rank 1 was killed by signal 9",
        "  plan: all KEEP",
        "  FENCING, PLANNING after 0.03 s, RECOVERING after 0.1 s, RUNNING after 2 h",
        "generation 9, 2001-09-09 03:50:00+00:00: rank 0 exited",
        "  FENCING, STOPPED after 2 s",
        "  its launcher was told to stop",
    ]

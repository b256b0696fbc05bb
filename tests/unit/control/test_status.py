"""`swift-ft status`: what an operator sees of a job, and of a replay."""

import json

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.control import asking, status


def said(*, seconds_left: float | None = 3.24, replays: bool = True) -> pb.StatusReply:
    view = pb.View(
        job="j",
        state=pb.RECOVERING,
        generation=3,
        reason="rank 1 was killed by signal 9",
        waiting_for="ranks 0, 1 to be ready",
        plan=pb.Plan(reason="target version 15: KEEP on rank 0; REPLAY on rank 1"),
    )
    replay = pb.ReplayProgress(version=7, target=15, seconds_left=seconds_left) if replays else None
    ranks = [
        pb.RankStatus(rank=0, version=15, lease_age_s=0.25),
        pb.RankStatus(rank=1, version=7, lease_age_s=0.1, replay=replay),
    ]
    suspicion = pb.Suspicion(rank=0, reason="its neighbour is gone", age_s=2.0)
    return pb.StatusReply(view=view, ranks=ranks, suspicions=[suspicion])


def test_for_people() -> None:
    assert status.lines(said()) == [
        "job j: RECOVERING, generation 3",
        "because rank 1 was killed by signal 9",
        "waits for ranks 0, 1 to be ready",
        "plan: target version 15: KEEP on rank 0; REPLAY on rank 1",
        "rank 0: version 15, heard 0.2 s ago",
        "rank 1: version 7, heard 0.1 s ago; replays: version 7 of 15, about 3.2 s left",
        "rank 0 is suspected: its neighbour is gone",
    ]


def test_before_there_is_a_pace_and_without_a_replay() -> None:
    assert status.lines(said(seconds_left=None))[5].endswith("; replays: version 7 of 15, no pace yet")
    assert status.lines(said(replays=False))[5] == "rank 1: version 7, heard 0.1 s ago"


def test_for_programs() -> None:
    shown = json.loads(json.dumps(status.as_json(said())))
    assert shown["view"]["state"] == "RECOVERING"
    assert shown["ranks"][1]["replay"] == {"version": "7", "target": "15", "seconds_left": 3.24}


def test_nobody_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 1.0)
    assert status.main(["--coordinator", "127.0.0.1:1", "--job", "j"]) == 3
    at_once, in_the_end = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:1 does not answer (Connection refused" in at_once
    assert "no answer from the coordinator at 127.0.0.1:1 within 1 s" in in_the_end
    assert status.main(["--coordinator", "127.0.0.1:1"]) == 2

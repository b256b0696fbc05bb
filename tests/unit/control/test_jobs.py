"""`swift-ft jobs`: the list, for people and for programs."""

import json

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.tools import status

RUNS = pb.JobSummary(
    job="run42",
    state=pb.RUNNING,
    generation=12,
    world_size=4,
    live_ranks=4,
    version=1210,
    checkpoint=1200,
)
FAILED = pb.JobSummary(
    job="a",
    state=pb.FAILED,
    generation=1,
    world_size=16,
    reason="rank 3: no memory",
    inexact_since=7,
)


def test_for_people() -> None:
    assert status.job_lines(pb.JobsReply(jobs=[RUNS, FAILED], left_out=2)) == [
        "job    state    generation  ranks  version  checkpoint",
        "run42  RUNNING  12          4/4    1210     1200",
        "a      FAILED   1           0/16   0        -           not exact since version 7; rank 3: no memory",
        "and 2 more",
    ]
    assert status.job_lines(pb.JobsReply()) == ["no jobs"]


def test_for_programs_and_without_a_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(CoordinatorClient, "jobs", lambda self: pb.JobsReply(jobs=[FAILED]))
    assert status.main(["--json"], "jobs") == 0
    (shown,) = json.loads(capsys.readouterr().out)["jobs"]
    assert shown["live_ranks"] == 0
    assert shown["checkpoint"] is None
    assert shown["inexact_since"] == 7

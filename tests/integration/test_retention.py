"""A log that runs full makes all ranks save a checkpoint that no interval asks for, and is trimmed by it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_ft import events
from swift_ft.lab.drill.cluster import LOG_SERVER
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import TRAINERS, until_over

STEPS, PAUSE_S, KILLED_AT = 240, 0.04, 200
QUOTA = 3_000_000


class QuotaCluster(ForkedCluster):
    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        # Half of it is for what is logged until the checkpoint is complete, however slow the machine is.
        quota = ["--job-quota-bytes", str(QUOTA), "--high-water", "0.5", "--low-water", "0.4"]
        quota = quota if name == LOG_SERVER else []
        super()._spawn(name, [*arguments, *quota])


@pytest.mark.timeout(240)
def test_a_quota_makes_early_checkpoints_and_the_run_never_waits_for_it(tmp_path: Path) -> None:
    fault = {"id": "f0", "rank": 1, "step": KILLED_AT, "microbatch": 0, "phase": "forward", "hold": True}
    with QuotaCluster(
        tmp_path,
        ranks=2,
        spares=1,
        trainer=[str(TRAINERS / "long_interval.py")],
        trainer_arguments=[str(STEPS), str(PAUSE_S), str(tmp_path / "haste")],
        faults=json.dumps([fault]),
    ) as cluster:
        until_over(cluster, held=["f0"], saved=1)  # the loss comes when one of them is complete
    trace = events.read(tmp_path / "events")
    asked = [event for event in trace if event["event"] == "checkpoint_asked"]
    assert "job drill keeps" in asked[0]["reason"]
    complete = [event["version"] for event in trace if event["event"] == "checkpoint_complete"]
    assert complete[0] == 0
    assert len(complete) > 2
    assert complete.pop() == STEPS  # the end is saved as well
    assert set(complete[1:]) <= {event["version"] for event in asked}
    trimmed = [event["below_step"] for event in trace if event["event"] == "trimmed"]
    assert set(trimmed) <= {*complete, STEPS}
    alarms = [event["alarm"] for event in trace if event["event"] == "space_alarm"]
    assert "HIGH" in alarms
    assert "FULL" not in alarms
    # What was lost is replayed from such a checkpoint, not from the beginning.
    (plan,) = [event for event in trace if event["event"] == "plan"]
    (replayed,) = [rank for rank in plan["ranks"] if rank["strategy"] == "REPLAY"]
    assert replayed["from_version"] in complete[1:]
    (replay,) = [event for event in trace if event["event"] == "replay_end"]
    assert 0 < replay["steps"] < KILLED_AT

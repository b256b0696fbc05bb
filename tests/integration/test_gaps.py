"""A rank dies with records that only its ring had, and is copied from a replica: nobody makes these steps again.

What takes its place says in the streams which steps they lack, and from then on nobody replays them.
"""

import os
import signal
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import JOB
from swift_ft.log import admin
from tests.integration import watched
from tests.integration.forked import Forks

pytestmark = pytest.mark.timeout(240)

STEPS, PAUSE_S, BEHIND_FROM, BEHIND = 120, 0.05, 10, 4
A_STEP = {"s0c0.F": 2, "s0c0.X": 2, "r0.C": 1}
"""Records of rank 0: what it sends, its inputs, and the norm of all gradients."""
_AT_ONCE_S = 20.0
"""From the plan that reads the log to the one that does not: far less than a record is waited for."""


class Run(watched.Run):
    def __init__(self, directory: Path, *more: str) -> None:
        super().__init__(directory, "lagging.py", STEPS, PAUSE_S, *more, ranks=4, spares=3)

    def sidecar(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.said("sidecar_started", name=f"rank{rank}")[-1]["sidecar_pid"], number)

    def ended(self, step: int) -> bool:
        return len({event["rank"] for event in self.said("step_end", step=step)}) == self.ranks

    def resumed(self) -> bool:
        newest = max((event["generation"] for event in self.said("plan")), default=0)
        return len(self.said("resumed", generation=newest)) == self.ranks

    def has_sent(self, step: int) -> bool:
        """The log has all records of rank 0 up to this step."""
        (address,) = self.cluster.log_addresses
        found = {stream.stream: stream.records for stream in admin.inventory(address, JOB, 10.0)}
        return all(found.get(stream, 0) >= count * (step + 1) for stream, count in A_STEP.items())


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> list[watched.Digests]:
    place = tmp_path_factory.mktemp("twin")
    return watched.undisturbed(forks, place, "lagging.py", STEPS, ranks=4)


def lose_records(run: Run) -> int:
    """Rank 0 and what sends for it are killed, some steps behind. The version that its successor is a copy of."""
    run.until(lambda: run.ended(BEHIND_FROM) and run.has_sent(BEHIND_FROM))
    run.sidecar(0, signal.SIGSTOP)
    run.look()
    stopped_at = max(event["step"] for event in run.said("step_begin", rank=0))
    run.until(lambda: run.ended(stopped_at + BEHIND))
    run.kill(0)
    run.sidecar(0, signal.SIGKILL)
    run.until(run.resumed)
    (copied,) = run.said("plan")
    assert copied["ranks"][0]["strategy"] == "REPLICA"
    (gap,) = run.said("gap_declared", rank=0)
    assert BEHIND_FROM < gap["first_step"] < gap["last_step"] == copied["target_version"] - 1
    assert "s0c0.F" in gap["streams"]
    return int(copied["target_version"])


def test_steps_that_died_with_a_rank_and_its_sidecar_are_declared_and_not_waited_for(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    run = Run(tmp_path, "second")  # so that the checkpoint which this forces is not there yet
    with run.cluster:
        lost = lose_records(run)
        run.until(lambda: run.ended(lost) and run.said("resting"))
        assert [event["version"] for event in run.said("checkpoint_complete")] == [0]
        run.kill(2, 3)
        run.end()
    *_, last = run.said("plan")
    assert {rank["strategy"] for rank in last["ranks"]} == {"CHECKPOINT"}, last["reason"]
    assert "records of s0c0.F" in last["reason"]
    assert "are declared unlogged" in last["reason"]
    dead = run.said("member_exited", rank=2)[0]["t"]
    assert run.said("resumed", rank=0)[-1]["t"] - dead < _AT_ONCE_S
    assert not run.said("refused"), "nobody has even tried"
    assert run.digests() == twin


def test_behind_the_checkpoint_that_this_forces_a_loss_is_replayed(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    run = Run(tmp_path)
    with run.cluster:
        lost = lose_records(run)
        run.until(lambda: run.said("checkpoint_complete")[-1]["version"] > lost)
        base = run.said("checkpoint_complete")[-1]["version"]
        run.until(lambda: run.ended(base + 5))
        run.kill(2, 3)
        run.end()
    # The second loss may catch rank 0 in a step that its replica then finishes: that forces one more checkpoint.
    first, *later = run.said("checkpoint_asked")
    assert "was copied, and its streams lack records of step" in first["reason"]
    second_loss = run.said("member_exited", rank=2)[0]["t"]
    assert first["t"] < second_loss
    assert all(asked["t"] > second_loss for asked in later)
    assert len(later) <= len([gap for gap in run.said("gap_declared") if gap["t"] > second_loss])
    *_, last = run.said("plan")
    assert [rank["from_version"] for rank in last["ranks"][2:]] == [base, base], last["reason"]
    assert {rank["strategy"] for rank in last["ranks"][2:]} == {"REPLAY"}
    assert run.digests() == twin

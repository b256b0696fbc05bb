"""log_when_full="drop": a log server stands still, training does not; what came of it is never replayed over."""

import signal
from pathlib import Path

import pytest

from tests.integration import watched
from tests.integration.forked import Forks

pytestmark = pytest.mark.timeout(240)

STEPS, PAUSE_S, STOPPED_AT = 260, 0.1, 15
"""The queue holds 4 steps: a short stall of the disk must not fill it."""
MEANWHILE = 10
"""Steps that each rank does while the log server stands still and its queue is full."""


class Run(watched.Run):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "long_interval.py", STEPS, PAUSE_S, "drop", ranks=2, spares=1)

    def stop_log_server(self) -> None:
        """Until each rank has dropped something."""
        self.until(lambda: len(self.said("step_end", step=STOPPED_AT)) == 2)
        self.signal_log_server(signal.SIGSTOP)
        self.until(lambda: {event["rank"] for event in self.said("unlogged")} == {0, 1})


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> list[watched.Digests]:
    place = tmp_path_factory.mktemp("twin")
    return watched.undisturbed(forks, place, "long_interval.py", STEPS, "drop", ranks=2)


def test_training_goes_on_and_after_the_forced_checkpoint_a_loss_is_replayed(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    run = Run(tmp_path)
    with run.cluster:
        run.stop_log_server()
        full_at = {event["rank"]: event["last_step"] for event in run.said("unlogged")}
        run.until(lambda: all(run.said("step_end", rank=r, step=full_at[r] + MEANWHILE) for r in (0, 1)))
        # A checkpoint is forced, although nothing is logged yet.
        run.until(lambda: len(run.said("checkpoint_complete")) > 1)
        run.signal_log_server(signal.SIGCONT)

        def covered() -> bool:
            """Steps are logged whole again, and there is a checkpoint behind all that was dropped."""
            newest = max(event["version"] for event in run.said("checkpoint_complete"))
            last = max(event["last_step"] for event in run.said("unlogged"))
            return newest > last and len(run.said("step_end", step=last + 5)) == 2

        run.until(covered)
        base = max(event["version"] for event in run.said("checkpoint_complete"))
        run.until(lambda: run.said("step_end", step=base + 5, rank=1))
        run.kill(1)
        run.end()
    asked = run.said("checkpoint_asked")
    assert asked
    assert all("were dropped, as the log could not keep up" in event["reason"] for event in asked)
    (plan,) = run.said("plan")
    replayed = {rank["rank"]: rank["from_version"] for rank in plan["ranks"] if rank["strategy"] == "REPLAY"}
    assert replayed.keys() == {1}, plan["reason"]
    assert replayed[1] >= base
    (replay,) = run.said("replay_end")
    assert replay["steps"] >= 5
    assert replay["verified"] > 0
    assert run.digests() == twin


def test_a_loss_before_that_checkpoint_falls_back_and_says_why(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    run = Run(tmp_path)
    with run.cluster:
        run.stop_log_server()
        run.kill(1)
        run.until(lambda: run.said("fenced", rank=1))
        assert [event["version"] for event in run.said("checkpoint_complete")] == [0]
        run.signal_log_server(signal.SIGCONT)
        run.end()
    (plan,) = run.said("plan")
    assert {rank["strategy"] for rank in plan["ranks"]} == {"CHECKPOINT"}
    assert plan["target_version"] == 0
    assert "are declared unlogged: dropped" in plan["reason"]
    assert "as the log could not keep up" in plan["reason"]
    assert run.digests() == twin

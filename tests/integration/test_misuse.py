"""A trainer's mistake is one clear line with the right exit code, and nothing is left running."""

from pathlib import Path

import pytest

from tests.integration.forked import CalmCluster, ForkedCluster, Forks
from tests.patience import eventually

TRAINER = [str(Path(__file__).parent / "trainers" / "misuse.py")]
PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("mistake", "code", "line"),
    [
        ("another-seed", 2, "seed"),
        ("error-in-step", 1, 'KeyError: "the trainer\'s own mistake"'),
    ],
)
def test_a_mistake_is_named_and_ends_the_job(mistake: str, code: int, line: str, tmp_path: Path) -> None:
    """One rank makes it, or all do, or it is none that we know."""
    with ForkedCluster(tmp_path, ranks=2, spares=0, trainer=TRAINER, trainer_arguments=[mistake]) as cluster:
        eventually(lambda: cluster.poll() is not None, cluster.output_tail, PATIENCE_S)
        output = (tmp_path / "output" / "launcher.txt").read_text()
        assert cluster.poll() == code, output
        assert output.count(line) >= 1
        if code == 2:
            assert output.count("\n") == 1, output
        assert ("Traceback" in output) == (code == 1), output
    assert cluster.strays() == []


@pytest.mark.parametrize(
    ("mistake", "ranks", "line"),
    [
        ("forgot-register", 2, "the schedule is not registered: call session.register"),
        ("loader-without-state", 2, "without state_dict()"),
        ("another-thread-count", 1, "threads"),
        ("checkpoint-every-0", 2, "checkpoint_every=0; give at least 1"),
        ("groups-of-another-pipeline", 2, "groups 0-2 are of 3 stages, the pipeline has 2"),
    ],
)
def test_a_mistake_is_named(mistake: str, ranks: int, line: str, forks: Forks, tmp_path: Path) -> None:
    """By one of the `ranks` that make it, all of which end with what makes the launcher end the job."""
    with CalmCluster(forks, tmp_path, ranks=2, trainer=TRAINER, trainer_arguments=[mistake]) as cluster:
        eventually(lambda: len(cluster.exit_codes()) >= ranks, cluster.output_tail, PATIENCE_S)
        assert cluster.exit_codes() == [2] * ranks, cluster.output_tail()
        output = (tmp_path / "output" / "ranks.txt").read_text()
        assert output.count(line) >= 1, output
        assert output.count("\n") == 1, output

"""A trainer's mistake is one clear line with the right exit code, and nothing is left running."""

import time
from pathlib import Path

import pytest

from swift.drill.cluster import Cluster

TRAINER = Path(__file__).parent / "trainers" / "misuse.py"


@pytest.mark.parametrize(
    ("mistake", "code", "line"),
    [
        ("forgot-register", 2, "the schedule is not registered: call session.register"),
        ("loader-without-state", 2, "without state_dict()"),
        ("another-seed", 2, "seed"),
        ("another-thread-count", 2, "threads"),
        ("checkpoint-every-0", 2, "checkpoint_every=0; give at least 1"),
        ("groups-of-another-pipeline", 2, "groups 0-2 are of 3 stages, the pipeline has 2"),
        ("collective-after-update", 2, "comes after optimizer.step()"),
        ("no-update", 2, "without optimizer.step()"),
        ("error-in-step", 1, 'KeyError: "the trainer\'s own mistake"'),
    ],
)
def test_a_mistake_is_named(mistake: str, code: int, line: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=2, spares=0, trainer=[str(TRAINER)], trainer_arguments=[mistake]) as cluster:
        deadline = time.monotonic() + 60
        while (exit_code := cluster.poll()) is None:
            assert time.monotonic() < deadline, cluster.output_tail()
            time.sleep(0.02)
        output = (tmp_path / "output" / "launcher.txt").read_text()
        assert exit_code == code, output
        assert output.count(line) >= 1
        if code == 2:
            assert output.count("\n") == 1, output
        assert ("Traceback" in output) == (code == 1), output
    assert cluster.strays() == []

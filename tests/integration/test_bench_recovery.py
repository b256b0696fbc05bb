"""`swift-ft bench recovery` with real processes: a replica dies under torchrun, and under swift's strategies."""

import json
from pathlib import Path

import pytest

from swift.bench.command import main


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("system", "again", "replaced"), [("torchrun", 2, 2), ("swift", 0, 1), ("swift-reinit", 2, 1)]
)
def test_it_runs(system: str, again: int, replaced: int, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = [
        "--system",
        system,
        "--kills",
        "1",
        "--steps",
        "15",
        "--checkpoint-every",
        "5",
        "--seed",
        "7",
    ]
    assert main(["recovery", *words, "--json", str(path), "--plot", str(tmp_path / "found.svg")]) == 0
    (found,) = json.loads(path.read_text())["cases"]
    assert (found["steps_again"], found["restarted"], found["same_bits"]) == (again, replaced, True)
    assert found["next_step_s"] <= found["all_again_s"]

"""Steps with several updates, and with more to do behind the last one: trainers/several.py.

Rank 1 dies at every place of them. Nobody restores a checkpoint: the survivor takes its step back, or holds it, and the
replacement copies it.
"""

from pathlib import Path

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import run_trainer, undisturbed

STEPS = 7
CASES = [
    ("gan", "3:between"),
    ("gan", "3:second backward"),
    ("gan", "0:between"),
    ("gan", "4:end"),
    ("validate", "4:update"),
    ("validate", "4:validated"),
]
QUICK = {("validate", "4:update")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "place"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES],
)
def test_a_step_that_is_cut_short_anywhere_is_taken_back(
    kind: str, place: str, forks: Forks, tmp_path: Path
) -> None:
    twin = undisturbed(forks, tmp_path / "twin", "several.py", kind, STEPS, ranks=2)
    run = run_trainer(tmp_path / "run", "several.py", kind, STEPS, place, ranks=2, faults=[], spares=1)
    (plan,) = [e for e in run["events"] if e["event"] == "plan"]
    ways = {entry["rank"]: entry["strategy"] for entry in plan["ranks"]}
    assert ways[1] == "REPLICA", plan["reason"]
    assert ways[0] in ("KEEP", "ROLL_FORWARD", "UNDO"), plan["reason"]
    assert plan["exact"]
    for rank in (0, 1):
        name = f"rank{rank}-v{STEPS}.json"
        assert twin["digests"][name]["parameters"] == twin["digests"][f"rank0-v{STEPS}.json"]["parameters"]
        assert run["digests"][name] == twin["digests"][name]
    for name, digests in run["digests"].items():  # of every version, and at the recovery
        assert digests == twin["digests"][name.removesuffix(".json").split("-g")[0] + ".json"], name

"""Jobs of `trainers/shrinking.py`, whose replicas go on without a lost rank, and what their bits must be."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.forked import shared
from tests.integration.trainer_world import TRAINERS, Run, named, run_trainer

STEPS, RANKS, LOST = 14, 3, 1


def shrinking(lost_shard: str, max_restarts: int = 0, strategy: str = "shrink") -> dict[str, str]:
    """Settings of the job."""
    return {
        "SWIFT_STRATEGY": strategy,
        "SWIFT_LOST_SHARD": lost_shard,
        "SWIFT_ALLOW_INEXACT": "1" if lost_shard == "drop" else "",
        "PET_MAX_RESTARTS": str(max_restarts),
    }


def run(
    directory: Path,
    lost_shard: str,
    faults: list[dict[str, Any]],
    max_restarts: int = 0,
    habit: str = "asks",
    strategy: str = "shrink",
) -> Run:
    settings = shrinking(lost_shard, max_restarts, strategy)
    words = ("shrinking.py", "session", STEPS, habit)
    run = run_trainer(directory / "job", *words, ranks=RANKS, faults=faults, settings=settings)
    assert [e["event"] for e in run["events"]].count("fault") == len(faults)
    return run


@functools.cache
def reference(*lost: str) -> dict[str, str]:
    """Step -> digest. `lost`: STEP:ORIGIN, or a file that says of what the buckets of a step were made."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "reference.json")
        made = shared().run(TRAINERS / "shrinking.py", ["reference", STEPS, out, *lost], {})
        assert made.wait(120.0) == 0
        bits: dict[str, str] = json.loads(out.read_text())
        return bits


def pids(run: Run, rank: int) -> set[int]:
    return {e["pid"] for e in named(run, "step_end") if e["rank"] == rank}


def last_bits(run: Run, rank: int, wanted: dict[str, str]) -> bool:
    """Of all steps that the rank has done in its last process."""
    bits: dict[str, str] = run["digests"][f"bits-{rank}.json"]
    assert str(STEPS - 1) in bits
    return bits.items() <= wanted.items()

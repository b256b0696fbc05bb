"""The strategy "reinit" with trainers of strangers (trainers/begins_again.py): real processes, real SIGKILL."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, named, run_trainer, undisturbed

STEPS, RANKS, EVERY = 11, 2, 4


def run(directory: Path, mode: str, *faults: dict[str, Any]) -> Run:
    return run_trainer(directory, "begins_again.py", mode, STEPS, ranks=RANKS, faults=list(faults))


def imports(directory: Path) -> list[int]:
    """How often each process has run the script, in the order of the counts."""
    return sorted(path.stat().st_size for path in (directory / "digests").glob("imports-*"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "phases", "counts"),
    [("decorated", ("optimizer",), [1, 1, 1]), ("script", ("reduce", "idle"), [1, 1, 2, 2])],
)
def test_it_ends_with_the_same_bits_in_the_same_processes(
    mode: str, phases: tuple[str, ...], counts: list[int], forks: Forks, tmp_path: Path
) -> None:
    twin = undisturbed(forks, tmp_path / "twin", "begins_again.py", mode, STEPS, ranks=RANKS)
    faults = [
        {"rank": rank, "step": 6 + rank, "phase": phase} for rank, phase in reversed(list(enumerate(phases)))
    ]
    found = run(tmp_path / "lost", mode, *faults)

    assert len(named(found, "fault")) == len(faults)
    assert not named(found, "not_exact")
    for rank in range(RANKS):
        bits, wanted = (each["digests"][f"bits-{rank}.json"] for each in (found, twin))
        assert str(STEPS - 1) in bits
        assert bits.items() <= wanted.items()
    assert imports(tmp_path / "lost") == counts, "a process more for each loss"
    assert len(named(found, "reinit")) == len(faults), "one survivor each time"

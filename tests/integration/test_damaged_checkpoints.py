"""The newest checkpoint is damaged: all ranks go back to the one before, say why, and end with every bit.

Each kind of damage (`tests.unit.checkpoint.damage`) in turn, in one job: while it runs, and where it is started again.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import JOB
from tests.integration.again_world import Again
from tests.unit.checkpoint.damage import DAMAGES

MATRIX = pytest.mark.matrix
EVERY = 2
ROUND = 2 * EVERY
RESTORES = ["--strategy", "checkpoint", "--max-restarts", "100"]
FEW = ("bit in the tensors", "no folder of the rank", "newer and empty")

# A limit on the function would count before one of these.
kinds_in_turn = pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(FEW, marks=pytest.mark.timeout(300)),
        pytest.param(tuple(DAMAGES), marks=[MATRIX, pytest.mark.timeout(900)]),
    ],
    ids=["few", "all"],
)


def newest(step: int) -> int:
    """The checkpoint before this step."""
    return step - step % EVERY


def lost_at(number: int) -> int:
    """The step in which this loss comes: there are two checkpoints by then."""
    return ROUND * (number + 1) + 1


def damage(job: Again, kind: str, version: int, rank: int) -> None:
    folder = job.directory / "checkpoints" / JOB / f"v{version:08d}" / f"rank{rank}"
    DAMAGES[kind][0](folder)


@contextmanager
def damaging(job: Again, kinds: Sequence[str]) -> Iterator[None]:
    """Before each victim dies."""
    over = threading.Event()

    def damages() -> None:
        for number, kind in enumerate(kinds):
            step = lost_at(number)
            while not (job.directory / f"there{step}").exists():
                if over.wait(0.01):
                    return
            damage(job, kind, newest(step), number % 2)
            (job.directory / f"die{step}").touch()

    thread = threading.Thread(target=damages)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def whole(steps: int, directory: Path) -> list[dict[str, object]]:
    """The digests at the end of a run in which nothing happens."""
    with Again(directory) as job:
        assert job.unlucky(steps, every=EVERY) == 0, job.said
        return job.digests(steps)


def check(job: Again, kinds: Sequence[str]) -> None:
    """Of each damage: who refused the checkpoint and why, and where all went on."""
    refused = [(event["rank"], event["reason"]) for event in job.events("refused")]
    assert len(refused) == len(kinds), refused
    for number, (kind, (rank, reason)) in enumerate(zip(kinds, refused, strict=True)):
        assert rank == number % 2, kind
        assert re.search(DAMAGES[kind][1], reason), (kind, reason)
        assert f"v{newest(lost_at(number)):08d}/rank{rank}" in reason
    reached = [event["target_version"] for event in job.events("plan")]
    tried = [newest(lost_at(number)) for number in range(len(kinds))]
    assert reached == [version for newer in tried for version in (newer, newer - EVERY)]


@kinds_in_turn
def test_in_a_job_that_runs(kinds: Sequence[str], tmp_path: Path) -> None:
    steps = lost_at(len(kinds))
    mishaps = [{"rank": 1, "step": lost_at(n), "what": "die when told"} for n in range(len(kinds))]
    with Again(tmp_path / "damaged") as job, damaging(job, kinds):
        assert job.unlucky(steps, *mishaps, every=EVERY, flags=RESTORES) == 0, job.said
        check(job, kinds)
        for number in range(len(kinds)):
            before = newest(lost_at(number)) - EVERY
            assert re.search(
                rf"checkpoint refused: rank {number % 2}: .*; restored version {before}; exact", job.said
            )
        assert job.digests(steps) == whole(steps, tmp_path / "whole")


@pytest.mark.matrix
@kinds_in_turn
def test_where_a_job_is_started_again(kinds: Sequence[str], tmp_path: Path) -> None:
    steps = lost_at(len(kinds))
    mishaps = [{"rank": 1, "step": lost_at(n), "what": "raise when saved"} for n in range(len(kinds))]
    with Again(tmp_path / "damaged") as job:
        for number, kind in enumerate(kinds):
            assert job.unlucky(steps, *mishaps, every=EVERY) == 1, job.said
            damage(job, kind, newest(lost_at(number)), number % 2)
        assert job.unlucky(steps, *mishaps, every=EVERY) == 0, job.said
        check(job, kinds)
        assert job.digests(steps) == whole(steps, tmp_path / "whole")


def test_what_is_done_again_is_logged_and_can_be_replayed(tmp_path: Path) -> None:
    """The log was trimmed for the checkpoint that is damaged: it takes the steps before that one again."""
    lost = lost_at(0)
    # Both in the backward: by then the other rank has ended the step before.
    dies_again = {"rank": 0, "step": lost - EVERY, "at": "backward", "what": "kill", "behind": 0}
    mishaps = [{"rank": 0, "step": lost, "at": "backward", "what": "die when told"}, dies_again]
    with Again(tmp_path / "damaged") as job, damaging(job, FEW[:1]):
        assert job.unlucky(lost + 1, *mishaps, every=EVERY) == 0, job.said
        plans = [(event["target_version"], event["ranks"][0]["strategy"]) for event in job.events("plan")]
        newer, older = newest(lost), newest(lost) - EVERY
        assert plans == [
            (lost, "REPLAY"),
            (newer, "CHECKPOINT"),
            (older, "CHECKPOINT"),
            (lost - EVERY, "REPLAY"),
        ]
        assert job.events("plan")[-1]["ranks"][0]["from_version"] == older
        assert job.digests(lost + 1) == whole(lost + 1, tmp_path / "whole")

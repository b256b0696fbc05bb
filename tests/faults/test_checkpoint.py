"""Fault 43: ranks of a real job cannot write their checkpoints: a file is in the way of their folder."""

import shutil
from pathlib import Path

import pytest

from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.lab.drill.cluster import COORDINATOR, JOB
from swift_ft.tools import status
from tests.integration import watched
from tests.integration.forked import Forks
from tests.integration.trainer_world import run_trainer

STEPS, PAUSE_S, EVERY = 300, 0.04, 10
TRAINER = "long_interval.py"


class Run(watched.Run):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, TRAINER, STEPS, PAUSE_S, str(EVERY), ranks=2, spares=2)
        self.folder = directory / "checkpoints" / JOB

    def complete(self) -> list[int]:
        return [event["version"] for event in self.said("checkpoint_complete")]

    def failed(self, rank: int) -> list[int]:
        return [event["version"] for event in self.said("checkpoint_failed", rank=rank)]

    def until_trained(self, version: int) -> None:
        self.until(lambda: {e["rank"] for e in self.said("step_end", step=version)} == {0, 1})

    def status(self) -> list[str]:
        client = CoordinatorClient(self.cluster._addresses[COORDINATOR], JOB, patience_s=10.0)
        try:
            return status.lines(client.status())
        finally:
            client.close()

    def replayed_from(self) -> list[dict[int, int]]:
        return [
            {rank["rank"]: rank["from_version"] for rank in plan["ranks"] if rank["strategy"] == "REPLAY"}
            for plan in self.said("plan")
        ]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> list[watched.Digests]:
    place = tmp_path_factory.mktemp("twin")
    return watched.undisturbed(forks, place, TRAINER, STEPS, str(EVERY), ranks=2)


def become_a_file(folder: Path, away: Path) -> None:
    """Where it was nothing can be made. A rank may make it anew in between."""
    folder.rename(away)
    while True:
        try:
            folder.open("x").close()
            return
        except FileExistsError:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(240)
def test_f43_training_goes_on_while_no_checkpoint_can_be_written_and_a_later_loss_is_replayed(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    run, away = Run(tmp_path), tmp_path / "away"
    with run.cluster:
        run.until(lambda: len(run.complete()) > 1)
        become_a_file(run.folder, away)
        run.until(lambda: all(len(run.failed(rank)) > 1 for rank in (0, 1)))
        stood = run.complete()[-1]
        run.until(lambda: {e["rank"] for e in run.said("checkpoint_unsaved")} == {0, 1})
        run.until_trained(max(run.failed(0)) + 2)
        assert run.complete()[-1] == stood
        shown = run.status()
        assert all(event["below_step"] <= stood for event in run.said("trimmed"))
        run.folder.unlink()
        away.rename(run.folder)
        run.until(lambda: run.complete()[-1] > stood)
        base = run.complete()[-1]
        run.until_trained(base + 3)
        run.kill(1)
        run.end()
    for rank in (0, 1):
        (line,) = [line for line in shown if line.startswith(f"rank {rank}: ")]
        assert f"the one of version {stood} stands" in line
        assert "Not a directory" in line
    (replayed,) = run.replayed_from()
    assert replayed.keys() == {1}
    assert replayed[1] >= base
    assert run.digests() == twin
    assert list(run.folder.glob("v*/.rank*")) == []


@pytest.mark.timeout(240)
def test_f43_a_loss_meanwhile_is_replayed_from_the_older_one_and_what_others_have_written_goes(
    tmp_path: Path, twin: list[watched.Digests]
) -> None:
    """Rank 1 alone cannot write 20 and 30, nor any later one until it has died; the log has to reach back to 10."""
    run = Run(tmp_path)
    blocked = [run.folder / f"v{version:08d}" / "rank1" for version in range(20, STEPS + 1, EVERY)]
    for file in blocked:
        file.parent.mkdir(parents=True)
        file.write_text("in the way")
    with run.cluster:
        run.until(lambda: 30 in run.failed(1) and run.said("checkpoints_given_up"))
        run.until(lambda: not (run.folder / "v00000020" / "rank0").exists())
        run.kill(1)
        run.until(lambda: run.said("plan"))
        for file in blocked[2:]:
            file.unlink(missing_ok=True)
        run.until(lambda: run.complete()[-1] > 30)
        run.end()
    assert run.replayed_from() == [{1: 10}]
    assert run.failed(1)[:2] == [20, 30]
    assert not {20, 30} & set(run.complete())
    assert (run.folder / "v00000030" / "rank0").is_dir() is False, "older than what is kept"
    assert run.digests() == twin


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", ["rank 1", "all"])
def test_f43_no_job_begins_without_its_first_checkpoint(tmp_path: Path, block: str) -> None:
    folder = tmp_path / "checkpoints" / JOB
    if block == "all":
        folder.parent.mkdir()
        folder.write_text("in the way")
    else:
        (folder / "v00000000").mkdir(parents=True)
        (folder / "v00000000" / "rank1").write_text("in the way")
    says = "name one you can write" if block == "all" else "no job begins without"
    run = run_trainer(tmp_path, TRAINER, 5, 0, "", EVERY, ranks=2, faults=[], code_wanted=2)
    lines = [line for line in run["output"].splitlines() if line.strip()]
    assert any(says in line for line in lines), run["output"]
    assert not any("Traceback" in line for line in lines), run["output"]
    assert not [event for event in run["events"] if event["event"] == "step_begin"]

"""A coordinator that has lost its state: the job goes on from its own checkpoints, every bit compared."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import COORDINATOR, JOB, LAUNCHER
from swift_ft.state.checkpoint_place import MARK
from tests.integration.again_world import Again

pytestmark = pytest.mark.timeout(240)
STEPS = 16
KILL = {"rank": 1, "step": 12, "at": "backward", "what": "kill"}
SLOW = {"rank": 0, "what": "slow", "times": 1000}


def lose_coordinator(job: Again) -> None:
    """Kills the coordinator and starts one with an empty directory at its address."""
    coordinator = job._processes[COORDINATOR]
    coordinator.kill()
    while coordinator.poll() is None:
        pass
    shutil.rmtree(job.directory / COORDINATOR)
    (job.directory / f"{COORDINATOR}.address").unlink()
    job._start_service(COORDINATOR)
    job._await_service(COORDINATOR)


def die_once_complete(job: Again, version: int) -> None:
    """Runs the job until this version is marked, and then kills all of its processes."""
    mark = job.directory / "checkpoints" / JOB / f"v{version:08d}" / MARK
    job.kill_when = mark.exists
    assert job.unlucky(STEPS, SLOW) == -signal.SIGKILL


def said(job: Again, words: str) -> list[str]:
    return [line for line in job.said.splitlines() if words in line]


def test_a_job_goes_on_where_its_lost_coordinator_has_left_it(tmp_path: Path) -> None:
    checkpoints = tmp_path / "a" / "checkpoints"
    flags = ["--from-checkpoints", str(checkpoints)]
    (tmp_path / "twin").mkdir()
    (tmp_path / "a").mkdir()
    with Again(tmp_path / "twin") as twin:
        assert twin.unlucky(STEPS) == 0, twin.said
        digests, lines = twin.digests(STEPS), twin.lines()

    with Again(tmp_path / "a") as job:
        assert job.unlucky(STEPS, flags=flags) == 2
        assert said(job, f"there is no checkpoint of job {JOB} to go on from: none is complete")

        die_once_complete(job, 5)
        lose_coordinator(job)
        assert job.unlucky(STEPS) == 2
        assert said(job, "does not know job"), job.said
        (line,) = said(job, "does not know job")
        assert (
            f"has its checkpoint of step 5: to go on there say --from-checkpoints {checkpoints / JOB}" in line
        )
        assert job.unlucky(STEPS, flags=flags, replicas=2) == 2
        assert said(job, "are of replicas 1, job drill has 2: make them equal")
        assert job.unlucky(STEPS, flags=flags, job="other") == 2
        assert said(job, "there is no checkpoint of job other to go on from: none is complete")

        # It goes on in a generation above all earlier ones, and the same flag means the newest checkpoint again.
        job.kill_when = (checkpoints / JOB / "v00000010" / MARK).exists
        assert job.unlucky(STEPS, SLOW, flags=flags) == -signal.SIGKILL
        assert said(
            job, f"adopted from {checkpoints / JOB}: job {JOB} goes on at step 5, with its checkpoint there"
        )
        lose_coordinator(job)
        shards = checkpoints / JOB / "v00000010" / "rank1"
        assert all(1000 < int(path.name[1:].partition("-")[0]) < 2000 for path in shards.iterdir())
        assert job.unlucky(STEPS, SLOW, KILL, flags=flags) == 0, job.said
        assert said(job, "goes on at step 10")
        assert "killed by SIGKILL: replaced" in job.said
        assert job.digests(STEPS) == digests
        assert job.lines() == lines

        # The coordinator knows it: the flag changes nothing.
        assert job.unlucky(STEPS, flags=flags) == 0
        assert said(
            job, f"the coordinator knows job {JOB} and its checkpoints: --from-checkpoints is not needed"
        )
        assert job.digests(STEPS) == digests


def test_what_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    flags = ["--from-checkpoints", str(tmp_path / "checkpoints" / JOB)]
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS, SLOW) == 0, job.said
        digests = job.digests(STEPS)
        folder = tmp_path / "checkpoints" / JOB
        shutil.copytree(folder, tmp_path / "kept")

        def adopts(step: int) -> None:
            lose_coordinator(job)
            shutil.rmtree(tmp_path / "digests")
            (tmp_path / "digests").mkdir()
            assert job.unlucky(STEPS, flags=flags) == 0, job.said
            assert said(job, f"goes on at step {step},")
            assert job.digests(STEPS) == digests

        # Version 16 is complete by the coordinator's word only: nobody has marked it when its ranks ended.
        marked = [int(path.parent.name[1:]) for path in folder.glob(f"v*/{MARK}")]
        assert len(marked) == 2
        adopts(max(marked))

        # A tensor of the newest one is damaged: the one before it is taken.
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)
        (tensors,) = (folder / f"v{max(marked):08d}" / "rank1").glob("g*/tensors.safetensors")
        with open(tensors, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        adopts(min(marked))
        assert "refused a newer one: " in job.said
        assert LAUNCHER in job._processes

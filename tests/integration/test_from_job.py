"""A job that begins with the checkpoint of another one: real services, launchers and ranks, every bit compared."""

import re
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import JOB
from tests.integration.again_world import Again

pytestmark = pytest.mark.timeout(240)
STEPS = 12
FROM = ["--from-job", JOB, "--from-version", "10"]
FAILS_WHILE_IT_FORMS = {"rank": 1, "at": "made", "what": "raise"}
DIES_IN_ITS_FIRST_STEP = {"rank": 1, "step": 10, "at": "backward", "what": "kill"}


def everything_in(directory: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [directory, *directory.rglob("*")]
    }


def test_it_goes_on_as_the_other_one_would_have_and_writes_nothing_there(tmp_path: Path) -> None:
    with Again(tmp_path) as job:
        assert job.unlucky(STEPS) == 0, job.said
        twin, lines = job.digests(STEPS), job.lines()
        (other := tmp_path / "digests").rename(tmp_path / "digests-of-the-other-one")
        other.mkdir()
        before = everything_in(tmp_path / "checkpoints" / JOB)

        mishaps = (FAILS_WHILE_IT_FORMS, DIES_IN_ITS_FIRST_STEP)
        assert job.unlucky(STEPS, *mishaps, flags=FROM, job="next") == 1
        assert "ValueError: boom" in job.said
        assert "started again it begins with a checkpoint of job drill" in job.status("next")

        assert job.unlucky(STEPS, *mishaps, flags=FROM, job="next") == 0, job.said
        assert "killed by SIGKILL: replaced" in job.said
        assert "began with version 10 of job drill" in job.status("next")
        assert job.digests(STEPS) == twin
        assert job.lines("next") == [own[10:] for own in lines]
        assert everything_in(tmp_path / "checkpoints" / JOB) == before

        assert job.unlucky(STEPS, flags=["--from-job", "nobody"], job="third") == 2
        said = [line for line in job.said.splitlines() if "nobody" in line]
        assert said == [
            "swift: --from-job nobody: this coordinator has no such job (swift-ft jobs lists them)"
        ]

        # Two stages on each rank, where that job had one.
        assert job.run("interleaved.py", STEPS, flags=["--from-job", JOB], job="fourth") == 2
        (line,) = [line for line in job.said.splitlines() if line.startswith("swift:")]
        assert line.startswith(
            "swift: --from-job drill: its version 12 is not this trainer's: the checkpoint holds "
        )
        one = r"1 optimizer\(s\)"
        assert re.search(
            rf"holds stages \['([01])'\] and {one}, this trainer made stages \['\1', '[23]'\] and {one}$",
            line,
        )
        assert everything_in(tmp_path / "checkpoints" / JOB) == before

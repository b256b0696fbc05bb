"""Ranks with several stages: from one group of all, with which nothing is logged, to none, with the same bits."""

from pathlib import Path

import pytest

from swift.control.client import CoordinatorClient
from swift.drill.cluster import COORDINATOR, JOB
from swift.errors import UsageError
from tests.integration import watched
from tests.integration.forked import Forks

TRAINER, STEPS, PAUSE_S, EVERY, ALL = "interleaved.py", 120, 0.04, "10", "0-3"


@pytest.mark.timeout(240)
@pytest.mark.matrix
def test_from_one_group_of_all_to_none_and_back(tmp_path: Path, forks: Forks) -> None:
    twin = watched.undisturbed(forks, tmp_path / "twin", TRAINER, STEPS, EVERY, ALL, ranks=2)
    run = watched.Run(tmp_path, TRAINER, STEPS, PAUSE_S, EVERY, ALL, ranks=2, spares=2)

    def ask(groups: str) -> None:
        client = CoordinatorClient(run.cluster._addresses[COORDINATOR], JOB, patience_s=10.0)
        try:
            client.change_groups(groups)
        finally:
            client.close()

    def in_force() -> tuple[str, int]:
        newest = [{"in_force": ALL, "since": 0}, *run.said("groups")][-1]
        return newest["in_force"], newest["since"]

    with run.cluster:
        run.until(lambda: run.said("step_end", step=5))
        with pytest.raises(UsageError, match="part stages 0 and 2, which are lost together with rank 0"):
            ask("0-1,2-3")
        ask("none")
        run.until(lambda: in_force()[0] == "")
        since = in_force()[1]
        run.until(lambda: run.said("step_end", step=since + 3))
        run.kill(1)
        run.until(lambda: run.said("resumed", generation=2))
        ask(ALL)
        run.until(lambda: in_force()[0] == ALL)
        run.until(lambda: run.said("step_end", step=in_force()[1] + 2))
        run.kill(0)
        run.end()
    replayed, restored = run.said("plan")
    ways = {rank["rank"]: (rank["strategy"], rank["from_version"]) for rank in replayed["ranks"]}
    assert ways[1][0] == "REPLAY"
    assert ways[1][1] >= since > 0
    assert {rank["strategy"] for rank in restored["ranks"]} == {"CHECKPOINT"}
    assert run.digests() == twin

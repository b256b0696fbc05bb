"""A trainer in which no thread can run for longer than a lease lives all the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from swift_ft.lab.drill.cluster import COORDINATOR
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import run_trainer

LEASE_S, BUSY_S = 2, 6


class ShortLeases(ForkedCluster):
    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name == COORDINATOR:
            arguments = [*arguments, "--heartbeat-s", "0.2", "--lease-s", str(LEASE_S)]
        super()._spawn(name, arguments)


@pytest.mark.timeout(120)
def test_who_holds_the_gil_past_its_lease_is_not_fenced(tmp_path: Path) -> None:
    run = run_trainer(tmp_path, "busy.py", 8, 4, BUSY_S, ranks=2, faults=[], spares=1, make=ShortLeases)
    said = [event["event"] for event in run["events"]]
    assert "lease_expired" not in said
    assert "fenced" not in said
    assert said.count("step_begin") == 16

"""A trainer in which no thread can run for longer than a lease lives all the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.drill.cluster import COORDINATOR
from swift_ft.log.sidecar_client import ENV_OFF
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import run_trainer

LEASE_S, BUSY_S = 2, 6


class ShortLeases(ForkedCluster):
    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name == COORDINATOR:
            arguments = [*arguments, "--heartbeat-s", "0.2", "--lease-s", str(LEASE_S)]
        super()._spawn(name, arguments)


class WithoutSidecars(ShortLeases):
    """(A cluster gives its ranks no variable of that kind that it was not told to.)"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, settings={ENV_OFF: "1"}, **kwargs)


@pytest.mark.timeout(120)
def test_who_holds_the_gil_past_its_lease_is_not_fenced(tmp_path: Path) -> None:
    run = run_trainer(tmp_path, "busy.py", 8, 4, BUSY_S, ranks=2, faults=[], spares=1, make=ShortLeases)
    said = [event["event"] for event in run["events"]]
    assert "lease_expired" not in said
    assert "fenced" not in said
    assert said.count("step_begin") == 16


@pytest.mark.timeout(120)
@pytest.mark.matrix
def test_without_a_sidecar_nobody_keeps_its_lease(tmp_path: Path) -> None:
    """So it is the sidecar that does so above."""
    arguments = (8, 4, BUSY_S, tmp_path / "slept")
    run = run_trainer(tmp_path, "busy.py", *arguments, ranks=2, faults=[], spares=1, make=WithoutSidecars)
    expired = [event["rank"] for event in run["events"] if event["event"] == "lease_expired"]
    assert expired == [1]
    assert "sidecar_started" not in [event["event"] for event in run["events"]]

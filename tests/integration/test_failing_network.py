"""`--failures kind=network`: a machine, which is a network namespace, loses its link while its rank is in a step."""

import json
from pathlib import Path

import pytest

from tests.integration.test_machines import STEPS, Machines, meeting, world
from tests.integration.test_partitions import World

__all__ = ["world"]
pytestmark = pytest.mark.matrix


@pytest.mark.timeout(500)
def test_a_machine_that_loses_its_network_is_fenced_and_comes_back(world: World, tmp_path: Path) -> None:
    world.log_server()
    world.coordinator(lease_s=2.0)
    where = meeting(world, "")
    out = tmp_path / "out"

    def failing(machine: str, number: int) -> list[str]:
        lost = "kind=network,rank=1,step=20,phase=idle,link=e0,for=5"
        return [*where(machine, number), "--failures", lost, "--log-dir", str(out / machine)]

    twin, run = Machines(world, tmp_path / "twin", where, 2), Machines(world, tmp_path / "run", failing, 2)
    try:
        twin.start_both()
        wanted = twin.digests()
        twin.launchers.clear()
        run.start_both()
        assert run.digests() == wanted
        run.launchers.clear()
    finally:
        for machines in (twin, run):
            machines.close()
    (report,) = (out / "b").glob("*/failures.json")
    (failure,) = json.loads(report.read_text())["failures"]
    assert failure["where"]["rank"] == 1
    assert failure["over_s"] - failure["injected_s"] >= 5.0
    assert failure["detected"]["by"] in ("heartbeat_unanswered", "view_seen", "fenced_kill")
    assert failure["generation"] > 1
    assert STEPS > 20

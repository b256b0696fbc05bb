"""A trainer of the tests' own, run through a whole cluster: its digests, trace and output."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift import events
from swift.drill.cluster import Cluster
from tests.integration.forked import CalmCluster, Forks

TRAINERS = Path(__file__).parent / "trainers"
_PATIENCE_S = 150.0

Run = dict[str, Any]


def run_trainer(
    directory: Path,
    trainer: str,
    *arguments: object,
    ranks: int,
    faults: list[dict[str, Any]],
    code_wanted: int = 0,
    spares: int | None = None,
    make: type[Cluster] = Cluster,
    saved: int = 0,
) -> Run:
    """``digests`` by file name, ``events`` and ``output`` of one run; a warm spare for every fault.

    Faults with "hold" die at the same moment, once all of them stand where they are to die and the checkpoint of
    version `saved` is complete.
    """
    cluster = make(
        directory,
        ranks=ranks,
        spares=len(faults) if spares is None else spares,
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(argument) for argument in arguments],
        faults=json.dumps([{"id": f"f{index}", **fault} for index, fault in enumerate(faults)]),
        digests_every=True,
    )
    with cluster:
        held = [f"f{index}" for index, fault in enumerate(faults) if fault.get("hold")]
        output = until_over(cluster, code_wanted, held, saved)
    return found_in(directory, output)


def undisturbed(forks: Forks, directory: Path, trainer: str, *arguments: object, ranks: int) -> Run:
    """The same of a run in which nothing is going to fail."""
    cluster = CalmCluster(
        forks,
        directory,
        ranks=ranks,
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(argument) for argument in arguments],
        digests_every=True,
    )
    with cluster:
        output = until_over(cluster)
    return found_in(directory, output)


def until_over(cluster: Cluster, code_wanted: int = 0, held: Sequence[str] = (), saved: int = 0) -> str:
    """What its processes have said last. `held`: faults that are let go when all of them wait and that checkpoint is
    complete."""
    deadline = time.monotonic() + _PATIENCE_S
    complete = 0
    while (code := cluster.poll()) is None:
        assert time.monotonic() < deadline, cluster.output_tail()
        if held:
            found = [e["version"] for e in cluster.tail.read() if e["event"] == "checkpoint_complete"]
            complete = max(complete, *found, 0)
            there = all((cluster.fault_directory / f"{name}.reached").exists() for name in held)
            if there and complete >= saved:
                for name in held:
                    (cluster.fault_directory / f"{name}.go").touch()
                held = ()
        time.sleep(0.01)
    output = cluster.output_tail()
    assert code == code_wanted, output
    return output


def found_in(directory: Path, output: str) -> Run:
    digests = {path.name: json.loads(path.read_text()) for path in (directory / "digests").glob("*.json")}
    return {"digests": digests, "events": events.read(directory / "events"), "output": output}

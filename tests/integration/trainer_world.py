"""A trainer of the tests' own, run through a whole cluster: its digests, trace and output."""

import json
import time
from pathlib import Path
from typing import Any

from swift import events
from swift.drill.cluster import Cluster

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
) -> Run:
    """``digests`` by file name, ``events`` and ``output`` of one run; a warm spare for every fault."""
    with Cluster(
        directory,
        ranks=ranks,
        spares=len(faults),
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(argument) for argument in arguments],
        faults=json.dumps([{"id": f"f{index}", **fault} for index, fault in enumerate(faults)]),
        digests_every=True,
    ) as cluster:
        deadline = time.monotonic() + _PATIENCE_S
        while (code := cluster.poll()) is None:
            assert time.monotonic() < deadline, cluster.output_tail()
            time.sleep(0.02)
        output = cluster.output_tail()
        assert code == code_wanted, output
    digests = {path.name: json.loads(path.read_text()) for path in (directory / "digests").glob("*.json")}
    return {"digests": digests, "events": events.read(directory / "events"), "output": output}

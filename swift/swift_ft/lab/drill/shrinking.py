"""Drills of strategies that shrink the world: slots of lost ranks stay vacant, to the end or until `--grow`.

With ``--grow step=N`` one survivor pauses before the step after N, and the file ``grow.reached`` appears. The processes
that the launcher started for the lost ranks wait for that file. The survivor continues once they have joined. So they
rejoin at version N + 1, however long each part takes.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_ft.errors import ServiceError, UsageError
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR, CorruptFault, RankFault, pause
from swift_ft.lab.drill.options import options_of
from swift_ft.planner import lost_shard_problem, reroutes
from swift_ft.text import ADAPTIVE_SETTINGS

if TYPE_CHECKING:
    from swift_ft.lab.drill.cluster import Cluster
    from swift_ft.lab.drill.config import DrillConfig


PAUSE = "grow"
_GROW_TIMEOUT_S = 300.0
_LOOK_S = 0.02


def grown_at(spec: str) -> int | None:
    """Returns the version at which lost ranks rejoin; None: never. Raises UsageError."""
    if not spec:
        return None
    match = re.fullmatch(r"step=([0-9]{1,9})", spec.strip().lower())
    if match is None:
        raise UsageError(f"--grow {spec!r}: write step=N (such as step=12)")
    return int(match[1]) + 1


def problems(config: "DrillConfig") -> Iterator[str]:
    version = grown_at(config.grow)
    if problem := lost_shard_problem(config.strategy, config.lost_shard):
        yield f"--lost-shard {config.lost_shard} with --strategy {config.strategy}: {problem}"
    rerouted = reroutes(config.strategy, config.lost_shard)
    for each in options_of(config):
        asked = getattr(config, each.attribute) != each.default
        if each.attribute in ADAPTIVE_SETTINGS and asked and not rerouted:
            yield f"{each.name} needs --strategy adaptive, or --lost-shard reroute"
    if config.exact_gradients == "off" and not config.allow_inexact:
        yield "--exact-gradients off is not exact: add --allow-inexact, or leave it out"
    if not config.shrinks:
        if config.grow:
            yield f"--grow {config.grow} needs --strategy shrink, rollback or lossy-forward"
        return
    flag, shape = f"--strategy {config.strategy}", config.topology
    if config.strategy == "auto" and shape.replicas == 1:
        yield (
            f"--lost-shard {config.lost_shard} with --strategy auto and one replica: nobody else holds a lost rank's "
            "state; give --replicas 2 or more"
        )
    if config.strategy == "auto" and config.grow:
        yield f"--grow {config.grow} with --strategy auto: a process that comes takes the lost rank's place at once"
    if shape.pipeline_ranks > 1 and config.finishes_cut_steps:
        yield (
            f"{flag} with --stages {shape.pipeline_ranks}: only replicas of a whole model finish a step so; "
            "give --stages 1"
        )
    if shape.pipeline_ranks > 1 and config.drops:
        yield (
            f"--lost-shard drop with --stages {shape.pipeline_ranks}: the other ranks of a lost one's pipeline would "
            "have nothing to do; use --lost-shard redistribute"
        )
    if config.finishes_cut_steps and not config.allow_inexact:
        yield f"{flag} is not exact: add --allow-inexact, or use --strategy rollback"
    if config.drops and not config.allow_inexact:
        yield "--lost-shard drop is not exact: add --allow-inexact, or use --lost-shard redistribute"
    if not config.drops and config.updates == "wait_free":
        yield "--lost-shard redistribute does not go with --updates wait_free: leave it out"
    if shape.replicas > 2 and config.reduction == "fast":
        yield f"{flag} with --reduction fast: fewer ranks add in another order; leave it out"
    if any(isinstance(fault, CorruptFault) for fault in config.faults):
        yield f"--kill corrupt=log: {flag} never reads the log"
    if shape.replicas == 1:  # a lost stage moves to another rank
        if config.grow:
            yield f"--grow {config.grow} with one replica: a lost rank's stage has moved, and is there"
        if config.strategy != "shrink" or config.drops:
            yield "--strategy shrink with one replica moves a lost stage: leave out what drops or takes back"
        return
    if rerouted and shape.pipeline_ranks == 1:
        other = "--lost-shard redistribute" if config.strategy == "auto" else "--strategy shrink"
        yield f"{flag} with --stages 1: it is for pipelines; use {other}"
    if problem := _nobody_left(config, rerouted):
        yield f"{flag}: {problem}"
    kills = [fault for fault in config.faults if isinstance(fault, RankFault)]
    if len(victims(config)) < len(kills):
        yield f"{flag}: a rank is killed twice, and it is not there the second time"
    if version is None:
        return
    late = [fault for fault in kills if fault.step is None or fault.step >= version]
    if not kills or late:
        what = f"--kill {late[0]} comes later" if late else "no rank is lost"
        yield f"--grow {config.grow}: {what}; grow behind the last kill of a rank"
    if version >= shape.steps:
        yield f"--grow {config.grow}: step must be at most {shape.steps - 2} (--steps {shape.steps})"


def _nobody_left(config: "DrillConfig", rerouted: bool) -> str:
    """Returns why the other ranks could not continue; empty: they can."""
    shape, lost = config.topology, vacated(config)
    if shape.pipeline_ranks == 1:
        return "every replica loses a rank; leave one whole" if len(lost) == shape.ranks else ""
    if rerouted:
        whole = any(set(shape.replicas_of(rank)) <= lost for rank in lost)
        return "every replica of a stage loses a rank; leave one whole" if whole else ""
    lacking = {shape.place(rank) for rank in lost}
    return "every pipeline loses a rank; leave one whole" if len(lacking) == shape.places else ""


def moves(config: "DrillConfig") -> bool:
    """Returns whether the stages of lost ranks move to the places of other ranks."""
    return config.shrinks and config.topology.replicas == 1


def is_replaced(config: "DrillConfig") -> bool:
    """Returns whether the launcher starts another process for a lost rank."""
    return not config.shrinks or config.grown_at is not None


def victims(config: "DrillConfig") -> frozenset[int]:
    return frozenset(fault.rank for fault in config.faults if isinstance(fault, RankFault))


def vacated(config: "DrillConfig") -> frozenset[int]:
    """Returns the ranks whose slots are vacant: lost ones, and those that held a replica of a stage with them."""
    return frozenset(rank for lost in victims(config) for rank in config.topology.cell(lost))


def pauses(config: "DrillConfig") -> list[dict[str, Any]]:
    """Returns the rank that pauses before the step of `--grow` until the lost ranks have rejoined, as ranks are told
    it (`fault_grammar.pause`); none without that flag."""
    if config.grown_at is None:
        return []
    survivors = set(range(config.topology.ranks)) - vacated(config)
    return [pause(PAUSE, min(survivors), config.grown_at)]


def has_grown(cluster: "Cluster", present: frozenset[int], config: "DrillConfig") -> bool:
    """Returns whether the lost ranks have joined. `present`: the ranks that have joined and were not lost since."""
    waits = (cluster.fault_directory / f"{PAUSE}.reached").exists()
    spares = vacated(config) - victims(config)
    return waits and len(present | spares) == config.topology.ranks


def await_growth() -> None:
    """(a trainer, before it joins) If this process replaces a lost rank, waits until it may rejoin. Raises ServiceError
    if the other ranks do not reach that step in time."""
    directory, rank = Path(os.environ[ENV_FAULTS_DIR]), int(os.environ["RANK"])
    own = [fault["id"] for fault in json.loads(os.environ[ENV_FAULTS]) if fault["rank"] == rank]
    if not any((directory / f"{fault}.fired").exists() for fault in own):
        return
    deadline = time.monotonic() + _GROW_TIMEOUT_S
    while not (directory / f"{PAUSE}.reached").exists():
        if time.monotonic() > deadline:
            raise ServiceError(f"rank {rank}: the others did not come to the step behind which it comes back")
        time.sleep(_LOOK_S)

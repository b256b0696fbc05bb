"""Drills of strategies that shrink the world: slots of lost ranks stay vacant, to the end or until `--grow`.

With ``--grow step=N`` one survivor pauses before the step after N, and the file ``grow.reached`` appears. The processes
that the launcher started for the lost ranks wait for that file. The survivor continues once they have joined. So they
rejoin at version N + 1, however long each part takes.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swift_ft.errors import ServiceError, UsageError
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR, CorruptFault, RankFault
from swift_ft.lab.drill.options import DEFAULTS
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


def check(config: "DrillConfig") -> None:
    """Raises UsageError for options that conflict with shrinking."""
    version = grown_at(config.grow)
    if problem := lost_shard_problem(config.strategy, config.lost_shard):
        raise UsageError(f"--lost-shard {config.lost_shard} with --strategy {config.strategy}: {problem}")
    asked = {name for name in ADAPTIVE_SETTINGS if getattr(config, name) != DEFAULTS[name]}
    if asked and not _reroutes(config):
        flag = f"--{min(asked).replace('_', '-')}"
        raise UsageError(f"{flag} needs --strategy adaptive, or --lost-shard reroute")
    if config.exact_gradients == "off" and not config.allow_inexact:
        raise UsageError("--exact-gradients off is not exact: add --allow-inexact, or leave it out")
    if not config.shrinks:
        if config.grow:
            raise UsageError(f"--grow {config.grow} needs --strategy shrink, rollback or lossy-forward")
        return
    flag, shape = f"--strategy {config.strategy}", config.topology
    if config.strategy == "auto":
        _check_late(config)
    if shape.pipeline_ranks > 1 and config.finishes_cut_steps:
        raise UsageError(
            f"{flag} with --stages {shape.pipeline_ranks}: only replicas of a whole model finish a step so; "
            "give --stages 1"
        )
    if shape.pipeline_ranks > 1 and config.drops:
        raise UsageError(
            f"--lost-shard drop with --stages {shape.pipeline_ranks}: the other ranks of a lost one's pipeline would "
            "have nothing to do; use --lost-shard redistribute"
        )
    if config.finishes_cut_steps and not config.allow_inexact:
        raise UsageError(f"{flag} is not exact: add --allow-inexact, or use --strategy rollback")
    if config.drops and not config.allow_inexact:
        raise UsageError(
            "--lost-shard drop is not exact: add --allow-inexact, or use --lost-shard redistribute"
        )
    if not config.drops and config.updates == "wait_free":
        raise UsageError("--lost-shard redistribute does not go with --updates wait_free: leave it out")
    if shape.replicas > 2 and config.reduction == "fast":
        raise UsageError(f"{flag} with --reduction fast: fewer ranks add in another order; leave it out")
    kills = [fault for fault in config.faults if isinstance(fault, RankFault)]
    if any(isinstance(fault, CorruptFault) for fault in config.faults):
        raise UsageError(f"--kill corrupt=log: {flag} never reads the log")
    victims = {fault.rank for fault in kills}
    if shape.replicas == 1:
        _check_moving(config)
        return
    if _reroutes(config) and shape.pipeline_ranks == 1:
        other = "--lost-shard redistribute" if config.strategy == "auto" else "--strategy shrink"
        raise UsageError(f"{flag} with --stages 1: it is for pipelines; use {other}")
    if problem := _nobody_left(config, victims):
        raise UsageError(f"{flag}: {problem}")
    if len(victims) < len(kills):
        raise UsageError(f"{flag}: a rank is killed twice, and it is not there the second time")
    if version is None:
        return
    late = [fault for fault in kills if fault.step is None or fault.step >= version]
    if not kills or late:
        what = f"--kill {late[0]} comes later" if late else "no rank is lost"
        raise UsageError(f"--grow {config.grow}: {what}; grow behind the last kill of a rank")
    if version >= shape.steps:
        raise UsageError(
            f"--grow {config.grow}: step must be at most {shape.steps - 2} (--steps {shape.steps})"
        )


def _reroutes(config: "DrillConfig") -> bool:
    return reroutes(config.strategy, config.lost_shard)


def _nobody_left(config: "DrillConfig", victims: set[int]) -> str:
    """Returns why the other ranks could not continue; empty: they can."""
    shape = config.topology
    if shape.pipeline_ranks == 1:
        return "every rank is killed; leave one" if len(victims) == shape.replicas else ""
    if _reroutes(config):
        groups = [rank // shape.replicas for rank in victims]
        return (
            "every replica of a stage is killed; leave one"
            if shape.replicas in map(groups.count, groups)
            else ""
        )
    lacking = {rank % shape.replicas for rank in victims}
    return "every pipeline loses a rank; leave one whole" if len(lacking) == shape.replicas else ""


def _check_late(config: "DrillConfig") -> None:
    """Checks strategy "auto" with a lost-shard policy: the others continue if no replacement process comes. Raises
    UsageError."""
    if config.topology.replicas == 1:
        raise UsageError(
            f"--lost-shard {config.lost_shard} with --strategy auto and one replica: nobody else holds a lost rank's "
            "state; give --replicas 2 or more"
        )
    if config.grow:
        raise UsageError(
            f"--grow {config.grow} with --strategy auto: a process that comes takes the lost rank's place at once"
        )


def _check_moving(config: "DrillConfig") -> None:
    """Checks a pipeline without replicas, whose lost stages move to other ranks. Raises UsageError."""
    if config.grow:
        raise UsageError(
            f"--grow {config.grow} with one replica: a lost rank's stage has moved, and is there"
        )
    if config.strategy != "shrink" or config.drops:
        raise UsageError(
            "--strategy shrink with one replica moves a lost stage: leave out what drops or takes back"
        )


def moves(config: "DrillConfig") -> bool:
    """Returns whether the stages of lost ranks move to the places of other ranks."""
    return config.shrinks and config.topology.replicas == 1


def is_replaced(config: "DrillConfig") -> bool:
    """Returns whether the launcher starts another process for a lost rank."""
    return not config.shrinks or config.grown_at is not None or bool(config.unfit)


def victims(config: "DrillConfig") -> frozenset[int]:
    """Returns the ranks that are lost."""
    return frozenset(fault.rank for fault in config.faults if isinstance(fault, RankFault))


def first_survivor(config: "DrillConfig") -> int:
    """Returns the rank that pauses until the lost ranks have rejoined."""
    return min(set(range(config.topology.ranks)) - victims(config), default=0) if config.shrinks else 0


def pauses(config: "DrillConfig") -> dict[str, int]:
    """Returns id -> the step before which training pauses until the drill creates ``<id>.go``."""
    return {} if config.grown_at is None else {PAUSE: config.grown_at}


def has_grown(cluster: "Cluster", present: frozenset[int], config: "DrillConfig") -> bool:
    """Returns whether the lost ranks have joined. `present`: the ranks that have joined and were not lost since."""
    waits = (cluster.fault_directory / f"{PAUSE}.reached").exists()
    return waits and len(present) == config.topology.ranks


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

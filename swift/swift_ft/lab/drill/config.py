"""One drill, checked: what `swift-ft drill` was asked for, and the command that asks for it again."""

import json
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import CorruptFault, Fault
from swift_ft.lab.drill import faults as fault_specs
from swift_ft.lab.drill import health_check, options, shrinking, warming
from swift_ft.lab.drill.options import DEFAULTS, OPTIMIZERS, Reach
from swift_ft.lab.drill.topology import Topology
from swift_ft.log.placement import COPIES_MAX
from swift_ft.planner import SNAPSHOTTING, shrinks
from swift_ft.planner.groups import RecoveryGroups

TOKEN_LIFETIME_S = 4.0
"""Of `--secure`: the run's ranks rest for longer than this once, and every connection's token has expired."""


SNAPSHOT_EVERY = 4
"""With --strategy snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig:
    """Frozen and valid once it exists; nothing has been started yet."""

    topology: Topology
    faults: tuple[Fault, ...]
    strategy: str = DEFAULTS["strategy"]
    checkpoint_mode: str = DEFAULTS["checkpoint_mode"]
    lost_shard: str = DEFAULTS["lost_shard"]
    """Of a strategy that shrinks. Empty: "redistribute"."""
    exact_gradients: str = DEFAULTS["exact_gradients"]
    """Of "adaptive". "on" or "off", as the next one."""
    split_backward: str = DEFAULTS["split_backward"]
    adaptive_memory: float = DEFAULTS["adaptive_memory"]
    staggered: str = DEFAULTS["staggered"]
    snapshot_every: int = DEFAULTS["snapshot_every"]
    """Steps, of the strategies "snapshot" and "auto"."""
    allow_inexact: bool = DEFAULTS["allow_inexact"]
    grow: str = DEFAULTS["grow"]
    """step=N: lost ranks come back behind that step. Empty: never."""
    unfit: str = DEFAULTS["unfit"]
    """rank=R,times=N: the place of a lost rank fails its health check. Empty: there is none."""
    groups: RecoveryGroups = RecoveryGroups()  # noqa: RUF009  (frozen)
    """Stages that recover together; empty: every rank by itself."""
    seed: int = DEFAULTS["seed"]
    log_servers: int = DEFAULTS["log_servers"]
    """Each as if on a machine of its own."""
    copies: int = DEFAULTS["copies"]
    """Of every record, on as many log servers."""
    spares: int = DEFAULTS["spares"]
    """Warm spare processes the launcher keeps."""
    warm_up: bool = DEFAULTS["warm_up"]
    """Each victim waits until one has been warmed up as its rank."""
    model: str = DEFAULTS["model"]
    updates: str = DEFAULTS["updates"]
    data_parallel: str = DEFAULTS["data_parallel"]
    """Who averages gradients over replicas: the session, or "ddp": torch's DistributedDataParallel."""
    optimizer: str = DEFAULTS["optimizer"]
    optimizer_implementation: str = DEFAULTS["optimizer_implementation"]
    """Empty: torch's choice."""
    undo: str = DEFAULTS["undo"]
    reduction: str = DEFAULTS["reduction"]
    helpers: int = DEFAULTS["helpers"]
    """So many ranks help to replay a lost stage."""
    rehearse: str = DEFAULTS["rehearse"]
    """When recoveries are rehearsed, as in `SessionConfig.rehearse`."""
    secure: bool = DEFAULTS["secure"]
    """Over mutual TLS, and with tokens."""
    json_path: Path | None = DEFAULTS["json_path"]
    html_path: Path | None = DEFAULTS["html_path"]
    directory: Path | None = DEFAULTS["directory"]
    """Where everything of the run is kept; None: a temporary directory, removed at the end."""
    keep: bool = DEFAULTS["keep"]
    """Keep the temporary directory as well."""
    twin: Path | None = DEFAULTS["twin"]
    """Directory of a failure-free run to compare with: used if finished there, made there if not."""

    def __post_init__(self) -> None:
        options.check(self._values())
        if self.strategy == fault_specs.SNAPSHOT and not self.snapshot_every:
            object.__setattr__(self, "snapshot_every", SNAPSHOT_EVERY)
        copies_max = min(COPIES_MAX, self.log_servers)
        if not 1 <= self.copies <= copies_max:
            raise UsageError(
                f"--copies must be 1 to {copies_max} (--log-servers {self.log_servers}), not {self.copies}"
            )
        if not self.faults:
            raise UsageError("a drill without a fault shows nothing: give at least one --kill")
        shape = self.topology
        stages = {rank: shape.stages_of(rank) for rank in range(shape.ranks)}
        if problem := self.groups.problem(shape.stages, stages):
            raise UsageError(f"--{problem}")
        self._check_optimizer()
        self._check_data_parallelism()
        fault_specs.check(
            self.faults,
            self.topology,
            strategy=self.strategy,
            updates=self.updates,
            log_servers=self.log_servers,
            groups=self.groups,
        )
        shrinking.check(self)
        health_check.check(self)
        warming.check(self)
        if self.snapshot_every and self.strategy not in SNAPSHOTTING:
            raise UsageError(f"--snapshot-every {self.snapshot_every} needs --strategy snapshot or auto")

        corrupt = next((f for f in self.faults if isinstance(f, CorruptFault)), None)
        if corrupt is not None and self.copies > 1:
            raise UsageError(
                f"--kill {corrupt}: with --copies {self.copies} a replay reads another copy: leave --copies out"
            )

    def _check_optimizer(self) -> None:
        versions = OPTIMIZERS[self.optimizer]
        if self.optimizer_implementation and self.optimizer_implementation not in versions:
            there = f"there are {', '.join(versions)}" if versions else "leave out --optimizer-implementation"
            raise UsageError(
                f"--optimizer {self.optimizer}: it has no {self.optimizer_implementation} version; {there}"
            )

    def _check_data_parallelism(self) -> None:
        """What cannot go together."""
        alone, wait_free = self.topology.replicas == 1, self.updates == "wait_free"
        for flag, value, harmless in (
            ("--updates", self.updates, "after_backward"),
            ("--data-parallel", self.data_parallel, "session"),
            ("--reduction", self.reduction, "auto"),
            ("--strategy", self.strategy if self.strategy == "replica" else "", ""),
        ):
            if alone and value != harmless:
                raise UsageError(f"{flag} {value} needs replicas: add --replicas 2 or more")
        if self.undo != "exact" and not wait_free:
            raise UsageError(
                f"--undo {self.undo}: nothing is undone with --updates after_backward; add --updates wait_free"
            )
        if self.data_parallel == "session":
            return
        if wait_free:
            raise UsageError("--data-parallel ddp reduces by itself: leave out --updates wait_free")
        if self.reduction == "fast":
            raise UsageError(
                "--data-parallel ddp adds in the order of data-parallel ranks: leave out --reduction fast"
            )
        if self.topology.splits_backward:
            raise UsageError(
                f"--data-parallel ddp does not go with --schedule {self.topology.schedule}: "
                "DistributedDataParallel does not see gradients of weights that are computed apart; "
                "use --data-parallel session"
            )

    @property
    def ordered_reduction(self) -> bool:
        """Gradients are added in the order of data-parallel ranks, whatever the layout of the buckets is."""
        if self.data_parallel == "ddp":  # its group is the session's, whose sums are
            return True
        return self.reduction == "ordered" or (self.reduction == "auto" and self.topology.replicas > 2)

    @property
    def exact_reduction(self) -> bool:
        """The sum does not depend on how a backend lays its buffers out: two addends have one order only."""
        return self.topology.replicas < 3 or self.ordered_reduction

    @property
    def shrinks(self) -> bool:
        """Slots of lost ranks stay vacant."""
        return shrinks(self.strategy) or (self.strategy == "auto" and bool(self.lost_shard))

    @property
    def drops(self) -> bool:
        """Nobody computes the batches of lost ranks."""
        return self.finishes_cut_steps or (self.shrinks and self.lost_shard == "drop")

    @property
    def promises_no_bits(self) -> str:
        """What was asked for that is close to the failure-free run, and not bit for bit. Empty: nothing."""
        if self.exact_gradients == "off":
            return "gradients of lost ranks were added to other ranks' own"
        return "an arithmetic undo is not exact" if self.undo == "arithmetic" else ""

    @property
    def finishes_cut_steps(self) -> bool:
        """A step that a loss cuts short is finished with the gradients of those that are left."""
        return self.strategy == "lossy-forward"

    @property
    def grown_at(self) -> int | None:
        """The version at which lost ranks come back; None: they do not."""
        return shrinking.grown_at(self.grow)

    def _values(self) -> dict[str, Any]:
        """Of all options, by the fields that hold them."""
        return {
            field.name: getattr(part, field.name) for part in (self.topology, self) for field in fields(part)
        }

    def arguments(self) -> list[str]:
        """The command line that makes this configuration, without where its results go."""
        values = self._values()
        kills = {"faults": values.pop("faults")}
        return [*options.words(values, *Reach), *options.words(kills, Reach.DRILL)]

    def rerun(self) -> str:
        """The exact command, for a shell."""
        return shlex.join(["swift-ft", "drill", *self.arguments()])

    def trainer_arguments(self) -> list[str]:
        """What the trainer of the drill is started with; the same for the failure-free twin."""
        return options.words(self._values(), Reach.BOTH)

    def recovery_arguments(self) -> list[str]:
        """What the trainer of the run with faults gets besides: how to recover changes no bit of the twin."""
        rest = ["--rest-s", str(TOKEN_LIFETIME_S + 0.5)] if self.secure else []
        return [*options.words(self._values(), Reach.RUN), *rest]

    def identity(self) -> dict[str, object]:
        """What two runs must share for their digests to be comparable."""
        return {"trainer": self.trainer_arguments(), "versions": versions()}

    def shape(self) -> dict[str, object]:
        """`topology` of the report."""
        shape = self.topology
        return {
            "ranks": shape.ranks,
            "pipeline_ranks": shape.pipeline_ranks,
            "replicas": shape.replicas,
            "stages": shape.stages,
            "stages_of_rank": {str(rank): list(shape.stages_of(rank)) for rank in range(shape.ranks)},
            "schedule": shape.schedule,
            "microbatches": shape.microbatches,
            "steps": shape.steps,
            "checkpoint_every": shape.checkpoint_every,
            "groups": str(self.groups),
            "log_servers": self.log_servers,
            "copies": self.copies,
            "spares": self.spares,
            "model": self.model,
            "updates": self.updates,
            "data_parallel": self.data_parallel,
            "optimizer": self.optimizer,
            "optimizer_implementation": self.optimizer_implementation or "torch's choice",
            "secure": self.secure,
        }


def versions() -> dict[str, str]:
    """Of everything whose version can change the bits or the behaviour. Imports none of it."""
    by_package = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("swift-ft", "torch", "numpy", "grpcio", "protobuf"):
        try:
            by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_package[name] = "not installed"
    return by_package


def same_identity(stored: object, wanted: Mapping[str, object]) -> bool:
    """Compares as JSON, which is how it was stored."""
    return bool(stored == json.loads(json.dumps(wanted)))

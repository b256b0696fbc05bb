"""The validated configuration of one drill, and the command line that reproduces it."""

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
from swift_ft.planner import SETTINGS, Strategy
from swift_ft.planner.groups import RecoveryGroups

TOKEN_LIFETIME_S = 4.0
"""Lifetime of tokens with `--secure`. Ranks pause for longer than this once, so that the token of every connection
expires."""


SNAPSHOT_EVERY = 4
"""Default of `--snapshot-every` with `--strategy snapshot`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig:
    """The configuration of a drill. Construction validates it (`UsageError`) before anything is started."""

    topology: Topology
    faults: tuple[Fault, ...]
    strategy: str = DEFAULTS["strategy"]
    checkpoint_mode: str = DEFAULTS["checkpoint_mode"]
    lost_shard: str = DEFAULTS["lost_shard"]
    """Treatment of a lost rank's batches, for strategies that shrink the world. Empty: "redistribute"."""
    exact_gradients: str = DEFAULTS["exact_gradients"]
    """"on" or "off", for the strategy "adaptive"; so is `split_backward`."""
    split_backward: str = DEFAULTS["split_backward"]
    adaptive_memory: float = DEFAULTS["adaptive_memory"]
    staggered: str = DEFAULTS["staggered"]
    snapshot_every: int = DEFAULTS["snapshot_every"]
    """Steps between snapshots, for the strategies "snapshot" and "auto"."""
    allow_inexact: bool = DEFAULTS["allow_inexact"]
    grow: str = DEFAULTS["grow"]
    """step=N: lost ranks rejoin after that step. Empty: never."""
    unfit: str = DEFAULTS["unfit"]
    """rank=R,times=N: the place of a lost rank fails its health check N times. Empty: no health check."""
    groups: RecoveryGroups = RecoveryGroups()  # noqa: RUF009  (frozen)
    """Stages that recover together; empty: each rank recovers by itself."""
    seed: int = DEFAULTS["seed"]
    log_servers: int = DEFAULTS["log_servers"]
    """Number of log servers, each as if on a machine of its own."""
    copies: int = DEFAULTS["copies"]
    """Copies of every record, each on another log server."""
    spares: int = DEFAULTS["spares"]
    """Warm spare processes the launcher keeps."""
    warm_up: bool = DEFAULTS["warm_up"]
    """Each victim waits until a spare has been warmed up as its rank."""
    model: str = DEFAULTS["model"]
    updates: str = DEFAULTS["updates"]
    data_parallel: str = DEFAULTS["data_parallel"]
    """Component that averages gradients over replicas: "session", or "ddp" (torch's DistributedDataParallel)."""
    optimizer: str = DEFAULTS["optimizer"]
    optimizer_implementation: str = DEFAULTS["optimizer_implementation"]
    """Empty: torch's choice."""
    undo: str = DEFAULTS["undo"]
    reduction: str = DEFAULTS["reduction"]
    helpers: int = DEFAULTS["helpers"]
    """Number of ranks that help to replay a lost stage."""
    rehearse: str = DEFAULTS["rehearse"]
    """Times at which recoveries are rehearsed, as in `SessionConfig.rehearse`."""
    secure: bool = DEFAULTS["secure"]
    """Use mutual TLS and tokens."""
    json_path: Path | None = DEFAULTS["json_path"]
    html_path: Path | None = DEFAULTS["html_path"]
    directory: Path | None = DEFAULTS["directory"]
    """Directory of both runs' files; None: a temporary one, removed at the end."""
    keep: bool = DEFAULTS["keep"]
    """Keep the temporary directory as well."""
    twin: Path | None = DEFAULTS["twin"]
    """Directory of the failure-free run: reused if finished there, otherwise run there."""

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
        if self.snapshot_every and Strategy.SNAPSHOT not in SETTINGS[self.strategy].permits:
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
        """Raises UsageError for options of data parallelism that conflict."""
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
        """Returns whether gradients are summed in the order of data-parallel ranks, whatever the layout of the
        buckets."""
        if self.data_parallel == "ddp":  # its group is the session's, whose sums are
            return True
        return self.reduction == "ordered" or (self.reduction == "auto" and self.topology.replicas > 2)

    @property
    def exact_reduction(self) -> bool:
        """Returns whether the sum is independent of the backend's buffer layout: two addends have only one order."""
        return self.topology.replicas < 3 or self.ordered_reduction

    @property
    def shrinks(self) -> bool:
        """Returns whether slots of lost ranks stay vacant."""
        return SETTINGS[self.strategy].shrinks or bool(self.lost_shard)

    @property
    def drops(self) -> bool:
        """Returns whether the batches of lost ranks are dropped instead of computed by other ranks."""
        return self.finishes_cut_steps or (self.shrinks and self.lost_shard == "drop")

    @property
    def promises_no_bits(self) -> str:
        """Returns why the result is close to the failure-free run but not bit-identical; empty: it is bit-identical."""
        if self.exact_gradients == "off":
            return "gradients of lost ranks were added to other ranks' own"
        return "an arithmetic undo is not exact" if self.undo == "arithmetic" else ""

    @property
    def finishes_cut_steps(self) -> bool:
        """Returns whether a step interrupted by a loss is finished with the remaining ranks' gradients."""
        return self.strategy == "lossy-forward"

    @property
    def grown_at(self) -> int | None:
        """Returns the version at which lost ranks rejoin; None: they do not."""
        return shrinking.grown_at(self.grow)

    def _values(self) -> dict[str, Any]:
        """Returns the values of all options by field name."""
        return {
            field.name: getattr(part, field.name) for part in (self.topology, self) for field in fields(part)
        }

    def arguments(self) -> list[str]:
        """Returns the command line of this configuration, without the options that name result files."""
        values = self._values()
        kills = {"faults": values.pop("faults")}
        return [*options.words(values, *Reach), *options.words(kills, Reach.DRILL)]

    def rerun(self) -> str:
        """Returns the exact command, quoted for a shell."""
        return shlex.join(["swift-ft", "drill", *self.arguments()])

    def trainer_arguments(self) -> list[str]:
        """Returns the trainer's arguments, the same for the failure-free twin."""
        return options.words(self._values(), Reach.BOTH)

    def recovery_arguments(self) -> list[str]:
        """Returns additional trainer arguments of the run with faults: recovery settings, which change no bit of the
        twin."""
        rest = ["--rest-s", str(TOKEN_LIFETIME_S + 0.5)] if self.secure else []
        return [*options.words(self._values(), Reach.RUN), *rest]

    def identity(self) -> dict[str, object]:
        """Returns the settings and versions that two runs must share for their digests to be comparable."""
        return {"trainer": self.trainer_arguments(), "versions": versions()}

    def shape(self) -> dict[str, object]:
        """Returns `topology` of the report."""
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
    """Returns the versions of everything that can change bits or behaviour, without importing it."""
    by_package = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("swift-ft", "torch", "numpy", "grpcio", "protobuf"):
        try:
            by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_package[name] = "not installed"
    return by_package


def same_identity(stored: object, wanted: Mapping[str, object]) -> bool:
    """Compares after a JSON round trip, because the stored identity is JSON."""
    return bool(stored == json.loads(json.dumps(wanted)))

"""One drill, checked: what `swift-ft drill` was asked for, and the command that asks for it again."""

import json
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from swift.drill import faults as fault_specs
from swift.drill import sizes
from swift.drill.faults import Fault
from swift.drill.regroup import Regroup
from swift.drill.regroup import check as check_regroups
from swift.drill.topology import Topology
from swift.errors import UsageError
from swift.log.placement import COPIES_MAX
from swift.recovery import STRATEGIES
from swift.recovery.groups import RecoveryGroups

MODELS = tuple(sizes.MODELS)
UPDATES = ("after_backward", "wait_free")
DATA_PARALLEL = ("session", "ddp")
UNDOS = ("exact", "arithmetic", "preimage")
REDUCTIONS = ("auto", "ordered", "fast")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
# name -> torch's versions of it; none of those that are the project's own
OPTIMIZERS = {
    "adamw": IMPLEMENTATIONS,
    "sgd": IMPLEMENTATIONS,
    "amsgrad": IMPLEMENTATIONS,
    "adam": IMPLEMENTATIONS,
    "adagrad": IMPLEMENTATIONS,
    "rmsprop": ("for-loop", "foreach"),
    "adadelta": ("for-loop", "foreach"),
    "nadam": ("for-loop", "foreach"),
    "radam": ("for-loop", "foreach"),
    "lamb": (),
    "lion": (),
}
TOKEN_LIFETIME_S = 4.0
"""Of `--secure`: the run's ranks rest for longer than this once, and every connection's token has expired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig:
    """Frozen and valid once it exists; nothing has been started yet."""

    topology: Topology
    faults: tuple[Fault, ...]
    strategy: str = "auto"
    groups: RecoveryGroups = RecoveryGroups()  # noqa: RUF009  (frozen)
    """Stages that recover together; empty: every rank by itself."""
    regroups: tuple[Regroup, ...] = ()
    """Other ones while the job runs."""
    seed: int = 0
    log_servers: int = 1
    """Each as if on a machine of its own."""
    copies: int = 1
    """Of every record, on as many log servers."""
    spares: int = 1
    """Warm spare processes the launcher keeps."""
    model: str = "default"
    updates: str = "after_backward"
    data_parallel: str = "session"
    """Who averages gradients over replicas: the session, or "ddp": torch's DistributedDataParallel."""
    optimizer: str = "adamw"
    optimizer_implementation: str = ""
    """Empty: torch's choice."""
    undo: str = "exact"
    reduction: str = "auto"
    helpers: int = 0
    """So many ranks help to replay a lost stage."""
    paranoid: bool = False
    """The first step of every generation is computed twice, and compared."""
    secure: bool = False
    """Over mutual TLS, and with tokens."""
    json_path: Path | None = None
    html_path: Path | None = None
    directory: Path | None = None
    """Where everything of the run is kept; None: a temporary directory, removed at the end."""
    keep: bool = False
    """Keep the temporary directory as well."""
    twin: Path | None = None
    """Directory of a failure-free run to compare with: used if finished there, made there if not."""

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("model", self.model, MODELS),
            ("strategy", self.strategy, STRATEGIES),
            ("updates", self.updates, UPDATES),
            ("data-parallel", self.data_parallel, DATA_PARALLEL),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("optimizer-implementation", self.optimizer_implementation, ("", *IMPLEMENTATIONS)),
            ("undo", self.undo, UNDOS),
            ("reduction", self.reduction, REDUCTIONS),
        ):
            if value not in known:
                raise UsageError(f"unknown --{flag} {value!r}: one of {', '.join(filter(None, known))}")
        if not 0 <= self.helpers <= 64:
            raise UsageError(f"--helpers must be 0 to 64, not {self.helpers}")
        if self.paranoid and self.updates == "wait_free":
            raise UsageError(
                "--paranoid: with --updates wait_free half a step is applied before it is compared"
            )
        if not 0 <= self.spares <= 64:
            raise UsageError(f"--spares must be 0 to 64, not {self.spares}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be 0 to 2**63 - 1, not {self.seed}")
        if not 1 <= self.log_servers <= 16:
            raise UsageError(f"--log-servers must be 1 to 16, not {self.log_servers}")
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
        self._check_regroups()
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

        corrupt = next((f for f in self.faults if isinstance(f, fault_specs.CorruptFault)), None)
        if corrupt is not None and self.copies > 1:
            raise UsageError(
                f"--kill {corrupt}: with --copies {self.copies} a replay reads another copy: leave --copies out"
            )

    def _check_regroups(self) -> None:
        shape = self.topology
        for flag, there in (
            (
                f"--replicas {shape.replicas}",
                shape.replicas > 1 and any(r.storage_cap for r in self.regroups),
            ),
            (f"--schedule {shape.schedule}", shape.stages_per_rank > 1),
            ("--secure", self.secure),
            ("--kill corrupt=log", any(isinstance(f, fault_specs.CorruptFault) for f in self.faults)),
        ):
            if self.regroups and there:
                what = "storage-cap" if flag.startswith("--replicas") else "--regroup"
                raise UsageError(f"{what} does not go with {flag}: leave one of them out")
        check_regroups(self.regroups, self.groups, shape.stages, shape.steps)

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

    def arguments(self) -> list[str]:
        """The command line that makes this configuration, without where its results go."""
        words = [*self._shape_arguments(), "--model", self.model, "--seed", str(self.seed)]
        words += ["--spares", str(self.spares), "--strategy", self.strategy]
        if self.groups.starts:
            words += ["--groups", str(self.groups)]
        for regroup in self.regroups:
            words += ["--regroup", str(regroup)]
        if self.topology.replicas > 1:
            words += ["--undo", self.undo]
        if self.helpers:
            words += ["--helpers", str(self.helpers)]
        if self.paranoid:
            words.append("--paranoid")
        if self.secure:
            words.append("--secure")
        if self.log_servers > 1:
            words += ["--log-servers", str(self.log_servers), "--copies", str(self.copies)]
        for fault in self.faults:
            words += ["--kill", str(fault)]
        return words

    def _shape_arguments(self) -> list[str]:
        """What both the drill and its trainer take, in the same words."""
        shape = self.topology
        words = ["--stages", shape.pipeline_ranks, "--replicas", shape.replicas, "--steps", shape.steps]
        words += ["--schedule", shape.schedule, "--microbatches", shape.microbatches]
        words += ["--checkpoint-every", shape.checkpoint_every, "--optimizer", self.optimizer]
        if self.optimizer_implementation:
            words += ["--optimizer-implementation", self.optimizer_implementation]
        if shape.replicas > 1:
            words += ["--updates", self.updates, "--data-parallel", self.data_parallel]
            words += ["--reduction", self.reduction]
        return [str(word) for word in words]

    def rerun(self) -> str:
        """The exact command, for a shell."""
        return shlex.join(["swift-ft", "drill", *self.arguments()])

    def trainer_arguments(self) -> list[str]:
        """What the trainer of the drill is started with; the same for the failure-free twin."""
        return [*self._shape_arguments(), "--model", self.model, "--seed", str(self.seed)]

    def recovery_arguments(self) -> list[str]:
        """What the trainer of the run with faults gets besides: how to recover changes no bit of the twin."""
        rest = ["--rest-s", str(TOKEN_LIFETIME_S + 0.5)] if self.secure else []
        helpers = ["--helpers", str(self.helpers), "--groups", str(self.groups)]
        return ["--strategy", self.strategy, "--undo", self.undo, *helpers, *rest]

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
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("swift-ft", "torch", "numpy", "grpcio", "protobuf"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def same_identity(stored: object, wanted: Mapping[str, object]) -> bool:
    """Compares as JSON, which is how it was stored."""
    return bool(stored == json.loads(json.dumps(wanted)))

"""The validated configuration of one drill, and the command line that reproduces it."""

import platform
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import object_store
from swift_ft.errors import UsageError
from swift_ft.fault_grammar import Fault
from swift_ft.lab.drill import faults as fault_specs
from swift_ft.lab.drill import options, shrinking
from swift_ft.lab.drill.options import (
    DEFAULT_KILL,
    ON_OFF,
    OPTIMIZERS,
    Reach,
    of_both,
    of_result,
    of_run,
    option,
)
from swift_ft.lab.drill.topology import MODELS, Topology
from swift_ft.log.placement import COPIES_MAX
from swift_ft.planner import SETTINGS, STRATEGIES, Strategy
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.settings import LOST_SHARDS, QUICKEST
from swift_ft.state import MODES as CHECKPOINT_MODES

TOKEN_LIFETIME_S = 4.0
"""Lifetime of tokens with `--secure`. Ranks pause for longer than this once, so that the token of every connection
expires."""

SNAPSHOT_EVERY = 4
"""Default of `--snapshot-every` with `--strategy snapshot`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig:
    """The configuration of a drill. Construction validates it (`UsageError`) before anything is started."""

    topology: Topology
    strategy: str = of_run("auto", known=STRATEGIES)
    checkpoint_mode: str = of_run(
        "async",
        "when training goes on after a checkpoint: once the state is copied, or once it is durable",
        known=CHECKPOINT_MODES,
    )
    lost_shard: str = of_run(
        "",
        "with --strategy shrink or rollback, what becomes of a lost rank's batches (default: redistribute)",
        known=(*LOST_SHARDS, QUICKEST),
    )
    exact_gradients: str = of_run(
        "on",
        "with --strategy adaptive, whether a lost rank's gradients are kept apart, or added to a rank's own "
        "('off': not exact)",
        known=ON_OFF,
    )
    split_backward: str = of_run(
        "on",
        "with --strategy adaptive, whether gradients of weights are computed behind those of inputs while a rank "
        "is missing",
        known=ON_OFF,
    )
    adaptive_memory: float = of_run(
        1.0,
        "with --strategy adaptive, how many times the activations of the schedule a rank may hold meanwhile",
        "FACTOR",
        bounds=(1.0, 1000.0),
    )
    staggered: str = of_run(
        "off",
        "with --strategy adaptive, whether a rank begins the next step before other stages have done this one",
        known=ON_OFF,
    )
    snapshot_every: int = of_run(
        0,
        "with --strategy snapshot (there 4, if 0) and auto, steps between copies in host memory; 0: none",
        "K",
        bounds=(0, 10**6),
    )
    allow_inexact: bool = of_run(
        False, "what does not lead to the bits of a run that never failed may be asked for"
    )
    grow: str = of_run(
        "",
        "with a strategy that goes on without a lost rank, it comes back when the others have done step N; these "
        "wait for it (default: never)",
        "step=N",
    )
    groups: RecoveryGroups = of_run(
        RecoveryGroups(),
        "recovery groups, such as 0-1,2-3; only what passes between groups is logged (default: none)",
        "RUNS",
    )
    seed: int = of_both(0, "seed of everything random", "S", bounds=(0, 2**63 - 1))
    log_servers: int = option(1, "log servers, as if on N machines", "N", bounds=(1, 16))
    copies: int = option(1, "copies of every record", "C")
    spares: int = option(1, "warm spare processes", "N", bounds=(0, 64))
    helpers: int = of_run(0, "ranks that share a replay", "N", bounds=(0, 64))
    checkpoint_dir: str = option(
        "",
        "checkpoints of the run with faults in an object store, below s3://BUCKET/PREFIX, gs://… or az://…; they stay "
        "there (default: in the drill's directory)",
        "URL",
    )
    model: str = of_both("default", known=tuple(MODELS))
    device: str = of_both("cpu", "the stages' device, as torch names it", "DEVICE")
    updates: str = of_both(
        "after_backward", "when buckets of gradients are applied", known=("after_backward", "wait_free")
    )
    data_parallel: str = of_both("session", "who averages gradients over replicas", known=("session", "ddp"))
    reduction: str = of_both(
        "auto",
        "the order in which gradients are summed; auto: by replica, from three replicas on",
        known=("auto", "ordered", "fast"),
    )
    undo: str = of_run(
        "exact", "how a half-applied step is taken back", known=("exact", "arithmetic", "preimage")
    )
    optimizer: str = of_both(
        "adamw", "amsgrad is AdamW with amsgrad, sgd has Nesterov momentum", known=OPTIMIZERS
    )
    rehearse: str = option(
        "off", "rehearse recoveries while the job runs", "WHEN", known=("start", "always", "off")
    )
    secure: bool = option(False, "use mutual TLS and tokens, all made for this drill")
    json_path: Path | None = of_result(None, "write the report as JSON", "PATH", flag="--json")
    html_path: Path | None = of_result(None, "write the report as a page", "PATH", flag="--html")
    directory: Path | None = of_result(
        None, "keep everything of both runs in this directory (must be empty)", "DIR"
    )
    keep: bool = of_result(False, "keep the temporary directory (it is kept if the drill fails)")
    twin: Path | None = of_result(
        None,
        "directory of the failure-free run; the run is used if it is finished there, else made there",
        "DIR",
    )
    faults: tuple[Fault, ...] = option(
        (), f"a fault, see below (default: {DEFAULT_KILL})", "SPEC", flag="--kill"
    )

    def __post_init__(self) -> None:
        for problem in options.problems(self._values(), OPTIONS):
            raise UsageError(problem)
        if self.strategy == fault_specs.SNAPSHOT and not self.snapshot_every:
            object.__setattr__(self, "snapshot_every", SNAPSHOT_EVERY)
        for problem in self._problems():
            raise UsageError(problem)

    def _problems(self) -> Iterator[str]:
        """Yields why options do not go together."""
        copies_max = min(COPIES_MAX, self.log_servers)
        if not 1 <= self.copies <= copies_max:
            yield f"--copies must be 1 to {copies_max} (--log-servers {self.log_servers}), not {self.copies}"
        if self.checkpoint_dir:
            object_store(self.checkpoint_dir)
        if not self.faults:
            yield "a drill without a fault shows nothing: give at least one --kill"
        shape = self.topology
        stages = {rank: shape.stages_of(rank) for rank in range(shape.ranks)}
        if problem := self.groups.problem(shape.stages, stages):
            yield f"--{problem}"
        yield from self._data_parallel_problems()
        yield from fault_specs.problems(self)
        yield from shrinking.problems(self)
        if self.snapshot_every and Strategy.SNAPSHOT not in SETTINGS[self.strategy].permits:
            yield f"--snapshot-every {self.snapshot_every} needs --strategy snapshot or auto"
        victims = shrinking.victims(self)
        grouped = {
            rank: {other for own in stages[rank] for other in self.groups.stages(own)} for rank in victims
        }
        if self.helpers and victims and all(grouped[rank] > set(stages[rank]) for rank in victims):
            yield (
                f"--helpers {self.helpers}: they share the replay of a rank that is a recovery group by itself; "
                f"leave out --groups {self.groups}, or kill another rank"
            )

    def _data_parallel_problems(self) -> Iterator[str]:
        alone, wait_free = self.topology.replicas == 1, self.updates == "wait_free"
        for flag, value, harmless in (
            ("--updates", self.updates, "after_backward"),
            ("--data-parallel", self.data_parallel, "session"),
            ("--reduction", self.reduction, "auto"),
            ("--strategy", self.strategy if self.strategy == "replica" else "", ""),
        ):
            if alone and value != harmless:
                yield f"{flag} {value} needs replicas: add --replicas 2 or more"
        if self.undo != "exact" and not wait_free:
            yield f"--undo {self.undo}: nothing is undone with --updates after_backward; add --updates wait_free"
        if self.data_parallel == "session":
            return
        if wait_free:
            yield "--data-parallel ddp reduces by itself: leave out --updates wait_free"
        if self.reduction == "fast":
            yield "--data-parallel ddp adds in the order of data-parallel ranks: leave out --reduction fast"
        if self.topology.splits_backward:
            yield (
                f"--data-parallel ddp does not go with --schedule {self.topology.schedule}: "
                "DistributedDataParallel does not see gradients of weights that are computed apart; "
                "use --data-parallel session"
            )

    @property
    def exact_reduction(self) -> bool:
        """Returns whether the sum is independent of the layout of the backend's buffers: gradients are summed in the
        order of data-parallel ranks, or there are two addends, which have only one order."""
        return self.topology.replicas < 3 or self.reduction != "fast"

    @property
    def shrinks(self) -> bool:
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
        return self.strategy == "lossy-forward"

    @property
    def grown_at(self) -> int | None:
        """Returns the version at which lost ranks rejoin; None: they do not."""
        return shrinking.grown_at(self.grow)

    def _values(self) -> dict[str, Any]:
        return options.values_of(self.topology, Topology) | options.values_of(self, DrillConfig)

    def arguments(self) -> list[str]:
        """Returns the command line of this configuration, without the options that name result files."""
        return options.words(self._values(), OPTIONS, Reach.DRILL, Reach.RUN, Reach.BOTH)

    def rerun(self) -> str:
        """Returns the exact command, quoted for a shell."""
        return shlex.join(["swift-ft", "drill", *self.arguments()])

    def trainer_arguments(self) -> list[str]:
        """Returns the trainer's arguments, the same for the failure-free twin."""
        return options.words(self._values(), OPTIONS, Reach.BOTH)

    def recovery_arguments(self) -> list[str]:
        """Returns additional trainer arguments of the run with faults: recovery settings, which change no bit of the
        twin."""
        rest = ["--rest-s", str(TOKEN_LIFETIME_S + 0.5)] if self.secure else []
        return [*options.words(self._values(), OPTIONS, Reach.RUN), *rest]

    def identity(self) -> dict[str, object]:
        """Returns the settings and versions that two runs must share for their digests to be comparable."""
        return {"trainer": self.trainer_arguments(), "versions": versions()}

    def shape(self) -> dict[str, object]:
        shape = self.topology
        told = ("log_servers", "copies", "spares", "model", "updates", "data_parallel", "optimizer", "secure")
        return {
            **asdict(shape),
            "ranks": shape.ranks,
            "stages": shape.stages,
            "stages_of_rank": {str(rank): list(shape.stages_of(rank)) for rank in range(shape.ranks)},
            "groups": str(self.groups),
            **{name: getattr(self, name) for name in told},
        }


OPTIONS = options.options_of(Topology, DrillConfig)


def versions() -> dict[str, str]:
    """Returns the versions of everything that can change bits or behaviour, without importing it."""
    by_package = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("swift-ft", "torch", "numpy", "grpcio", "protobuf"):
        try:
            by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_package[name] = "not installed"
    return by_package

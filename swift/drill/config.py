"""One drill, checked: what `swift-ft drill` was asked for, and the command that asks for it again."""

import json
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from swift.drill import faults as fault_specs
from swift.drill.faults import Fault
from swift.drill.topology import Topology
from swift.errors import UsageError

MODELS = ("tiny", "default")
STRATEGIES = ("auto", "replay", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillConfig:
    """Frozen and valid once it exists; nothing has been started yet."""

    topology: Topology
    faults: tuple[Fault, ...]
    strategy: str = "auto"
    seed: int = 0
    spares: int = 1
    """Warm spare processes the launcher keeps."""
    model: str = "default"
    json_path: Path | None = None
    html_path: Path | None = None
    directory: Path | None = None
    """Where everything of the run is kept; None: a temporary directory, removed at the end."""
    keep: bool = False
    """Keep the temporary directory as well."""
    twin: Path | None = None
    """Directory of a failure-free run to compare with: used if finished there, made there if not."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"unknown model {self.model!r}: {' or '.join(MODELS)}")
        if self.strategy not in STRATEGIES:
            raise UsageError(f"unknown strategy {self.strategy!r}: one of {', '.join(STRATEGIES)}")
        if not 0 <= self.spares <= 64:
            raise UsageError(f"--spares must be 0 to 64, not {self.spares}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be 0 to 2**63 - 1, not {self.seed}")
        if not self.faults:
            raise UsageError("a drill without a fault shows nothing: give at least one --kill")
        fault_specs.check(self.faults, self.topology, strategy=self.strategy)

    def arguments(self) -> list[str]:
        """The command line that makes this configuration, without where its results go."""
        shape = self.topology
        words = ["--stages", shape.ranks, "--steps", shape.steps, "--microbatches", shape.microbatches]
        words += ["--schedule", shape.schedule, "--model", self.model, "--seed", self.seed]
        words += ["--checkpoint-every", shape.checkpoint_every, "--spares", self.spares]
        words += ["--strategy", self.strategy]
        for fault in self.faults:
            words += ["--kill", fault]
        return [str(word) for word in words]

    def rerun(self) -> str:
        """The exact command, for a shell."""
        return shlex.join(["swift-ft", "drill", *self.arguments()])

    def trainer_arguments(self) -> list[str]:
        """What the trainer of the drill is started with; the same for the failure-free twin."""
        shape = self.topology
        words = ["--stages", shape.ranks, "--replicas", shape.replicas, "--steps", shape.steps]
        words += ["--schedule", shape.schedule, "--microbatches", shape.microbatches, "--seed", self.seed]
        words += ["--model", self.model, "--checkpoint-every", shape.checkpoint_every]
        return [str(word) for word in words]

    def identity(self) -> dict[str, object]:
        """What two runs must share for their digests to be comparable."""
        return {"trainer": self.trainer_arguments(), "versions": versions()}

    def shape(self) -> dict[str, object]:
        """`topology` of the report."""
        shape = self.topology
        return {
            "ranks": shape.ranks * shape.replicas,
            "pipeline_ranks": shape.ranks,
            "replicas": shape.replicas,
            "stages": shape.stages,
            "stages_of_rank": {str(rank): list(shape.stages_of(rank)) for rank in range(shape.ranks)},
            "schedule": shape.schedule,
            "microbatches": shape.microbatches,
            "steps": shape.steps,
            "checkpoint_every": shape.checkpoint_every,
            "spares": self.spares,
            "model": self.model,
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

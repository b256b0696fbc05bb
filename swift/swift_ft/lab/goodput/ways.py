"""A cluster, and parameters of each strategy in the model: the cost of a fault, and the overhead without faults.

M microbatches, P stages; a node has w of the stages. After a fault, all work since the strategy's last resting point is
repeated: a checkpoint, a snapshot, or the start of the step. The parts of recoveries are those of
`swift_ft.lab.goodput.figures`, so every strategy is modelled on the same machine.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.lab.command_line import check_ranges
from swift_ft.lab.goodput.figures import RESTART_RANKS, Figure
from swift_ft.lab.plan.interval import best_work_s

RESTART, GIVEN, CHECKPOINT, REINIT = "restart", "restart, given", "checkpoint", "reinit"
SNAPSHOT, REPLICA, REPLAY, SHARED, AUTO = "snapshot", "replica", "replay", "replay, shared", "auto"
SHRINK, ADAPTIVE, DROP, LOSSY = "shrink", "adaptive", "shrink, drop", "lossy-forward"
NAMES = (
    *(RESTART, GIVEN, CHECKPOINT, REINIT),
    *(SNAPSHOT, REPLICA, REPLAY, SHARED, AUTO),
    *(SHRINK, ADAPTIVE, DROP, LOSSY),
)


RANKS_MAX = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A job on `ranks` ranks with `replicas` copies of the model."""

    ranks: int
    ranks_per_node: int
    replicas: int
    stages: int
    """Stages of the pipeline."""
    microbatches: int
    """Microbatches of each replica in a step."""
    spares: int | None = None
    """Spare nodes that replace lost ones. None: always enough."""

    def __post_init__(self) -> None:
        check_ranges(
            ("--ranks", self.ranks, 2, RANKS_MAX),
            ("--ranks-per-node", self.ranks_per_node, 1, self.ranks),
            ("--replicas", self.replicas, 1, self.ranks),
            ("--stages", self.stages, 1, 65536),
            ("--microbatches", self.microbatches, 1, 65536),
            ("--spares", self.spares or 0, 0, RANKS_MAX),
        )
        if self.ranks % self.ranks_per_node:
            raise UsageError(
                f"--ranks {self.ranks}: give a multiple of the {self.ranks_per_node} ranks of a node, or "
                "--ranks-per-node"
            )
        if self.ranks % self.replicas:
            raise UsageError(f"--replicas {self.replicas}: give a number that divides {self.ranks} ranks")
        if self.stages > self.replica_ranks:
            raise UsageError(
                f"--stages {self.stages}: a replica has {self.replica_ranks} ranks; give as many at most, or another "
                "--replicas"
            )

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def replica_ranks(self) -> int:
        return self.ranks // self.replicas

    @property
    def holders(self) -> int:
        """Number of nodes that hold the same part of the model (all of it, if a node has several replicas)."""
        return min(self.replicas, self.nodes)

    @property
    def parts(self) -> int:
        return max(1, math.ceil(self.nodes / self.replicas))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    name: str
    words: str
    stop_parts: tuple[tuple[str, float], ...]
    """Parts of the time that all ranks wait after each fault, without the repeated work."""
    work_s: float
    """Work between two resting points."""
    stall_s: float = 0.0
    """Time that a resting point stalls training."""
    ratio: float = 1.0
    """Time of repeated work over its first time."""
    every_s: float
    """Work between two checkpoints."""
    save_s: float
    overhead: float = 0.0
    """Overhead of a step, as a share of it."""
    by_checkpoint: bool = False
    """True if the resting points are the checkpoints."""
    speeds: tuple[float, ...] = ()
    """Speed by the number of missing holders, for a strategy that continues without lost nodes; the last one is 0."""
    by_part: bool = False
    """Whether `speeds` is indexed by the missing nodes of the part that lacks most; else by all missing nodes."""
    back_s: float = 0.0
    """Time that all ranks wait when a node returns; the current step is then repeated."""
    spares: int | None = None
    """None: a lost node is replaced at once. Else a node waits for a repair once more nodes than this are missing."""

    @property
    def stop_s(self) -> float:
        return sum(seconds for _, seconds in self.stop_parts)

    @property
    def again_s(self) -> float:
        """Mean time of the work that is repeated after a fault."""
        return self.ratio * (self.work_s + self.stall_s) / 2

    @property
    def share_of_runs(self) -> float:
        """Useful share of the time at full speed: without stalls, checkpoints and overhead."""
        share = self.work_s / (self.work_s + self.stall_s) / (1 + self.overhead)
        return share if self.by_checkpoint else share * self.every_s / (self.every_s + self.save_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Checked command line of ``--goodput``."""

    cluster: Cluster
    mtbf_s: float
    """Mean time between two faults of a node."""
    figures: Mapping[str, Figure]
    every_s: float | None = None
    """Checkpoint interval. None: the best one."""
    snapshot_every_s: float | None = None
    source: str = ""
    """Description of the source of the faults."""

    @property
    def repair_s(self) -> float:
        return self.figures["repair_s"].value

    @property
    def job_mtbf_s(self) -> float:
        return self.mtbf_s / self.cluster.nodes


class Maker:
    def __init__(self, request: Request) -> None:
        self._cluster, self._request = request.cluster, request
        self._of = {name: figure.value for name, figure in request.figures.items()}
        self._mtbf_s = request.job_mtbf_s
        self.best_s = max(self._of["step_s"], best_work_s(self._of["save_s"], 1.0, self._mtbf_s))
        """Checkpoint interval with the greatest useful share if all work since the checkpoint is repeated."""
        self._session = self._of["session_s_per_step"] / self._of["step_s"]
        self._logging = self._session + self._of["log_share"]
        self._load = ("load", self._of["load_s"])
        self._copy = ("copy", self._of["state_bytes"] / self._of["copy_bytes_per_s"])

    def _swift(self, *further: tuple[str, float], detect: bool = True) -> tuple[tuple[str, float], ...]:
        """Returns the common parts of swift's recoveries, with `further` ones."""
        parts = [("detect", self._of["detect_s"])] if detect else []
        parts.append(("coordinate", self._of["coordinate_s_per_rank"] * self._cluster.ranks))
        return (*parts, ("rebuild", self._of["rebuild_s"]), *further)

    def ways(self) -> list[Way]:
        """Returns the strategies that are possible on this cluster, in the order of `NAMES`."""
        again = self._load, ("reinit", self._of["reinit_s"])
        words = "survivors keep their processes; all ranks load the newest checkpoint"
        made = [*self._restarts(), self._by_checkpoint(CHECKPOINT, words, self._swift(self._load))]
        words = "the training function begins again in the same processes, at the checkpoint"
        made.append(self._by_checkpoint(REINIT, words, self._swift(*again)))
        if self._cluster.nodes > 1:
            made.append(self._snapshot())
        replica, step_s = "a replacement copies a replica's state", self._of["step_s"]
        if self._cluster.holders > 1:
            made.append(self._by_copy(REPLICA, replica, step_s, self._session))
        made.append(self._replay(REPLAY, 1))
        copies = 1 + int(self._of["helpers"])
        if self._ratio(copies) < self._ratio(1):
            made.append(self._replay(SHARED, copies))
        if self._cluster.holders > 1:
            words = f"{replica}; else the log is replayed"
            made += [self._by_copy(AUTO, words, step_s, self._logging), *self._going_on()]
        return made

    def _by_checkpoint(
        self, name: str, words: str, parts: tuple[tuple[str, float], ...], every_s: float = 0.0, **more: Any
    ) -> Way:
        """Builds a strategy that repeats all work since the checkpoint, at `ratio` of its time. Without `every_s` it
        has the best interval."""
        options = {"overhead": self._session, "spares": self._cluster.spares} | more
        return Way(
            name=name,
            words=words,
            stop_parts=parts,
            work_s=every_s or self.best_s,
            stall_s=self._of["save_s"],
            every_s=every_s or self.best_s,
            save_s=self._of["save_s"],
            by_checkpoint=True,
            **options,
        )

    def _restarts(self) -> list[Way]:
        of = self._of
        more_s = of["restart_s_per_rank"] * max(0, self._cluster.ranks - RESTART_RANKS)
        parts = (
            ("detect", of["detect_s"]),
            ("start", of["start_s"] + more_s),
            ("rebuild", of["rebuild_s"]),
            self._load,
        )
        words = "all processes start again (torchrun) and load the newest checkpoint"
        made = [self._by_checkpoint(RESTART, f"{words}; the best interval", parts, overhead=0.0)]
        if self._request.every_s is not None:
            every_s, yours = self._request.every_s, f"{words}; your interval"
            made.append(self._by_checkpoint(GIVEN, yours, parts, every_s, overhead=0.0))
        return made

    def _behind(self) -> dict[str, Any]:
        """Returns the checkpoints of a strategy that recovers without them if it can."""
        every_s = self._request.every_s
        return {
            "every_s": max(self.best_s, self._of["behind_s"]) if every_s is None else every_s,
            "save_s": self._of["save_s"],
        }

    def _snapshot(self) -> Way:
        stall_s, step_s = self._of["snapshot_s"], self._of["step_s"]
        every_s = self._request.snapshot_every_s
        if every_s is None:
            every_s = max(step_s, best_work_s(stall_s, 1.0, self._mtbf_s))
        words = "all go back to copies in host memory; the partner of a lost node has its copy"
        return self._by_copy(SNAPSHOT, words, every_s, self._session, stall_s=stall_s)

    def _by_copy(self, name: str, words: str, work_s: float, overhead: float, stall_s: float = 0.0) -> Way:
        """Builds a strategy that copies a state of `work_s` ago at most."""
        return Way(
            name=name,
            words=words,
            stop_parts=self._swift(self._copy),
            work_s=work_s,
            stall_s=stall_s,
            overhead=overhead,
            spares=self._cluster.spares,
            **self._behind(),
        )

    def _ratio(self, copies: int) -> float:
        """Returns (ceil(M / d) + w - 1) / (M + P - 1): docs/planning.md (4), for equal stages."""
        microbatches, stages = self._cluster.microbatches, self._cluster.stages
        own = math.ceil(stages / self._cluster.parts)
        copies = min(copies, stages) if own == 1 else 1  # only a stage by itself is shared
        return (math.ceil(microbatches / copies) + own - 1) / (microbatches + stages - 1)

    def _replay(self, name: str, copies: int) -> Way:
        ratio = self._ratio(copies)
        words = "the lost node loads its checkpoint and replays from the log"
        if name == SHARED:
            words += ", and others share the replay"
            if self._cluster.replicas > 1:
                words += " (today only of a pipeline without replicas)"
        return self._by_checkpoint(
            name,
            words,
            self._swift(self._load, ("half a step", self._of["step_s"] / 2)),
            max(self._of["step_s"], best_work_s(self._of["save_s"], ratio, self._mtbf_s)),
            ratio=ratio,
            overhead=self._logging,
        )

    def _goes_on(self, name: str, words: str, speeds: Iterable[float], **more: Any) -> Way:
        """Builds a strategy that goes on without lost nodes, at the speed for each number of missing holders."""
        back = self._swift(self._copy, ("save", self._of["save_s"]), detect=False)
        return Way(
            name=name,
            words=words,
            stop_parts=self._swift(),
            speeds=(*speeds, 0.0),
            back_s=sum(seconds for _, seconds in back),
            work_s=self._of["step_s"],
            overhead=self._session,
            **self._behind(),
            **more,
        )

    def _going_on(self) -> list[Way]:
        holders, stages = self._cluster.holders, self._cluster.stages
        microbatches, missing = self._cluster.microbatches, range(self._cluster.holders)
        shrink = "the others go on; whole pipelines compute the batches of broken ones after their own"
        speeds = (1 / (1 + math.ceil(lost / (holders - lost))) for lost in missing)
        made = [self._goes_on(SHRINK, shrink, speeds)]
        # Whole backwards that leave the bubbles unused: the column `fused` of `swift-ft plan --adaptive`. M D / (D - f)
        # for holders instead of replicas: a node with several replicas has as large a share of the microbatches.
        adaptive = "the others go on; the peers of a lost node share its microbatches"
        loads = (-(-microbatches * holders // (holders - lost)) for lost in missing)
        speeds = ((microbatches + stages - 1) / (load + stages - 1) for load in loads)
        made.append(self._goes_on(ADAPTIVE, adaptive, speeds, by_part=True))
        if self._cluster.replica_ranks == 1:
            drop = "the others go on without the lost batches (not exact)"
            left = [(holders - lost) / holders for lost in missing]
            made.append(self._goes_on(DROP, drop, left))
            made.append(self._goes_on(LOSSY, f"{drop}; the step under way is finished", left, ratio=0.0))
        return made

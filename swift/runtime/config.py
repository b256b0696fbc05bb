"""The settings of a session, and those that must be equal on all ranks of a job."""

from dataclasses import dataclass

from swift.arguments import metrics_address
from swift.checkpoint import MODES as CHECKPOINT_MODES
from swift.errors import UsageError
from swift.log.codec import CHOICES as CODECS
from swift.log.unlogged import WHEN_FULL
from swift.log.wire import Fsync
from swift.recovery.groups import RecoveryGroups
from swift.recovery.types import (
    LOST_SHARDS,
    QUICKEST,
    SNAPSHOTTING,
    STRATEGIES,
    lost_shard_problem,
    reroutes,
    shrinks,
)

UPDATES = ("after_backward", "wait_free")
UNDOS = ("exact", "arithmetic", "preimage")
REDUCTIONS = ("auto", "ordered", "fast")
SNAPSHOT_EVERY = 10
NON_FINITE = ("warn", "fail", "ignore")


_ADAPTIVE = {
    "exact_gradients": True,
    "split_backward": True,
    "adaptive_memory": 1.0,
    "staggered": False,
    "move_losses": False,
    "fetch_batches": False,
}
"""Settings of strategy "adaptive", as they are if nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Settings of one rank's session; those in `agreed` must be equal on all ranks."""

    seed: int = 0
    """The root of all randomness in steps: of torch, `random` and numpy, inside the stages and outside."""
    checkpoint_every: int = 100
    """Optimizer steps between two checkpoints. The log holds the steps since the newest complete one."""
    checkpoint_mode: str = "async"
    """When training goes on after a checkpoint: "async" (once the state is copied in memory; the copy is written beside
    training), or "sync" (once this rank's part is durable)."""
    strategy: str = "auto"
    """How a lost rank's state is restored: "auto" (from a replica, else from the log, else all ranks from the
    checkpoint), "replica", "replay", "checkpoint", "shrink" (the others go on without the lost rank, until another
    process comes for it; jobs without shards; docs/strategies.md), "adaptive" (as "shrink", for pipelines with
    replicas: the peers of a lost rank share its microbatches), "rollback" (as "shrink", but the
    step that was interrupted is always taken back and done again), "lossy-forward" (for replicas of a whole model: as
    "shrink", but a step that was interrupted in the reduction of its gradients is finished with those that are left;
    not exact: `allow_inexact`), "snapshot" (all ranks go back to the newest copies of their states in host memory:
    each rank keeps its own and another one's), "reinit" (as "checkpoint", but the training function begins again in
    every process: `swift.reinit`)."""
    lost_shard: str = ""
    """With "shrink" and "rollback", and with "auto" if no process takes a lost rank's place (empty: then the job ends
    or waits): what becomes of the batches of a lost rank. "redistribute" (the default of the first two): the others
    compute them, and the job stays exact. "reroute" (with "auto", for pipelines): its peers share them, as with
    "adaptive". "quickest" (with "auto"): "reroute" for pipelines, else "redistribute". "drop": nobody does; the mean is
    over those that are left, the learning rate stays what it is, and the job is not exact (`allow_inexact`). With
    "lossy-forward" they are always dropped."""
    exact_gradients: bool = True
    """With "adaptive": gradients of other ranks' microbatches are kept apart and added in the order of origins. False:
    they are added to a rank's own, which saves memory and messages, and is not exact (`allow_inexact`).
    """
    split_backward: bool = True
    """With "adaptive": while ranks are missing, gradients of weights are computed after those of inputs, where nobody
    waits for them, if a trial in the first step gives the same bits. It costs a step at the start."""
    adaptive_memory: float = 1.0
    """With "adaptive": how many times the activations that the schedule holds at a time a rank may hold while others
    are missing. From 2 on there are hardly any gaps in which it waits."""
    staggered: bool = False
    """With "adaptive": a rank begins the next step once its own stage has stepped. What it needs of other stages (the
    vote over the step, the norm of `Session.clip_grad_norm_`) it learns in the next step; if that demands clipping, the
    step is taken back and done again. It keeps up to two copies of its state (docs/adaptive.md)."""
    move_losses: bool = False
    """With "adaptive": a lost rank's place is taken by a process beside a rank of another stage, which then ends, once
    the steps since the loss have taken so much longer that it would have paid. One process is ended on purpose; the
    others go on (docs/adaptive.md)."""
    fetch_batches: bool = False
    """With "adaptive": loaders of `Session.loader` are made by ranks of their own pipeline alone, because others cannot
    (their machines lack the files, say). The peers of a lost rank get what they give from a rank of its pipeline that
    is left. So all ranks of a pipeline make the same loaders, and the job needs one rank of each pipeline."""
    snapshot_every: int = 0
    """Optimizer steps between two copies of the state in host memory, for strategy="snapshot" (0: 10), and for "auto",
    which goes back to them where that takes less time than a replay (0: there are none)."""
    allow_inexact: bool = False
    """Strategies may be used that do not lead to the bits of a run that never failed."""
    groups: str = ""
    """Recovery groups, such as "0-1,2-3": runs of stages that fail and recover together. Only what passes between
    groups is logged. Empty: every rank is a group by itself."""
    replicas: int = 1
    """The number D of data-parallel replicas of every stage. rank = (pipeline rank * D + replica) * shards + shard."""
    shards: int = 1
    """The number of ranks that share one replica's state (FSDP2 on `session.mesh`)."""
    updates: str = "after_backward"
    """When the optimizer updates a bucket of parameters: "after_backward", or "wait_free" (as soon as it is
    reduced)."""
    undo: str = "exact"
    """How a wait-free step is taken back: "exact" (keeps up to 3 bytes per parameter), "arithmetic" (keeps nothing, not
    exact), "preimage" (keeps a copy of the buckets in flight)."""
    reduction: str = "auto"
    """The order in which gradients are summed: "fast" (the backend's), "ordered" (by `dp_rank`), "auto" (ordered from 3
    ranks on)."""
    bucket_bytes: int = 25 << 20
    """Bytes of gradients that are reduced and applied together."""
    measure_undo: bool = False
    """Keep copies that show the true error of an arithmetic undo (for drills)."""
    codec: str = "none"
    """The codec of this rank's log streams: "none", "lz4" (for zeros after ReLU), "bitshuffle" (for floats), or "auto"
    (chosen for each stream, and only while it makes logging faster)."""
    log_fsync: str = ""
    """When a record of this rank counts as durable: "always" (after fdatasync), "interval" or "never" (after the
    write). Empty: the log server's own setting."""
    log_queue_bytes: int = 256 << 20
    """Bytes of shared memory for records that the log has not acknowledged. A larger record is refused."""
    log_when_full: str = "block"
    """What happens when that memory is full: "block" (training waits for the log), or "drop" (training never waits).
    With "drop", steps that were not logged are declared so, and a checkpoint is made soon. A failure before it is
    complete costs the steps since the previous one."""
    helpers: int = 3
    """At most this many other ranks help to replay each lost stage, if trainers call `Session.help_replay`. A recovery
    group is replayed in copies: at most this many besides its own, each with as many ranks as the group has."""
    last_checkpoint: bool = True
    """Save a checkpoint of the version at which the run ends. With it the job can be started again with more steps, and
    a rank that is lost after the end can be restored. False: the trainer saves the end by itself."""
    paranoid: bool = False
    """Compute the first step twice from one state, and do so after every recovery, and compare inputs, losses, sends
    and gradients. If they differ at the start, the job is refused; after a recovery, it is reported as not exact."""
    non_finite_loss: str = "warn"
    """What happens if a loss is nan or infinite: "warn" (a message at the first one), "fail" (the job ends, and may be
    started again from its newest checkpoint), "ignore"."""
    metrics_listen: str = ""
    """HOST:PORT (loopback) where this rank shows Prometheus metrics. A port other than 0 is raised by the local rank.
    Empty: the value of SWIFT_METRICS_LISTEN; without that, metrics are off."""
    suspicion_timeout_s: float = 30.0
    """How long a rank waits for a failure to be announced after a communication error. If the coordinator answers and
    announces none by then, the error is raised as the trainer's own. Time in which it does not answer does not
    count."""

    replay_stall_s: float = 180.0
    """A replay that makes no progress for this long is given up, and a checkpoint is restored. (The trainer then waits
    for something that the session does not know.)"""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every={self.checkpoint_every}; give at least 1")
        if self.snapshot_every < 0:
            raise UsageError(f"snapshot_every={self.snapshot_every}; give 0 or more")
        if self.snapshot_every and self.strategy not in SNAPSHOTTING:
            raise UsageError(
                f"snapshot_every={self.snapshot_every} with strategy={self.strategy!r}: nobody goes back to snapshots; "
                f"use strategy='snapshot' or 'auto'"
            )
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy={self.strategy!r}; give one of {', '.join(STRATEGIES)}")
        try:
            object.__setattr__(self, "groups", str(RecoveryGroups.parse(self.groups)))
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.codec not in CODECS:
            raise UsageError(f"codec={self.codec!r}; give one of {', '.join(CODECS)}")
        if self.log_fsync not in ("", *Fsync):
            raise UsageError(f"log_fsync={self.log_fsync!r}; give one of {', '.join(Fsync)}")
        if self.log_when_full not in WHEN_FULL:
            raise UsageError(f"log_when_full={self.log_when_full!r}; give one of {', '.join(WHEN_FULL)}")
        for name, count in (("replicas", self.replicas), ("shards", self.shards)):
            if count < 1:
                raise UsageError(f"{name}={count}; give at least 1")
        for name, value, allowed in (
            ("checkpoint_mode", self.checkpoint_mode, CHECKPOINT_MODES),
            ("updates", self.updates, UPDATES),
            ("undo", self.undo, UNDOS),
            ("reduction", self.reduction, REDUCTIONS),
            ("non_finite_loss", self.non_finite_loss, NON_FINITE),
            ("lost_shard", self.lost_shard or "redistribute", (*LOST_SHARDS, QUICKEST)),
        ):
            if value not in allowed:
                raise UsageError(f"{name}={value!r}; give one of {', '.join(allowed)}")
        if self.updates == "wait_free" and self.replicas * self.shards == 1:
            raise UsageError(
                "updates='wait_free' needs replicas: without them nothing is reduced; leave it out"
            )
        self._check_shrink()
        if not self.adaptive_memory >= 1:
            raise UsageError(f"adaptive_memory={self.adaptive_memory}; give at least 1")
        for name, usual in _ADAPTIVE.items():
            if getattr(self, name) != usual and not self.reroutes and self.lost_shard != QUICKEST:
                raise UsageError(
                    f"{name}={getattr(self, name)} with strategy={self.strategy!r}: it is for strategy='adaptive', and "
                    "for 'auto' with lost_shard='reroute'"
                )
        if self.staggered and self.strategy != "adaptive":
            raise UsageError(
                f"staggered=True with strategy={self.strategy!r}: only strategy='adaptive' takes whole steps back; "
                "leave it out"
            )
        if self.paranoid and self.updates == "wait_free":
            raise UsageError(
                "paranoid with updates='wait_free': half a step is applied before it can be compared; use "
                "updates='after_backward' while you look for a difference"
            )
        if self.helpers < 0:
            raise UsageError(f"helpers={self.helpers}; give 0 or more")
        if self.bucket_bytes < 1:
            raise UsageError(f"bucket_bytes={self.bucket_bytes}; give at least 1")
        if self.log_queue_bytes < 1 << 20:
            raise UsageError(f"log_queue_bytes={self.log_queue_bytes}; give at least {1 << 20}")
        metrics_address(self.metrics_listen, insecure=False, flag="metrics_listen")
        if self.suspicion_timeout_s <= 0:
            raise UsageError(f"suspicion_timeout_s={self.suspicion_timeout_s}; give more than 0")
        if self.replay_stall_s <= 0:
            raise UsageError(f"replay_stall_s={self.replay_stall_s}; give more than 0")

    def _check_shrink(self) -> None:
        if problem := lost_shard_problem(self.strategy, self.lost_shard):
            raise UsageError(f"lost_shard={self.lost_shard!r} with strategy={self.strategy!r}: {problem}")
        if not self.shrinks:
            return
        moves = self.strategy == "shrink" and not self.drops
        if self.shards > 1 or (self.replicas == 1 and not moves):
            raise UsageError(
                f"strategy={self.strategy!r} with replicas={self.replicas} and shards={self.shards}: others go on "
                "for a lost rank if they hold all of its state; give at least 2 replicas, without shards"
            )
        if not self.exact_gradients and not self.allow_inexact:
            raise UsageError(
                "exact_gradients=False does not lead to the bits of a run that never failed: say allow_inexact=True "
                "(--allow-inexact), or leave it out"
            )
        if self.strategy == "auto" and self.snapshot_every:
            raise UsageError(
                f"lost_shard={self.lost_shard!r} with snapshot_every={self.snapshot_every}: a rank that is not there "
                "keeps no snapshot; leave one out"
            )
        if self.finishes_cut_steps and not self.allow_inexact:
            raise UsageError(
                f"strategy={self.strategy!r} does not lead to the bits of a run that never failed: say "
                "allow_inexact=True (--allow-inexact), or use strategy='rollback'"
            )
        if self.lost_shard == "drop" and not self.allow_inexact:
            raise UsageError(
                "lost_shard='drop' does not lead to the bits of a run that never failed: say allow_inexact=True "
                "(--allow-inexact), or use lost_shard='redistribute'"
            )
        if self.redistributes and self.updates == "wait_free":
            raise UsageError(
                "lost_shard='redistribute' with updates='wait_free': gradients are applied before those of a lost rank "
                "are computed; use updates='after_backward'"
            )
        if self.redistributes and self.reduction == "fast" and self.replicas > 2:
            raise UsageError(
                "lost_shard='redistribute' with reduction='fast': the sum would have another order with fewer ranks; "
                "use reduction='ordered'"
            )

    @property
    def steps_to_snapshot(self) -> int:
        """Steps between two snapshots; 0: none is taken."""
        return self.snapshot_every or (SNAPSHOT_EVERY if self.strategy == "snapshot" else 0)

    @property
    def shrinks(self) -> bool:
        """The job goes on without a rank that is lost; with "auto", if no other process takes its place."""
        return shrinks(self.strategy) or (self.strategy == "auto" and bool(self.lost_shard))

    @property
    def redistributes(self) -> bool:
        """The batches of a lost rank are computed by others."""
        return self.shrinks and not self.drops and self.replicas > 1

    @property
    def reroutes(self) -> bool:
        """Microbatches of a lost rank are shared by its peers, in the step of all."""
        return reroutes(self.strategy, self.lost_shard)

    @property
    def drops(self) -> bool:
        """Nobody computes the batches of a lost rank."""
        return self.finishes_cut_steps or (self.shrinks and self.lost_shard == "drop")

    @property
    def finishes_cut_steps(self) -> bool:
        """A step whose reduction a loss cuts short is finished with the gradients of those that are left."""
        return self.strategy == "lossy-forward"

    def not_shared(self, problem: str, instead: str = "") -> UsageError:
        """The job's way to do what a lost rank would have done does not go with this. `instead`: what does."""
        way, usual = "lost_shard='redistribute'", "use lost_shard='drop'"
        if self.reroutes:
            way, usual = "lost_shard='reroute'", "use lost_shard='redistribute'"
        if self.strategy == "adaptive":
            way, usual = "strategy='adaptive'", "use strategy='shrink'"
        return UsageError(f"{way} {problem}; {instead or usual}")

    def _of_lost(self) -> str:
        return "drop" if self.drops else "reroute" if self.reroutes else "redistribute"

    def agreed(self) -> dict[str, str]:
        """The settings that must be equal on all ranks, as text: the coordinator compares them at each join."""
        return {
            "seed": str(self.seed),
            "checkpoint_every": str(self.checkpoint_every),
            "strategy": self.strategy,
            "groups": self.groups,
            "replicas": str(self.replicas),
            "shards": str(self.shards),
            "updates": self.updates,
            "undo": self.undo,
            "reduction": self.reduction,
            "bucket_bytes": str(self.bucket_bytes),
            "helpers": str(self.helpers),
            "last_checkpoint": str(self.last_checkpoint),
            **({"paranoid": "True"} if self.paranoid else {}),
            **({"snapshot_every": str(self.steps_to_snapshot)} if self.steps_to_snapshot else {}),
            **({name: str(getattr(self, name)) for name in _ADAPTIVE} if self.reroutes else {}),
            **({"lost_shard": self._of_lost()} if self.shrinks else {}),
        }

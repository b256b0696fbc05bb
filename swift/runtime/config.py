"""What a session is told, and what all ranks of a job must agree on."""

from dataclasses import dataclass

from swift.arguments import metrics_address
from swift.errors import UsageError
from swift.log.codec import CHOICES as CODECS
from swift.log.unlogged import WHEN_FULL
from swift.log.wire import Fsync
from swift.names import leaves_vacant
from swift.recovery.groups import RecoveryGroups
from swift.recovery.types import STRATEGIES

UPDATES = ("after_backward", "wait_free")
UNDOS = ("exact", "arithmetic", "preimage")
REDUCTIONS = ("auto", "ordered", "fast")
NON_FINITE = ("warn", "fail", "ignore")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Settings of one rank's session; those in `agreed` must be equal on all ranks."""

    seed: int = 0
    """Root of all randomness in steps: of torch, `random` and numpy, inside the stages and outside."""
    checkpoint_every: int = 100
    """Optimizer steps between two checkpoints; the log holds what came after the newest complete one."""
    strategy: str = "auto"
    """How ranks get back after a failure: "auto" (a replica, else the log, else the
    checkpoint), "replica", "replay", "checkpoint"."""
    groups: str = ""
    """Recovery groups: runs of stages that fail and recover together, between which alone the log is kept, such as
    "0-1,2-3". Empty: every rank by itself."""
    replicas: int = 1
    """Data-parallel replicas D of every stage; rank = (pipeline rank * D + replica) * shards + shard."""
    shards: int = 1
    """Ranks that share one replica's state (FSDP2 on `session.mesh`)."""
    updates: str = "after_backward"
    """When buckets are applied: "after_backward", or "wait_free": each as soon as it is reduced."""
    undo: str = "exact"
    """How a wait-free step is taken back: "exact" (up to 3 bytes a parameter), "arithmetic" (no memory, not exact),
    "preimage" (a copy of the buckets in flight)."""
    reduction: str = "auto"
    """Order of additions: "fast" (the backend's), "ordered" (by `dp_rank`), "auto" (ordered from 3 ranks on)."""
    bucket_bytes: int = 25 << 20
    """Gradients that are reduced and applied together."""
    measure_undo: bool = False
    """Keep copies to tell an arithmetic undo's true error (drills)."""
    codec: str = "none"
    """Codec of this rank's log streams: "none", "lz4" (zeros after ReLU), "bitshuffle" (floats), or "auto": by stream,
    and only while it makes the way to the log faster."""
    log_fsync: str = ""
    """When a record of this rank counts as durable: "always" (after fdatasync), "interval" or "never" (after the
    write). Empty: as the log server was started."""
    log_queue_bytes: int = 256 << 20
    """Room for records that the log has not acknowledged, in shared memory; a larger record is refused."""
    log_when_full: str = "block"
    """When that room is used up: "block" (training waits for the log), or "drop" (it never does; what is not logged is
    declared so, and a checkpoint is made soon: a failure before it is there costs what came since the one before)."""
    helpers: int = 3
    """So many other ranks, at most, help to replay each lost stage, if trainers call `Session.help_replay`. A recovery
    group is replayed in copies: so many besides its own, each of as many ranks as the group has."""
    last_checkpoint: bool = True
    """Save the version at which the run ends: the job can be started again with more steps, and a rank that is lost
    after the end comes back. False: the trainer saves the end by itself."""
    paranoid: bool = False
    """Compute the first step twice from one state, and again after every recovery, and compare inputs, losses, what is
    sent and gradients. At the start a difference refuses the job; after a recovery it makes it not exact."""
    non_finite_loss: str = "warn"
    """What a loss that is nan or infinite does: "warn" (said where it begins), "fail" (the job ends, and may be started
    again from its newest checkpoint), "ignore"."""
    metrics_listen: str = ""
    """HOST:PORT (loopback) where this rank shows Prometheus metrics; a port other than 0 is counted up by the local
    rank. Empty: what SWIFT_METRICS_LISTEN says, else nowhere."""
    suspicion_timeout_s: float = 30.0
    """After a communication error without a notice from the coordinator, the error is the trainer's own."""

    replay_stall_s: float = 180.0
    """A replay in which nothing moves for so long (the trainer waits for something that is not the session's) is given
    up, and a checkpoint restored."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every={self.checkpoint_every}; give at least 1")
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
            ("updates", self.updates, UPDATES),
            ("undo", self.undo, UNDOS),
            ("reduction", self.reduction, REDUCTIONS),
            ("non_finite_loss", self.non_finite_loss, NON_FINITE),
        ):
            if value not in allowed:
                raise UsageError(f"{name}={value!r}; give one of {', '.join(allowed)}")
        if self.updates == "wait_free" and self.replicas * self.shards == 1:
            raise UsageError(
                "updates='wait_free' needs replicas: without them nothing is reduced; leave it out"
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
            **({"leave_vacant": "1"} if leaves_vacant() else {}),
        }

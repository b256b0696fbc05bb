"""What a session is told, and what all ranks of a job must agree on."""

from dataclasses import dataclass

from swift.errors import UsageError
from swift.recovery.types import STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Settings of one rank's session; those in `agreed` must be equal on all ranks."""

    seed: int = 0
    """Root of all randomness inside the stages."""
    checkpoint_every: int = 100
    """Optimizer steps between two checkpoints; the log holds what came after the newest complete one."""
    strategy: str = "auto"
    """How ranks get back after a failure: "auto" or "replay" (from the log, where it allows it), "checkpoint"."""
    codec: str = "none"
    """Codec of this rank's log streams: "none" or "lz4" (raw floats hardly compress)."""
    log_queue_bytes: int = 256 << 20
    """Records waiting to be sent; a full queue blocks the trainer."""
    suspicion_timeout_s: float = 30.0
    """After a communication error without a notice from the coordinator, the error is the trainer's own."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every={self.checkpoint_every}; give at least 1")
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy={self.strategy!r}; give one of {', '.join(STRATEGIES)}")
        if self.codec not in ("none", "lz4"):
            raise UsageError(f"codec={self.codec!r}; give 'none' or 'lz4'")
        if self.log_queue_bytes < 1 << 20:
            raise UsageError(f"log_queue_bytes={self.log_queue_bytes}; give at least {1 << 20}")
        if self.suspicion_timeout_s <= 0:
            raise UsageError(f"suspicion_timeout_s={self.suspicion_timeout_s}; give more than 0")

    def agreed(self) -> dict[str, str]:
        return {
            "seed": str(self.seed),
            "checkpoint_every": str(self.checkpoint_every),
            "strategy": self.strategy,
        }

"""What a rank tells of itself while it trains, in numbers: to its metrics, and to the coordinator."""

from dataclasses import asdict

from swift_ft.log.sender import WriterStats
from swift_ft.planner import RankMeasured
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.boundary_log import Channel
from swift_ft.train.log_session import OwnLog


def progress(generation: int, version: int, vote_seconds: float, log: OwnLog) -> dict[str, float]:
    """By the names of `metrics.Progress`."""
    return {
        "generation": generation,
        "version": version,
        "vote_seconds": vote_seconds,
        **asdict(log.stats),
        "queued_bytes": log.queued_bytes,
    }


class Measures:
    """(lease thread) ``now``, every few seconds."""

    def __init__(self, channel: Channel, store: CheckpointStore) -> None:
        self._channel = channel
        self._store = store
        self._held_up = (0.0, 0)  # by the log, when it was looked at last
        self.gradient_bytes: dict[int, int] = {}
        """Of each stage; set by the trainer's thread before its first step."""

    def now(self, stats: WriterStats) -> RankMeasured | None:
        """What the rank's steps take. `stats`: of its log."""
        held_up = (stats.blocked_seconds, stats.dropped_records)
        full, self._held_up = held_up > self._held_up, held_up
        return self._channel.profile.measured(
            self.gradient_bytes, self._store.saved, stats.pace_bytes_per_s or None, log_full=full
        )

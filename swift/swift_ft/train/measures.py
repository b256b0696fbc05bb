"""Measurements that a rank publishes while it trains, in its metrics and to the coordinator."""

from dataclasses import asdict

from swift_ft.log.sidecar_client import WriterStats
from swift_ft.planner import RankMeasured
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.boundary_log import Channel
from swift_ft.train.log_session import OwnLog


def progress(generation: int, version: int, vote_seconds: float, log: OwnLog) -> dict[str, float]:
    """Returns the rank's counters by the field names of `metrics.Progress`."""
    return {
        "generation": generation,
        "version": version,
        "vote_seconds": vote_seconds,
        **asdict(log.stats),
        "queued_bytes": log.queued_bytes,
    }


class Measures:
    """Measurements for the coordinator: (lease thread) ``now``, every few seconds."""

    def __init__(self, channel: Channel, store: CheckpointStore) -> None:
        self._channel = channel
        self._store = store
        self._held_up = (0.0, 0)  # by the log, at the last call of `now`
        self.gradient_bytes: dict[int, int] = {}
        """Stage -> bytes of its gradients; set by the trainer's thread before its first step."""

    def now(self, stats: WriterStats) -> RankMeasured | None:
        """Returns the rank's step measurements, or None if there are none yet. `stats` of its log."""
        held_up = (stats.blocked_seconds, stats.dropped_records)
        full, self._held_up = held_up > self._held_up, held_up
        return self._channel.profile.measured(
            self.gradient_bytes, self._store.saved, stats.pace_bytes_per_s or None, log_full=full
        )

"""What a rank tells of itself while it trains, in numbers: to its metrics, and to the coordinator."""

from collections.abc import Mapping
from dataclasses import asdict

from swift.checkpoint.store import CheckpointStore
from swift.log.stats import WriterStats
from swift.log.writers import Writer
from swift.recovery import RankMeasured
from swift.runtime.channel import Channel


def progress(generation: int, version: int, vote_seconds: float, writer: Writer | None) -> dict[str, float]:
    """By the names of `metrics.Progress`."""
    done: dict[str, float] = {"generation": generation, "version": version, "vote_seconds": vote_seconds}
    if writer is not None:
        done |= {**asdict(writer.stats), "queued_bytes": writer.queued_bytes}
    return done


class Measures:
    """(lease thread) ``now``, every few seconds."""

    def __init__(self, channel: Channel, store: CheckpointStore) -> None:
        self._channel = channel
        self._store = store
        self._held_up = (0.0, 0)  # by the log, when it was looked at last

    def now(self, writer: Writer | None, gradient_bytes: Mapping[int, int]) -> RankMeasured | None:
        """What the rank's steps take."""
        stats = writer.stats if writer is not None else WriterStats()
        held_up = (stats.blocked_seconds, stats.dropped_records)
        full, self._held_up = held_up > self._held_up, held_up
        return self._channel.profile.measured(
            gradient_bytes, self._store.saved, stats.pace_bytes_per_s or None, log_full=full
        )

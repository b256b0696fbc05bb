"""Metrics of a rank, derived from its events and from the counters of its writer and engine.

(session) ``serve_metrics`` if an address is configured → its result, to stop. Counts start with the process.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.cli_parser import metrics_address, write_address
from swift_ft.errors import UsageError
from swift_ft.metrics import (
    COUNTER,
    DURATION_S,
    GAUGE,
    HISTOGRAM,
    INFO,
    Distribution,
    Exposition,
    Family,
    Samples,
    plain,
)

ENV_METRICS_DIR = "SWIFT_METRICS_DIR"
"""Environment variable: directory in which each rank that serves metrics writes JOB-rankN.json, a target file for
Prometheus' file_sd_configs."""

FAMILIES = (
    Family("swift_trainer_info", INFO, "Job and rank, as labels."),
    Family("swift_trainer_generation", GAUGE, "The generation that this rank trains in."),
    Family("swift_trainer_version", GAUGE, "Optimizer steps in its state."),
    Family("swift_trainer_steps_total", COUNTER, "Steps done, without those replayed."),
    Family("swift_trainer_step_seconds", HISTOGRAM, "One step, without those replayed."),
    Family("swift_trainer_replayed_steps_total", COUNTER, "Steps done again out of the log."),
    Family(
        "swift_trainer_replay_left_steps",
        GAUGE,
        "Steps that its replay still has to do; 0: it does not replay.",
    ),
    Family(
        "swift_trainer_replay_left_seconds",
        GAUGE,
        "How long the replay will still take; absent while that is unknown.",
    ),
    Family("swift_trainer_recoveries_total", COUNTER, "Recoveries that this rank took part in to their end."),
    Family("swift_trainer_recovery_seconds", HISTOGRAM, "From the notice of a loss to training again."),
    Family(
        "swift_trainer_checkpoint_failures_total",
        COUNTER,
        "Checkpoints that could not be written; one counts once for each reason.",
    ),
    Family("swift_trainer_commit_vote_seconds_total", COUNTER, "Time in the barrier before updates."),
    Family("swift_trainer_logged_records_total", COUNTER, "Tensors that the log has acknowledged."),
    Family("swift_trainer_logged_bytes_total", COUNTER, "Bytes of these, before compression."),
    Family("swift_trainer_verified_records_total", COUNTER, "Tensors computed again, equal to the log's."),
    Family("swift_trainer_resent_records_total", COUNTER, "Records sent more than once."),
    Family(
        "swift_trainer_log_blocked_seconds_total", COUNTER, "Time that training waited for the log's queue."
    ),
    Family(
        "swift_trainer_log_dropped_records_total",
        COUNTER,
        "Tensors that were not logged, because its queue was full.",
    ),
    Family("swift_trainer_log_dropped_bytes_total", COUNTER, "Bytes of these."),
    Family("swift_trainer_log_queued_bytes", GAUGE, "Bytes in that queue, not acknowledged yet."),
)


_COUNTED = {
    "generation": "generation",
    "version": "version",
    "commit_vote_seconds_total": "vote_seconds",
    "logged_records_total": "records",
    "logged_bytes_total": "bytes",
    "verified_records_total": "verified",
    "resent_records_total": "resent",
    "log_blocked_seconds_total": "blocked_seconds",
    "log_dropped_records_total": "dropped_records",
    "log_dropped_bytes_total": "dropped_bytes",
    "log_queued_bytes": "queued_bytes",
}
"""Metrics that the engine and the log's writer count -> the names of their counts (`Engine.progress`)."""


class TrainerMetrics:
    def __init__(self, job: str, rank: int, progress: Callable[[], Mapping[str, float]]) -> None:
        self._info = {"job": job, "rank": str(rank)}
        self._progress = progress
        self._lock = threading.Lock()
        self._steps = self._replayed = self._recoveries = self._unsaved = 0
        self._step_s = Distribution(DURATION_S)
        self._recovery_s = Distribution(DURATION_S)
        self._step_began: float | None = None
        self._noticed: float | None = None
        self._replay_left: tuple[int, float | None] = (0, 0.0)
        """Steps and seconds; seconds are None while unknown."""
        self.stop = events.listen(self.count_event)

    def count_event(self, event: str, values: Mapping[str, Any]) -> None:
        now = events.now()
        with self._lock:
            if event in ("replay_end", "notice"):
                self._replay_left = (0, 0.0)
            match event:
                case "step_begin":
                    self._step_began = now
                case "replay_progress":
                    self._replay_left = (values["steps_left"], values["seconds_left"])
                case "step_end" if values["replay"]:
                    self._replayed += 1
                case "step_end" if self._step_began is not None:
                    self._steps += 1
                    self._step_s.observe(now - self._step_began)
                case "checkpoint_failed":
                    self._unsaved += 1
                case "notice" if self._noticed is None:
                    self._noticed = now
                case "resumed" if values["generation"] > 1:  # the first one forms the job
                    self._recoveries += 1
                    if self._noticed is not None:  # a replacement has seen no notice event
                        self._recovery_s.observe(now - self._noticed)
                        self._noticed = None

    def samples(self) -> Samples:
        """Returns the current value of every metric, by name. Called by the thread that serves them."""
        done = self._progress()
        with self._lock:
            return {
                "swift_trainer_info": plain(self._info),
                **{f"swift_trainer_{name}": plain(done[count]) for name, count in _COUNTED.items()},
                "swift_trainer_steps_total": plain(self._steps),
                "swift_trainer_step_seconds": plain(self._step_s),
                "swift_trainer_replayed_steps_total": plain(self._replayed),
                "swift_trainer_replay_left_steps": plain(self._replay_left[0]),
                **(
                    {"swift_trainer_replay_left_seconds": plain(self._replay_left[1])}
                    if self._replay_left[1] is not None
                    else {}
                ),
                "swift_trainer_recoveries_total": plain(self._recoveries),
                "swift_trainer_recovery_seconds": plain(self._recovery_s),
                "swift_trainer_checkpoint_failures_total": plain(self._unsaved),
            }


def serve_metrics(
    listen: str, job: str, rank: int, local_rank: int, progress: Callable[[], Mapping[str, float]]
) -> Callable[[], None]:
    """Serves this rank's metrics on port + local_rank (0: any free port). Returns a function that stops the server.

    If the port is taken, the rank trains without metrics and emits the event ``metrics_not_shown``.
    """
    where = metrics_address(listen, insecure=False, flag="SWIFT_METRICS_LISTEN")
    assert where is not None
    host, port = where
    port += local_rank if port else 0
    metrics = TrainerMetrics(job, rank, progress)
    try:
        shown = Exposition(host, port, FAMILIES, metrics.samples)
    except UsageError as error:
        metrics.stop()
        events.emit("metrics_not_shown", rank=rank, reason=str(error))
        return lambda: None
    shown.announce(None, as_text=False)
    directory = os.environ.get(ENV_METRICS_DIR)
    if directory:
        targets = [{"targets": [shown.address], "labels": {"job": job, "rank": str(rank)}}]
        write_address(Path(directory) / f"{job}-rank{rank}.json", json.dumps(targets), ENV_METRICS_DIR)

    def close() -> None:
        metrics.stop()
        shown.close()

    return close

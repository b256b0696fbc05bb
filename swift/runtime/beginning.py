"""The beginning of a job: version 0, as the trainer has made it, or a checkpoint of another job.

Either is this job's first checkpoint: whatever is lost from here on leads back to that. Of the other job's directory
nothing is written, and nothing is needed any more once this returns.
"""

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import ServiceError, UsageError
from swift.runtime.checkpointing import Saving
from swift.runtime.evidence import write_every_version
from swift.runtime.state import TrainerState


def begin(
    view: pb.View,
    rank: int,
    state: TrainerState,
    store: CheckpointStore,
    saving: Saving,
) -> None:
    """(every rank, FORMING) Returns when the coordinator knows of the first checkpoint."""
    state.align()
    if view.from_job:
        _take(view.from_job, view.from_version, rank, state, store.of_job(view.from_job))
    state.present = True
    write_every_version(state, rank)
    saving.save_first()


def _take(job: str, version: int, rank: int, state: TrainerState, theirs: CheckpointStore) -> None:
    """Raises UsageError: it is not there, or another trainer's. ServiceError: it cannot be read."""
    if not theirs.directory.is_dir():
        raise UsageError(
            f"--from-job {job}: there is no {theirs.directory}; --checkpoint-dir must be the one that job {job} has had"
        )
    try:
        saved = theirs.load(version)
    except ServiceError as error:
        raise ServiceError(f"--from-job {job}: {error}") from None
    try:
        state.load_state_dict(saved)
    except Exception as error:
        raise UsageError(f"--from-job {job}: its version {version} is not this trainer's: {error}") from error
    state.stopped = None  # that was the other job's
    events.emit("began_from", rank=rank, job=job, version=version)

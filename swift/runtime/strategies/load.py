"""REPLAY and CHECKPOINT: the rank's own checkpoint is loaded."""

from typing import Any

from swift import events
from swift.checkpoint.store import CheckpointStore
from swift.errors import ReplayRefused, ServiceError
from swift.recovery import RankPlan
from swift.runtime.state import TrainerState
from swift.runtime.strategies.restore import Restore, Site


class Load(Restore):
    """Loads this rank's checkpoint. What had been done beyond it, and where it came from, is forgotten."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        events.emit("restore_begin", rank=site.rank, generation=site.generation)
        site.state.present = False
        site.copied = None
        saved = load_checkpoint(site.state, site.store, mine.from_version)
        site.tell_lost(saved, mine.from_version)
        site.state.present = True
        site.channel.off_log = False
        events.emit("restore_end", rank=site.rank, generation=site.generation, version=mine.from_version)


def load_checkpoint(state: TrainerState, store: CheckpointStore, version: int) -> dict[str, Any]:
    """What was loaded. Raises ReplayRefused, whatever the trainer's own objects raise: the coordinator may know another
    way."""
    try:
        saved: dict[str, Any] = store.load(version)
        state.load_state_dict(saved)
    except ServiceError as error:
        raise ReplayRefused(str(error)) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"the checkpoint of version {version} cannot be loaded: {why}") from error
    return saved

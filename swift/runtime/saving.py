"""This rank's checkpoints: saved beside training, told to the coordinator, removed once newer ones are complete."""

from swift import events
from swift.checkpoint.store import CheckpointStore
from swift.errors import ReplayRefused, ServiceError, SwiftError
from swift.runtime.member import Member
from swift.runtime.state import TrainerState


class Saving:
    """(trainer's thread) ``save`` → (background) the write, CheckpointDurable; ``save_before_ready``; ``prune``"""

    def __init__(self, rank: int, member: Member, state: TrainerState, store: CheckpointStore):
        self._rank = rank
        self._member = member
        self._state = state
        self._store = store
        self._kept: set[int] = set()  # complete checkpoints, as last seen

    def save(self, generation: int = 0) -> None:
        """`generation`: the one whose state it is; 0: the newest."""
        generation = generation or self._member.watcher.wait_for(lambda _view: True, None).generation

        def durable(version: int) -> None:
            events.emit("checkpoint_durable", rank=self._rank, version=version)
            try:
                self._member.client.checkpoint_durable(version, generation)
            except SwiftError as error:
                # A version that the coordinator never hears of is not complete; the one before it stands.
                events.emit("checkpoint_untold", rank=self._rank, version=version, reason=str(error))

        self._store.save(self._state.version, self._state.state_dict(), durable)

    def save_before_ready(self, generation: int) -> None:
        """Returns when the coordinator has it. Raises ReplayRefused if it cannot be written."""
        try:
            self.save(generation)
            self._store.wait()
        except (ServiceError, OSError) as error:
            raise ReplayRefused(f"no checkpoint of version {self._state.version}: {error}") from None
        self._member.client.checkpoint_durable(self._state.version, generation)  # if that went wrong before

    def prune(self) -> None:
        view = self._member.watcher.latest
        if view is not None and set(view.checkpoints) != self._kept:
            self._kept = set(view.checkpoints)
            self._store.prune(self._kept)

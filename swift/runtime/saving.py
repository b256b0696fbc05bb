"""This rank's checkpoints: saved beside training, told to the coordinator, removed once newer ones are complete."""

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import ReplayRefused, ServiceError, SwiftError
from swift.recovery.regroup import LoggedGroups
from swift.runtime.member import Member
from swift.runtime.state import TrainerState


class Saving:
    """(trainer's thread) ``save`` → (background) the write, CheckpointDurable; ``save_before_ready``; ``prune``;
    ``learn_groups``"""

    def __init__(
        self, rank: int, member: Member, state: TrainerState, store: CheckpointStore, groups: LoggedGroups
    ):
        self._rank = rank
        self._groups = groups
        self._member = member
        self._state = state
        self._store = store
        self._kept: set[int] = set()  # complete checkpoints, as last seen

    def save(self, generation: int = 0) -> None:
        """`generation`: the one whose state it is; 0: the newest."""
        view = self.learn_groups()
        generation = generation or view.generation
        number, since = self._groups.saving(self._state.version)

        def durable(version: int) -> None:
            events.emit("checkpoint_durable", rank=self._rank, version=version)
            try:
                self._member.client.checkpoint_durable(version, generation, number, since)
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
        version = self._state.version
        # If that went wrong before.
        self._member.client.checkpoint_durable(version, generation, *self._groups.saving(version))

    def learn_groups(self) -> pb.View:
        """(before each step and each checkpoint) By which recovery groups is logged, and is to be."""
        view = self._member.watcher.wait_for(lambda _view: True, None)
        self._groups.learn(view.groups, view.groups_next, view.groups_number, view.groups_from)
        return view

    def prune(self) -> None:
        view = self._member.watcher.latest
        if view is not None and set(view.checkpoints) != self._kept:
            self._kept = set(view.checkpoints)
            self._store.prune(self._kept)

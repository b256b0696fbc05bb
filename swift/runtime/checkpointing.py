"""This rank's checkpoints: saved beside training, told to the coordinator, removed once newer ones are complete.

One that cannot be written does not stop training: the one before it stays the newest complete one, and the log, of
which nothing is trimmed, goes on from there. It is tried again until it is written, or the next one is due. Heartbeats
say so meanwhile.
"""

import sys
from contextlib import suppress

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore, Unsaved
from swift.errors import ReplayRefused, ServiceError, SwiftError, UsageError
from swift.recovery.regroup import LoggedGroups
from swift.runtime.member import Member
from swift.runtime.state import TrainerState

_TELL_S = 2.0
"""How long one attempt takes to tell the coordinator of a checkpoint; another one follows it."""


class Saving:
    """(trainer's thread) ``save`` → (background) the write, CheckpointDurable; ``save_before_ready``, ``save_first``;
    ``prune``; ``learn_groups``; (lease thread) ``unsaved``"""

    def __init__(
        self,
        rank: int,
        member: Member,
        state: TrainerState,
        store: CheckpointStore,
        groups: LoggedGroups,
        *,
        sync: bool = False,
    ):
        """`sync`: training waits until a checkpoint is durable here."""
        self._rank = rank
        self._sync = sync
        self._groups = groups
        self._member = member
        self._state = state
        self._store = store
        # Complete checkpoints as last seen, and below which version others are given up.
        self._seen: tuple[set[int], int] = (set(), 0)
        self._generation = 0  # in which the last one was saved
        self._version = -1  # which that was
        # What `checkpoint_durable` is told of one that is durable, until it has heard it.
        self._untold: tuple[int, int, int, int] | None = None

    def save(self, generation: int = 0) -> None:
        """`generation`: the one whose state it is; 0: the newest."""
        view = self.learn_groups()
        if self._state.version in view.checkpoints:
            return  # whole at all ranks: what is written now could only spoil it
        # Not the View's: that may be of a generation which this state has no part in.
        self._generation = generation = generation or self._member.entered
        self._version = self._state.version
        number, since = self._groups.saving(self._state.version)

        news = iter([True])

        def durable(version: int) -> bool:
            """False: nobody answers. Soon: the next checkpoint waits for this, and training for that one."""
            if next(news, False):
                self._tell_saved(version)
            try:
                self._member.client.checkpoint_durable(version, generation, number, since, patience_s=_TELL_S)
            except SwiftError as error:
                # A version that the coordinator never hears of is not complete; the one before it stands.
                events.emit("checkpoint_untold", rank=self._rank, version=version, reason=str(error))
                self._untold = (version, generation, number, since)
                return not isinstance(error, ServiceError)
            self._untold = None
            return True

        def failed(unsaved: Unsaved) -> None:
            newest = max(view.checkpoints, default=0)
            events.emit("checkpoint_failed", rank=self._rank, version=unsaved.version, reason=unsaved.reason)
            with suppress(OSError, ValueError):
                print(
                    f"swift: rank {self._rank} cannot write the checkpoint of version {unsaved.version}: "
                    f"{unsaved.reason}; it is tried again, and the one of version {newest} stands",
                    file=sys.stderr,
                )

        self._store.save(
            self._state.version, self._state.state_dict(), durable, failed, generation, sync=self._sync
        )

    def _tell_saved(self, version: int) -> None:
        saved = self._store.saved
        assert saved is not None, "it is durable"
        events.emit(
            "checkpoint_durable",
            rank=self._rank,
            version=version,
            bytes=saved.file_bytes,
            seconds=saved.seconds,
            stall_s=saved.stall_s,
        )

    def save_last(self) -> None:
        """The version at which the run ends, unless this generation has saved it."""
        if (self._version, self._generation) != (self._state.version, self._member.entered):
            self.save()

    def save_first(self) -> None:
        """Returns when the coordinator has it: a loss in the first step needs it. Raises UsageError: all
        ranks end with one exit code, whichever of them cannot write. ServiceError if the coordinator stays away; Fenced
        if another process holds the rank."""
        self._store.set_aside(self._await_held)
        try:
            self.save()
            self._store.wait()
        except ServiceError as error:
            raise UsageError(f"{error}; no job begins without its first checkpoint") from None
        self.tell_untold()

    def _await_held(self) -> None:
        """Returns once the coordinator says that this process holds its rank. Raises Fenced, or Interrupted by a newer
        generation."""
        while not self._member.say(self._member.check_held):
            self._member.check()

    def tell_untold(self) -> None:
        """(the store has settled) The coordinator hears of the last one, if it was away so long that nobody tells it
        any more. Raises ServiceError if it stays away, and what it refuses it with: Fenced, UsageError."""
        if self._untold is not None:
            self._member.client.checkpoint_durable(*self._untold)
            self._untold = None

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        """What could not be written yet."""
        unsaved = self._store.unsaved
        if unsaved is None:
            return None
        return pb.UnsavedCheckpoint(
            version=unsaved.version, generation=self._generation, reason=unsaved.reason
        )

    def save_before_ready(self, generation: int) -> None:
        """Returns when the coordinator has it. Raises ReplayRefused if it cannot be written."""
        try:
            self.save(generation)
            self._store.wait()
        except ServiceError as error:
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
        if view is None:
            return
        seen = set(view.checkpoints), view.checkpoints_from
        if seen != self._seen:
            self._seen = seen
            self._store.prune(*seen)

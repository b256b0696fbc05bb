"""This rank's checkpoints: saved beside training, told to the coordinator, removed once newer ones are complete.

One that cannot be written does not stop training: the one before it stays the newest complete one, and the log, of
which nothing is trimmed, goes on from there. It is tried again until it is written, or the next one is due. Heartbeats
say so meanwhile.
"""

import sys
from contextlib import suppress

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogInterrupted, ReplayRefused, ServiceError, SwiftError, UsageError
from swift_ft.log.record import Dropped
from swift_ft.log.sidecar_client import Writer
from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved
from swift_ft.train.coordinator_session import Member
from swift_ft.train.recording import Recording
from swift_ft.train.training_state import TrainerState

# Early checkpoints, in a rank: the View names a version, every rank saves it when it gets there.
#
# (log server) is running full, or (a rank) could not log some steps → (coordinator) ``checkpoint_at`` in the View →
# (every rank, after each step) ``due`` → a rank that is past it already says so, and the View names a later one.


class EarlyCheckpoint:
    """Asked by the trainer's thread after each step; waits for nothing."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._settled: int | None = None  # the agreed version that was saved, or told to be too early

    def due(self, version: int) -> bool:
        """Is this the version that all ranks save?"""
        view = self._member.watcher.latest
        if view is None or not view.HasField("checkpoint_at"):
            return False
        agreed = view.checkpoint_at
        if version < agreed:
            self._settled = None  # perhaps again: after a restore
        elif version == agreed:
            self._settled = agreed
        elif self._settled != agreed:
            self._settled = agreed
            self._member.ask_checkpoint(version, f"was past version {agreed} when it heard of it")
        return version == agreed


def flush_at_end(writer: Writer, rank: int, timeout_s: float) -> None:
    """(all steps are done) So that others can be recovered without this rank; one that may drop records does not fail
    over it. Should there be a recovery all the same, it flushes again before it reports."""
    try:
        writer.flush(timeout_s)
    except ServiceError as error:
        if not writer.drops or isinstance(error, LogInterrupted):
            raise
        events.emit("not_flushed", rank=rank, reason=str(error))


class UnloggedSteps:
    """Tells, after each step, what of it was not logged, and asks for the checkpoint that makes up for it.

    Once when it begins (from there on a failure costs the steps since the newest checkpoint), and once more when a step
    is logged whole again: with a checkpoint behind the last unlogged one, whatever comes can be replayed. Not in
    between: as long as the log takes nothing, the next checkpoint is no better than the interval's.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._owed: Dropped | None = None  # the last ones, until a checkpoint behind them was asked for

    def after_step(self, step: int, dropped: Dropped | None) -> None:
        """(trainer's thread) `step` is done; `dropped`: what was not logged since the last call."""
        owed, self._owed = self._owed, dropped
        if dropped is not None:
            first, last = dropped.steps
            events.emit(
                "unlogged",
                rank=self._member.identity.rank,
                step=step,
                first_step=first,
                last_step=last,
                streams=list(dropped.streams),
                records=dropped.records,
                bytes=dropped.bytes,
            )
        if owed is not None and step < owed.steps.last:
            owed = None  # everybody has restored a checkpoint: that history is given up, and so is its log
        due = dropped if owed is None else owed if dropped is None else None
        if due is not None and not self._covered(due.steps.last):
            self._member.ask_checkpoint(due.steps.last, f"{due}, as the log could not keep up")

    def _covered(self, step: int) -> bool:
        """A checkpoint that has this step in it is complete, or agreed on."""
        view = self._member.watcher.latest
        if view is None:
            return False
        agreed = view.checkpoint_at if view.HasField("checkpoint_at") else -1
        return max([agreed, *view.checkpoints]) > step


_TELL_S = 2.0
"""How long one attempt takes to tell the coordinator of a checkpoint; another one follows it."""


class Saving:
    """(trainer's thread) ``save`` → (background) the write, CheckpointDurable; ``save_before_ready``, ``save_first``;
    ``prune``; (lease thread) ``unsaved``"""

    def __init__(
        self,
        rank: int,
        member: Member,
        state: TrainerState,
        store: CheckpointStore,
        recording: Recording,
        *,
        sync: bool = False,
    ):
        """`sync`: training waits until a checkpoint is durable here."""
        self._rank = rank
        self._sync = sync
        self._recording = recording
        self._member = member
        self._state = state
        self._store = store
        # Complete checkpoints as last seen, and below which version others are given up.
        self._seen: tuple[set[int], int] = (set(), 0)
        self._generation = 0  # in which the last one was saved
        self._version = -1  # which that was
        # What `checkpoint_durable` is told of one that is durable, until it has heard it.
        self._untold: tuple[int, int, bool] | None = None

    def save(self, generation: int = 0) -> None:
        """`generation`: the one whose state it is; 0: the newest."""
        view = self._member.watcher.wait_for(lambda _view: True, None)
        if self._state.version in view.checkpoints:
            return  # whole at all ranks: what is written now could only spoil it
        # Not the View's: that may be of a generation which this state has no part in.
        self._generation = generation = generation or self._member.entered
        self._version = self._state.version
        recorded = self._begin_recording(view, generation)

        news = iter([True])

        def durable(version: int) -> bool:
            """False: nobody answers. Soon: the next checkpoint waits for this, and training for that one."""
            if next(news, False):
                self._tell_saved(version)
            try:
                self._member.client.checkpoint_durable(version, generation, recorded, patience_s=_TELL_S)
            except SwiftError as error:
                # A version that the coordinator never hears of is not complete; the one before it stands.
                events.emit("checkpoint_untold", rank=self._rank, version=version, reason=str(error))
                self._untold = (version, generation, recorded)
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

    def _begin_recording(self, view: pb.View, generation: int) -> bool:
        """Whether the steps from this version on are recorded. In a recovery they are not: they may be done again."""
        return view.state in (pb.FORMING, pb.RUNNING) and self._recording.begins_at(
            self._state.version, view, generation
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
        self._member.client.checkpoint_durable(version, generation)

    def prune(self) -> None:
        view = self._member.watcher.latest
        if view is None:
            return
        seen = set(view.checkpoints), view.checkpoints_from
        if seen != self._seen:
            self._seen = seen
            self._store.prune(*seen)

"""This rank's checkpoints: saved in the background, reported to the coordinator, removed once newer ones are complete.

A failed write does not stop training: the previous checkpoint stays the newest complete one, and the log is not trimmed
beyond it. The write is retried until it succeeds or the next checkpoint is due. Heartbeats report it meanwhile.
"""

from collections.abc import Callable

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogInterrupted, ServiceError, SwiftError, UsageError
from swift_ft.log.record import Dropped
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.state import complete_mark
from swift_ft.state.checkpoint_store import Unsaved
from swift_ft.text import tell_if_possible
from swift_ft.train.coordinator_session import Member
from swift_ft.train.participants import Participant, Site, Step
from swift_ft.train.recording import Recording

# Early checkpoints: the View names a version, and every rank saves it when it reaches it.
#
# (log server) is running full, or (a rank) could not log some steps → (coordinator) ``checkpoint_at`` in the View →
# (every rank, after each step) ``due`` → a rank past that version reports so, and the View names a later one.


class EarlyCheckpoint:
    """Early checkpoint that the View asks for. The trainer's thread checks it after each step; it never blocks."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._settled: int | None = None  # agreed version that was saved or reported as too early

    def due(self, version: int) -> bool:
        view = self._member.watcher.latest
        if view is None or not view.HasField("checkpoint_at"):
            return False
        agreed = view.checkpoint_at
        if version < agreed:
            self._settled = None  # after a restore it may be reached again
        elif version == agreed:
            self._settled = agreed
        elif self._settled != agreed:
            self._settled = agreed
            self._member.ask_checkpoint(version, f"was past version {agreed} when it heard of it")
        return version == agreed


def flush_at_end(writer: SidecarWriter, rank: int, timeout_s: float) -> None:
    """(after all steps) Flushes the log, so that other ranks can be recovered without this one. A timeout is no error
    for a writer that may drop records: in a recovery the rank flushes again before it reports."""
    try:
        writer.flush(timeout_s)
    except ServiceError as error:
        if not writer.drops or isinstance(error, LogInterrupted):
            raise
        events.emit("not_flushed", rank=rank, reason=str(error))


class UnloggedSteps(Participant):
    """Reports after each step the records that were not logged, and requests the checkpoint that compensates for them.

    It requests one at the first unlogged step (from there on a failure costs the steps since the newest checkpoint),
    and one more once a step is completely logged again: after a checkpoint past the last unlogged step, every later
    step can be replayed. In between, an early checkpoint would be no better than the regular one.
    """

    def __init__(self, member: Member, writer: Callable[[], SidecarWriter]) -> None:
        """`writer`: returns the log writer of this generation."""
        self._member = member
        self._writer = writer
        self._owed: Dropped | None = None  # last drop, until a later checkpoint was requested

    def after_step(self, step: Step) -> None:
        writer = self._writer()
        self.report(step.number, writer.unlogged.news())
        writer.forget_below(step.version)  # only a dropped step is sent again

    def report(self, step: int, dropped: Dropped | None) -> None:
        """(trainer's thread, after `step`) `dropped`: records not logged since the last call."""
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
            owed = None  # all ranks have restored a checkpoint and discarded that history, with its log
        due = dropped if owed is None else owed if dropped is None else None
        if due is not None and not self._covered(due.steps.last):
            self._member.ask_checkpoint(due.steps.last, f"{due}, as the log could not keep up")

    def _covered(self, step: int) -> bool:
        """Returns whether a checkpoint after this step is complete or agreed on."""
        view = self._member.watcher.latest
        if view is None:
            return False
        agreed = view.checkpoint_at if view.HasField("checkpoint_at") else -1
        return max([agreed, *view.checkpoints]) > step


_TELL_S = 2.0
"""Seconds of one attempt to report a checkpoint to the coordinator; failed attempts are repeated."""


class Saving(Participant):
    """Checkpoints of one rank.

    (trainer's thread) ``save`` → (background) the write, CheckpointDurable; ``save_first``; ``prune``;
    (lease thread) ``unsaved``"""

    def __init__(self, site: Site, recording: Recording):
        self._site = site
        self._early = EarlyCheckpoint(site.member)
        self._recording = recording
        # Last seen: complete checkpoints, and the version below which all others are abandoned.
        self._seen: tuple[set[int], int] = (set(), 0)
        self._generation = 0  # of the last save
        self._version = -1  # of the last save
        # A durable checkpoint, until the coordinator has acknowledged it.
        self._untold: pb.CheckpointRequest | None = None

    def after_step(self, step: Step) -> None:
        self.prune()  # first: the checkpoint before the last one is marked before the next can be complete
        if self._early.due(step.version) or step.due:
            step.wait_vote()
            self.save()

    def save(self) -> None:
        view = self._site.member.watcher.wait_for(lambda _view: True, None)
        if self._site.state.version in view.checkpoints:
            return  # complete on all ranks: another write could only damage it
        # Not the View's generation: it may be one that this state is not part of.
        self._generation = generation = self._site.member.entered
        self._version = self._site.state.version
        recorded = self._begin_recording(view, generation)

        news = iter([True])

        def durable(version: int) -> bool:
            """Reports the checkpoint. Returns False if there is no answer within `_TELL_S`: the next checkpoint waits
            for this call, and training for that checkpoint."""
            if next(news, False):
                self._tell_saved(version)
            request = pb.CheckpointRequest(version=version, generation=generation, recorded=recorded)
            try:
                self._site.member.client.call(request, patience_s=_TELL_S)
            except SwiftError as error:
                # A version that is never reported does not count as complete; the previous one stays valid.
                events.emit("checkpoint_untold", rank=self._site.rank, version=version, reason=str(error))
                self._untold = request
                return not isinstance(error, ServiceError)
            self._untold = None
            return True

        def failed(unsaved: Unsaved) -> None:
            newest = max(view.checkpoints, default=0)
            events.emit(
                "checkpoint_failed", rank=self._site.rank, version=unsaved.version, reason=unsaved.reason
            )
            tell_if_possible(
                f"rank {self._site.rank} cannot write the checkpoint of version {unsaved.version}: "
                f"{unsaved.reason}; it is tried again, and the one of version {newest} stands"
            )

        self._site.store.save(
            self._site.state.version,
            self._site.state.state_dict(),
            durable,
            failed,
            generation,
            sync=self._site.config.checkpoint_mode == "sync",
            late=self._site.state.changed_by_updates(),
        )

    def _begin_recording(self, view: pb.View, generation: int) -> bool:
        """Returns whether the steps from this version on are recorded for a rehearsal. In a recovery they are not,
        because they may be repeated."""
        return view.state in (pb.FORMING, pb.RUNNING) and self._recording.begins_at(
            self._site.state.version, view, generation
        )

    def _tell_saved(self, version: int) -> None:
        saved = self._site.store.saved
        assert saved is not None, "it is durable"
        events.emit(
            "checkpoint_durable",
            rank=self._site.rank,
            version=version,
            bytes=saved.file_bytes,
            seconds=saved.seconds,
            stall_s=saved.stall_s,
        )

    def save_last(self) -> None:
        if (self._version, self._generation) != (self._site.state.version, self._site.member.entered):
            self.save()

    def save_first(self, adopted: int | None = None) -> None:
        """Saves the first checkpoint and waits until the coordinator has it, since a failure in the first step needs
        it. `adopted`: its version, if the job goes on from older checkpoints of its own. Raises UsageError if it cannot
        be written, so that all ranks end with the same exit code; ServiceError if the coordinator does not answer;
        Fenced if another process holds the rank."""
        self._site.store.set_aside(self._await_held, above=-1 if adopted is None else adopted)
        try:
            self.save()
            self._site.store.wait()
        except ServiceError as error:
            raise UsageError(f"{error}; no job begins without its first checkpoint") from None
        self.tell_untold()

    def _await_held(self) -> None:
        """Waits until the coordinator confirms that this process holds its rank. Raises Fenced, or Interrupted by a
        newer generation."""
        while not self._site.member.say(self._site.member.check_held):
            self._site.member.check()

    def tell_untold(self) -> None:
        """(no write is in progress) Reports the last checkpoint if earlier attempts got no answer. Raises ServiceError
        if there is still none, or the coordinator's refusal: Fenced, UsageError."""
        if self._untold is not None:
            self._site.member.client.call(self._untold)
            self._untold = None

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        unsaved = self._site.store.unsaved
        if unsaved is None:
            return None
        return pb.UnsavedCheckpoint(
            version=unsaved.version, generation=self._generation, reason=unsaved.reason
        )

    def prune(self) -> None:
        view = self._site.member.watcher.latest
        if view is None:
            return
        seen = set(view.checkpoints), view.checkpoints_from
        if seen != self._seen:
            self._seen = seen
            self._site.store.prune(*seen, marks=self._marks(view))

    def _marks(self, view: pb.View) -> dict[int, bytes]:
        """(the lowest rank) Returns the marks of the versions that are complete by now."""
        if self._site.rank != min((member.rank for member in view.members), default=-1):
            return {}
        return {
            version: complete_mark.mark_of(version, view, self._site.config.agreed())
            for version in view.checkpoints
        }

    def restores(self, version: int) -> None:
        """(before all ranks restore a version) Those after it belong to a history that is given up. Raises
        ServiceError."""
        self._site.store.unmark(version)

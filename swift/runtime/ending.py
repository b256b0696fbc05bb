"""The end of a run: the last version is saved, and nobody is through before all are.

::

    (every rank)  all steps are done: saves the last version, unless that is a checkpoint already; Finish
    (coordinator) all have said so: FINISHED, in which `Session.run` returns. Until then a death is a death as any
                  other, and all take part in the recovery
    (a rank)      is lost after that, while it saves its files: a process that takes its place loads the last version,
                  `Session.run` returns at once, and what comes behind it is done again

What could not be saved holds nobody up: then who is lost after the end stays lost.

A trainer may end a run before its last step::

    (trainer)     ``call`` in step s, on all replicas of a stage
    (its rank)    does that step to its end, none after it, and says so with Finish(s + 1)
    (coordinator) tells all of it by the View; whoever has begun step s + 1, where it waits for this rank, drops it in a
                  generation of its own

The word is a part of the state of version s + 1: who loads or copies that state has said it.
"""

from collections.abc import Callable

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import JobFailed, UsageError
from swift.log.writers import Writer
from swift.runtime.checkpointing import Saving
from swift.runtime.early_checkpoint import flush_at_end
from swift.runtime.member import Member
from swift.runtime.own_log import FLUSH_TIMEOUT_S, log_totals
from swift.runtime.state import Stopped, TrainerState
from swift.runtime.strategies.load import load_checkpoint


class Ending:
    """(trainer's thread) ``begin`` … ``finish``; or ``come_back`` in the place of a whole run"""

    def __init__(
        self,
        rank: int,
        member: Member,
        state: TrainerState,
        store: CheckpointStore,
        saving: Saving,
        *,
        saves: bool,
    ) -> None:
        """`saves`: the last version (`SessionConfig.last_checkpoint`)."""
        self._rank = rank
        self._member = member
        self._state = state
        self._store = store
        self._saving = saving
        self._saves = saves
        self._reason: str | None = None
        """Why the trainer ends the run with the step under way; None: it does not."""
        self._done_to = -1
        """The version that the last step done here led to."""
        self._num_steps = 0

    def begin(self, num_steps: int) -> None:
        """(before anything is replayed) So many are to be done."""
        self._num_steps = num_steps

    def begin_step(self) -> None:
        self._reason = None

    def call(self, reason: str) -> None:
        """(in a step) It is the last one."""
        self._reason = reason

    def end_step(self, version: int) -> None:
        self._done_to = version
        self._state.stopped = None if self._reason is None else Stopped(self._reason, self._num_steps)

    def last(self, num_steps: int) -> int:
        """The version with which the run ends, as far as is known here."""
        view = self._member.watcher.latest
        ends = [num_steps]
        stopped = self._state.stopped
        if stopped is not None and num_steps <= stopped.num_steps:
            ends.append(self._state.version)
        if view is not None and view.HasField("ends_at") and num_steps <= view.ends_of:
            ends.append(view.ends_at)
        return min(ends)

    def finish(
        self,
        num_steps: int,
        writer: Writer,
        await_change: Callable[[pb.View], None],
        vote_seconds: float,
    ) -> None:
        """All steps are done here. A rank stays until all are: it may be needed for a recovery."""
        version = self._state.version
        stopped = self._state.stopped
        called = None
        if version < num_steps and (stopped is not None or version == self._done_to):
            called = stopped is not None
        if self._saves:
            self._saving.save_last()
        self._store.settle()
        self._saving.tell_untold()
        flush_at_end(writer, self._rank, FLUSH_TIMEOUT_S)
        self._member.say_measured()
        reason = stopped.reason if stopped and called else ""
        while True:
            self._member.check()
            self._member.say(lambda: self._member.client.finish(version, num_steps, called, reason))
            view = self._member.watcher.wait_for(lambda _view: True, None)
            if view.state == pb.FINISHED:
                events.emit(
                    "finished",
                    rank=self._rank,
                    version=version,
                    **log_totals(writer),
                    **self._state.updates.totals(),
                    vote_seconds=vote_seconds,
                )
                return
            await_change(view)

    def come_back(self, view: pb.View, num_steps: int) -> None:
        """(the job has finished without this process) Its last version. Raises JobFailed, UsageError."""
        version = view.final_version
        if self.last(num_steps) > version:
            raise UsageError(
                f"job {view.job} has finished at version {version}, and session.run is to do {num_steps} steps: start "
                "the job again with swift-ft run"
            )
        try:
            load_checkpoint(self._state, self._store, version)
        except Exception as error:
            raise JobFailed(f"rank {self._rank} cannot come back after the end: {error}") from error
        self._state.present = True
        self._member.version = version
        events.emit("came_back", rank=self._rank, version=version)

"""One step of the trainer: done to its end, with what a recovery needs of it kept, or dropped as if it had not begun.

``run``   everything that remembers a step is told that it begins → the trainer's function → the same, that it ends
          → what is due at this version: replicas compared, a checkpoint
``drop``  (a failure cut it short) all is as it was at the step's start
"""

from collections.abc import Callable

from swift import events
from swift.runtime import evidence
from swift.runtime.adoption import Adoption
from swift.runtime.audit import Audit
from swift.runtime.channel import Channel
from swift.runtime.checkpointing import Saving
from swift.runtime.config import SessionConfig
from swift.runtime.early_checkpoint import EarlyCheckpoint, UnloggedSteps
from swift.runtime.ending import Ending
from swift.runtime.lines import Lines
from swift.runtime.member import Member
from swift.runtime.membership import Membership
from swift.runtime.own_log import OwnLog
from swift.runtime.rehearsal import Rehearsal
from swift.runtime.retries import Retries
from swift.runtime.script import Script
from swift.runtime.snapshots import Snapshots
from swift.runtime.staggering import Staggering
from swift.runtime.state import TrainerState
from swift.runtime.witness import Witness

TrainStep = Callable[[int], object]


class StepRunner:
    """Trainer's thread."""

    def __init__(
        self,
        rank: int,
        config: SessionConfig,
        member: Member,
        channel: Channel,
        state: TrainerState,
        log: OwnLog,
        *,
        membership: Membership,
        witness: Witness,
        script: Script,
        rehearsal: Rehearsal,
        adoption: Adoption,
        retries: Retries,
        ending: Ending,
        saving: Saving,
        audit: Audit | None,
        lines: Lines,
        snapshots: Snapshots,
        staggering: Staggering,
    ) -> None:
        """`audit`: None if there are no replicas to compare with."""
        self._rank = rank
        self._config = config
        self._member = member
        self._channel = channel
        self._state = state
        self._log = log
        self._membership = membership
        self._witness = witness
        self._script = script
        self._rehearsal = rehearsal
        self._adoption = adoption
        self._retries = retries
        self._ending = ending
        self._saving = saving
        self._audit = audit
        self._lines = lines
        self._snapshots = snapshots
        self._staggering = staggering
        self._early = EarlyCheckpoint(member)
        self._unlogged = UnloggedSteps(member)
        self.rolled_forward = False
        """The step under way, or the last one, was finished on the plan's word; its recovery is not over."""

    def run(self, train_step: TrainStep) -> None:
        """Raises whatever cuts the step short; then it is to be dropped, or handled as an error of the trainer's."""
        step = self._state.version
        replaying = self._channel.replaying
        self._saving.learn_groups()
        if not replaying:
            self._snapshots.before_step(self._membership)
        if self._adoption.repeats:
            self._script.begin(step, train_step, self._state.code)
        self._adoption.before(train_step, step, self.drop)
        if self._rehearsal.before(train_step, step, self.drop):
            # What it had computed for others is used up.
            self._adoption.before(train_step, step, self.drop)
        events.emit("step_begin", rank=self._rank, step=step, replay=replaying)
        self._channel.begin_step(step)
        self._witness.begin(step)
        self._ending.begin_step()
        self._staggering.begin_step()
        self._state.begin_step()
        for words in self._state.loads.news():
            self._member.client.differs(step, f"rank {self._rank}: {words}")
        self._script.begin(step, train_step, self._state.code)
        evidence.step_begins(self._state, self._rank, replay=replaying)
        with self._retries.step(step):
            train_step(step)
        self._channel.settle()
        self._state.updates.end_step()
        self._adoption.after()
        due = (step + 1) % self._config.checkpoint_every == 0
        self._lines.end(step, lasts=due)
        self._state.end_step()
        version = self._state.version
        self._member.version = self._staggering.committed
        self._ending.end_step(version)
        events.emit("step_end", rank=self._rank, step=step, replay=replaying)
        self._channel.profile.end(step, replay=replaying, logged_by=self._channel.logged_by)
        evidence.step_ended(self._state)
        evidence.write_every_version(self._state, self._rank)
        self._script.end(step, checkpoint=due)
        # One that has rolled forward compares nothing: those that were past the vote have done so or will not.
        news = self._state.gradients.news()
        if (
            self._audit is not None
            and (due or version == 1 or news)
            and not (replaying or self.rolled_forward)
        ):
            self._staggering.settle()
            self._audit.compare(self._script.amiss)
        self._save(version, replaying, due)
        # Behind a step that is finished on the plan's word, not all have come here.
        if not (replaying or self.rolled_forward):
            self._snapshots.after_step(self._membership)
        self._unlogged.after_step(step, self._log.writer.unlogged.news())
        self._log.writer.forget_below(version)  # only a step that is dropped is sent again
        self._saving.prune()
        latest = self._member.watcher.latest
        self._witness.forget_below(min(latest.checkpoints, default=0) if latest is not None else 0)

    def _save(self, version: int, replaying: bool, due: bool) -> None:
        """`due`: by the interval."""
        # On the way to a target that all save, no other version of this history is ever complete.
        plan = self._membership.plan
        passing = replaying and plan is not None and plan.plan.saves
        # An early checkpoint, too: ranks that have not heard of it do not save it.
        if not passing and (self._early.due(version) or due):
            self._staggering.settle()
            self._saving.save()

    def drop(self) -> None:
        """Takes back what of the step was done."""
        self._channel.end_replay()
        self._channel.drop_step()
        if self._state.present and self._state.updates.begun:
            # The optimizer has begun: the parameters are of no version, so this rank restores.
            self._state.present = False
        self._state.drop_step()
        self._script.drop(self._state.version)
        self._lines.forget()

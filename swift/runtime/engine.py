"""One rank's life: steps, and what comes between them when a rank is lost.

    FORMING      build groups, save version 0, Ready
    RUNNING      steps; every K steps a checkpoint, and at the version that the View names
    (notice)     the step in flight is dropped; one that waits in the commit vote is held until there is a plan
    PLANNING     log flushed under the new generation, Report
    RECOVERING   groups rebuilt; roll forward, undo, copy, restore and replay as the plan says; Ready
    RUNNING      on, at the plan's target version

The loop is here, and the vote, which may have to recover from within a step. The rest is in parts::

    membership     which generation this rank is in, with whom, and its groups      `swift.runtime.membership`
    log            what this rank writes, and where                                 `swift.runtime.own_log`
    steps          one step, done or dropped                                        `swift.runtime.step_runner`
    recovery       the report, and the way to RUNNING by the plan                   `swift.runtime.rank_recovery`
    failures       what an error means                                              `swift.runtime.failures`
    ending         the last version, and nobody through before all are              `swift.runtime.ending`
"""

import time

from swift import events, reinitializing
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import Fenced, JobFailed, UsageError
from swift.recovery import Assignment, RankMeasured, RecoveryGroups
from swift.runtime.adoption import Adoption
from swift.runtime.audit import Audit
from swift.runtime.channel import Channel
from swift.runtime.checkpointing import Saving
from swift.runtime.config import SessionConfig
from swift.runtime.differences import Differences
from swift.runtime.ending import Ending
from swift.runtime.evidence import write_digests
from swift.runtime.failures import Failures
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.lines import Lines
from swift.runtime.measures import Measures, progress
from swift.runtime.member import Member
from swift.runtime.membership import Membership
from swift.runtime.own_log import OwnLog
from swift.runtime.process_groups import ProcessGroups
from swift.runtime.rank_recovery import RankRecovery
from swift.runtime.rehearsal import Rehearsal
from swift.runtime.restore import Restorer
from swift.runtime.retries import Retries
from swift.runtime.script import Script
from swift.runtime.shared_replay.helper import MakeModule
from swift.runtime.snapshots import Snapshots
from swift.runtime.staggering import Staggering
from swift.runtime.state import TrainerState
from swift.runtime.step_runner import StepRunner, TrainStep
from swift.runtime.witness import Witness


class StepDropped(Exception):
    """The plan drops the step that waited in the vote. The new generation's groups are built already."""


class Engine:
    """One rank's life, from join to the end of the run."""

    def __init__(
        self,
        rank: int,
        config: SessionConfig,
        member: Member,
        communicator: ProcessGroups,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        faults: FaultInjector,
        world: ReconfigurableGroup,
        assignment: Assignment,
        *,
        witness: Witness,
        differences: Differences,
        adoption: Adoption,
        audit: Audit | None,
        lines: Lines,
        staggering: Staggering,
    ):
        """`assignment`: of the full world, in which `rank` is the number of a slot. `audit`: None if there are no
        replicas to compare with. `world`: all ranks, for the session itself."""
        self._rank = rank
        self._member = member
        self._communicator = communicator
        self._state = state
        self._store = store
        self._faults = faults
        self._world = world
        self._lines = lines
        self._staggering = staggering
        self._num_steps = 0
        self._reinits = config.strategy == "reinit"
        self.vote_seconds = 0.0
        self._measures = Measures(channel, store)
        self._adoption = adoption
        self._rehearsal = Rehearsal(config.paranoid, channel, state, witness, differences)
        beside = state.beside
        self._script = Script(
            state.told,
            beside.transient,
            differences.say,
            warns=rank == 0,
            untellable=beside.untellable,
            held=beside.held.numbers,
        )
        retries = Retries(rank)
        self._saving = Saving(
            rank, member, state, store, channel.logged_groups, sync=config.checkpoint_mode == "sync"
        )
        self.ending = Ending(rank, member, state, store, self._saving, saves=config.last_checkpoint)
        self._failures = Failures(rank, member, communicator, retries, config.suspicion_timeout_s)
        self.log = OwnLog(rank, config, member, channel)
        groups, every = RecoveryGroups.parse(config.groups), config.steps_to_snapshot
        self._snapshots = Snapshots(rank, every, member, state, world, faults, groups)
        self._restorer = self._restorer_of(config, channel)
        shard = assignment.slots[rank].shard
        self._recovery = self._recovery_of(shard, channel, self._restorer, witness)
        self.membership = Membership(
            rank,
            assignment,
            member,
            communicator,
            self.log,
            self._failures,
            self._recovery.report,
            redistributes=config.redistributes,
            reroutes=config.reroutes,
        )
        self._steps = self._steps_of(config, channel, witness, retries, audit)
        state.updates.vote.bind(self.vote)
        staggering.lasts.bind(lambda version: self._saving_or_end(version, config.checkpoint_every))

    def _restorer_of(self, config: SessionConfig, channel: Channel) -> Restorer:
        return Restorer(
            self._rank,
            self._member,
            channel,
            self._state,
            self._store,
            self._faults,
            self._world,
            config.replay_stall_s,
            self._snapshots,
            self._staggering,
        )

    def _recovery_of(
        self, shard: int, channel: Channel, restorer: Restorer, witness: Witness
    ) -> RankRecovery:
        return RankRecovery(
            self._rank,
            shard,
            self._member,
            channel,
            self._state,
            self._store,
            self.log,
            saving=self._saving,
            restorer=restorer,
            witness=witness,
            faults=self._faults,
            staggering=self._staggering,
        )

    def _steps_of(
        self, config: SessionConfig, channel: Channel, witness: Witness, retries: Retries, audit: Audit | None
    ) -> StepRunner:
        return StepRunner(
            self._rank,
            config,
            self._member,
            channel,
            self._state,
            self.log,
            membership=self.membership,
            witness=witness,
            script=self._script,
            rehearsal=self._rehearsal,
            adoption=self._adoption,
            retries=retries,
            ending=self.ending,
            saving=self._saving,
            audit=audit,
            lines=self._lines,
            snapshots=self._snapshots,
            staggering=self._staggering,
        )

    def _saving_or_end(self, version: int, every: int) -> bool:
        """That version is saved, or the run ends with it, as far as is known here."""
        view = self._member.watcher.latest
        early = view is not None and view.HasField("checkpoint_at") and view.checkpoint_at == version
        return early or version % every == 0 or version >= self.ending.last(self._num_steps)

    def begin_again(self) -> None:
        """(before the first step) This process has done steps before, under another engine."""
        self._script.begin_again()

    def help_replay(self, make_module: MakeModule) -> None:
        """This rank can build any stage."""
        self._restorer.make_module = make_module

    # --- what the lease's and the watcher's threads, and metrics, ask (`swift.runtime.member.Holder`) ---

    def progress(self) -> dict[str, float]:
        """(any thread) What this rank has done so far, by the names of `metrics.Progress`."""
        return progress(self.membership.generation, self._state.version, self.vote_seconds, self.log)

    def measured(self) -> RankMeasured | None:
        """(lease thread)"""
        return self._measures.now(self.log.stats)

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        """(lease thread) A checkpoint that could not be written yet."""
        return self._saving.unsaved()

    def interrupt(self, generation: int) -> None:
        """(notice thread) Frees the trainer's thread from whatever it waits in."""
        self.membership.interrupt(generation)

    # --- the loop ---

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Steps until `num_steps` are done, through every recovery. Returns when all ranks are there."""
        self._adoption.check()
        if self.membership.view.state == pb.FINISHED:
            self.ending.come_back(self.membership.view, num_steps)
            return
        self.ending.begin(num_steps)
        self._num_steps = num_steps
        while True:
            try:
                self._rejoin(train_step)
                while self._state.version < self.ending.last(num_steps):
                    self._faults.at("idle", self._state.version)
                    self._member.check()
                    self._steps.run(train_step)
                    if self._steps.rolled_forward:
                        self._rejoin(train_step)
                self._staggering.settle()
                self._script.look()
                write_digests(self._state, self._rank)
                self._lines.cut(self._state.version)
                self.ending.finish(num_steps, self.log.writer, self._member.await_change, self.vote_seconds)
                return
            except (JobFailed, Fenced):
                raise
            except StepDropped:
                self._steps.drop()
                continue
            except Exception as error:  # noqa: BLE001  (a lost peer shows as any error; the others are raised again)
                self._failures.handle(self._staggering.blamed(error), self.membership.generation)
            self._freed()
            if self._reinits:
                raise reinitializing.hand_on(self._member)
            self._steps.drop()
            self.membership.form()

    def _rejoin(self, train_step: TrainStep) -> None:
        """From groups that are built to RUNNING."""
        self._steps.rolled_forward = False
        view, published = self.membership.view, self.membership.plan
        self._recovery.rejoin(view, published, lambda: self._steps.run(train_step))
        self._staggering.forget()
        self._measures.gradient_bytes = self._state.gradient_bytes()
        at_start = view.state == pb.FORMING
        self._rehearsal.arm(at_start=at_start)
        self._adoption.arm(at_start=at_start)

    def _freed(self) -> None:
        latest = self._member.watcher.latest
        events.emit("freed", rank=self._rank, generation=latest.generation if latest is not None else 0)

    def vote(self) -> None:
        """(inside optimizer.step, or at the end of a step that is held) Returns if this rank's update is to be applied,
        or stays applied.

        A barrier of all ranks, which nobody enters before its gradients are all reduced. If it fails, this rank
        cannot know whether others are through it. So it does not unwind: it takes part in the recovery
        from here, with the trainer's step on the stack, and finishes the step if the plan says roll forward.
        Raises StepDropped if the plan says anything else. A step that goes on without its vote does not wait here
        (`swift.runtime.staggering`). (Where steps that are cut short are finished together, it
        raises what has broken the vote instead: `swift.runtime.cut_step`.)
        """
        self._staggering.settle()
        began = time.monotonic()
        self._member.check()
        self._communicator.check_whole()
        self._lines.write(self._state.version)
        updates, step = self._state.updates, self._state.version
        updates.voting = not updates.ahead  # only now: what DDP has made of a broken reduction is no vote
        # Also before the first line: who is to write it may be the one that is lost.
        lines = self._lines.in_use or self._script.loads("log")
        stage_group = self.membership.slot.stage_group
        stage_groups, waits = self.membership.assignment.stage_groups, self._staggering.waits()
        ballot = updates.ballot(stage_group, stage_groups, lines=lines, waits=waits)
        if updates.ahead:
            vote = self._world.submit(lambda collectives: collectives.barrier(ballot))
            self._staggering.voted(ballot, vote)
            return
        try:
            self._world.run(lambda collectives: collectives.barrier(ballot))
            self.vote_seconds += time.monotonic() - began
            self._staggering.agreed(updates.heard(ballot, step).waits_next)
            return
        except (JobFailed, Fenced, UsageError):
            raise
        except Exception as error:
            if updates.cut_step.wanted:
                raise
            self.held_over(error)

    def held_over(self, error: Exception) -> bool:
        """(inside of the trainer's step) From an error to the groups of a newer generation, in which the step is
        finished. Returns whether that takes those that are left together. Raises the error if it is no failure's
        consequence, StepDropped if the plan drops the step.
        """
        self._failures.handle(error, self.membership.generation)
        self._freed()
        if self._reinits:
            raise reinitializing.hand_on(self._member)
        self.membership.form()
        published = self.membership.plan
        assert published is not None
        mine = published.plan.of(self._rank)
        if not mine.policy.finishes_step:
            raise StepDropped
        self._steps.rolled_forward = True
        events.emit(
            "roll_forward", rank=self._rank, generation=published.generation, version=mine.from_version
        )
        return any(ranks.policy.together for ranks in published.plan.ranks)

    def close(self) -> None:
        """What is not acknowledged by the log is given up. The line to the coordinator stays if it was handed on."""
        self.log.close()
        self._store.close()
        self._lines.close()
        handed_on = reinitializing.has(self._member)
        if not handed_on:
            self._member.close()
        self._communicator.let_go()
        if handed_on:
            self._member.let_go()

"""Main loop of one rank: steps, and the recovery between them when a rank is lost.

    FORMING      build groups, save version 0, Ready
    RUNNING      steps; every K steps a checkpoint, and at the version that the View names
    (notice)     the step in flight is dropped; a step that waits in the commit vote is held until there is a plan
    PLANNING     log flushed under the new generation, Report
    RECOVERING   groups rebuilt; roll forward, undo, copy, restore and replay as the plan says; Ready
    RUNNING      from the plan's target version

This module has the loop and the vote, which may have to recover from within a step. The rest is in parts::

    membership     this rank's generation, its members and its groups               `swift_ft.train.generation`
    log            the records that this rank writes, and their servers             `swift_ft.train.log_session`
    steps          one step, done or dropped                                        `swift_ft.train.step`
    recovery       the report, and the way to RUNNING by the plan                   `swift_ft.train.engine`
    failures       the classification of errors                                     `swift_ft.train.failures`
    ending         the last version; no rank returns before all have finished       `swift_ft.train.step`
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from swift_ft import events, reinitialization
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import Fenced, JobFailed, ReplayRefused, ServiceError, UsageError
from swift_ft.planner import RankMeasured
from swift_ft.rpc.codec import PublishedPlan
from swift_ft.state import complete_mark
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.checkpointing import Saving
from swift_ft.train.coordinator_session import ENV_FROM_CHECKPOINTS, Holder
from swift_ft.train.failures import Failures, Retries
from swift_ft.train.generation import Membership
from swift_ft.train.log_session import OwnLog
from swift_ft.train.participants import Participant, TrainStep
from swift_ft.train.recording import Recording
from swift_ft.train.replay import Restorer
from swift_ft.train.replay_helper import MakeModule
from swift_ft.train.step import Ending, Lines, StepRunner
from swift_ft.train.step_digests import Witness
from swift_ft.train.strategies import Site
from swift_ft.train.training_state import TrainerState
from swift_ft.train.verification import write_digests, write_every_version

# Start of a job: version 0, as the trainer has created it, or a checkpoint of another job.
#
# Either is this job's first checkpoint, to which every later loss can go back. The other job's directory is only read,
# and is no longer needed once this returns.


def begin_at_version_0(
    view: pb.View,
    rank: int,
    state: TrainerState,
    store: CheckpointStore,
    saving: Saving,
) -> None:
    """(every rank, FORMING) Loads or aligns the first version and saves it. Returns when the coordinator has
    acknowledged that checkpoint."""
    state.align()
    adopted = view.from_version if view.from_job == view.job else None
    if adopted is not None:
        _adopt(view.job, adopted, rank, state, store)
    elif view.from_job:
        _take(view.from_job, view.from_version, rank, state, store.of_job(view.from_job))
    state.present = True
    write_every_version(state, rank)
    saving.save_first(adopted)


def _adopt(job: str, version: int, rank: int, state: TrainerState, store: CheckpointStore) -> None:
    """Loads the newest checkpoint of this job's own that was complete when its coordinator was lost. Raises
    ReplayRefused if it cannot be loaded: then the job begins with an older one, if there is one."""
    try:
        place = complete_mark.place_of(store.place, os.environ.get(ENV_FROM_CHECKPOINTS, ""), version)
        if place is None:
            raise UsageError(
                f"version {version}, with which job {job} goes on, is not in {store.where}: say --from-checkpoints "
                "with its directory, as when the job was started"
            )
        saved = store.at(place).load(version)
    except (ServiceError, OSError) as error:
        raise ReplayRefused(str(error)) from None
    try:
        state.load_state_dict(saved)
    except Exception as error:
        raise UsageError(f"--from-checkpoints: version {version} is not this trainer's: {error}") from error
    events.emit("began_from", rank=rank, job=job, version=version)


def _take(job: str, version: int, rank: int, state: TrainerState, theirs: CheckpointStore) -> None:
    """Loads another job's checkpoint. Raises UsageError if it is missing or another trainer's, ServiceError if it is
    unreadable."""
    try:
        if not theirs.is_there():
            raise UsageError(
                f"--from-job {job}: there is no {theirs.where}; --checkpoint-dir must be the one that job {job} has had"
            )
        saved = theirs.load(version)
    except (ServiceError, OSError) as error:
        raise ServiceError(f"--from-job {job}: {error}") from None
    try:
        state.load_state_dict(saved)
    except Exception as error:
        raise UsageError(f"--from-job {job}: its version {version} is not this trainer's: {error}") from error
    state.stopped = None  # it belongs to the other job
    events.emit("began_from", rank=rank, job=job, version=version)


# This rank's part in a recovery: its report before there is a plan, and its actions by the plan.
#
#     PLANNING     ``report``: the log flushed under the new generation, the versions that this rank can offer
#     RECOVERING   ``rejoin``: undo, copy, restore and replay as the plan says; Ready; until RUNNING
#     FORMING      ``rejoin``: version 0 saved, or the checkpoint that the job begins with loaded; Ready; until RUNNING
#
# `swift_ft.train.replay` brings a rank to the plan's version, `swift_ft.train.strategies` has each strategy's part in
# it.


class RankRecovery:
    """A rank's side of the recovery protocol. Used by the trainer's thread only."""

    def __init__(
        self,
        site: Site,
        log: OwnLog,
        saving: Saving,
        restorer: Restorer,
        witness: Witness,
        participants: Sequence[Participant],
    ) -> None:
        self._site = site
        self._rank = site.rank
        self._shard = site.assignment.slots[site.rank].shard
        self._member = site.member
        self._channel = site.channel
        self._state = site.state
        self._store = site.store
        self._faults = site.faults
        self._log = log
        self._saving = saving
        self._restorer = restorer
        self._witness = witness
        self._participants = participants

    def report(self, view: pb.View) -> None:
        """(PLANNING) Reports this rank's recovery offer. The caller repeats it until the View moves on."""
        if self._log.opened:
            self._site.flushed = self._log.enter(view) is None
        standing, snapshots = self._state.standing(), self._site.snapshots
        for participant in self._participants:
            standing = participant.offer(standing)
        generation = view.generation

        def statement() -> None:
            report = pb.ReportRequest(
                generation=generation,
                has_state=standing.version is not None,
                version=standing.version or 0,
                undo_to=standing.undo_to,
                undo_exact=standing.undo_exact,
                forward_to=standing.forward_to,
                forward_by_all=standing.forward_by_all,
                finish_to=standing.finish_to,
                can_help=self._restorer.can_help,
                snapshots=[
                    pb.HeldSnapshot(rank=rank, version=version)
                    for rank, version in (snapshots.held() if snapshots is not None else ())
                ],
            )
            self._member.client.call(report)

        if self._member.say(statement):
            events.emit("reported", rank=self._rank, generation=generation, **standing.words())

    def rejoin(self, view: pb.View, published: PublishedPlan | None, step: Callable[[], None]) -> None:
        """Goes from rebuilt groups to RUNNING. `published` is None where the job begins. `step` does one step of the
        trainer."""
        self._member.check()
        if view.state == pb.FORMING:
            begin_at_version_0(view, self._rank, self._state, self._store, self._saving)
            self._log.writer.await_ready()  # so that the first steps' records do not stay in the writer's ring
        else:
            assert published is not None
            self._follow(published, step)
        version = self._member.version = self._state.version
        events.emit("ready", rank=self._rank, generation=view.generation, version=version)
        if view.state == pb.RECOVERING:
            write_digests(self._state, self._rank, recovered_in=view.generation)
        self._await_running(view, self._ready_of(view.generation))
        self._state.lived = True
        self._state.updates.hold_next = True  # a new rank does not know which holds the others need
        if published is not None and not published.plan.exact and version not in view.checkpoints:
            self._saving.save()  # it cannot be rebuilt from older data
        events.emit("resumed", rank=self._rank, generation=view.generation, version=version)

    def _follow(self, published: PublishedPlan, step: Callable[[], None]) -> None:
        if not published.plan.exact:
            self._witness.forget()
        done_again = published.plan.of(self._rank).loads
        incomplete = self._log.why_incomplete()
        if incomplete is not None and not done_again:
            raise ReplayRefused(f"what rank {self._rank} has done is not in the log: {incomplete}")
        if published.plan.restores:
            self._saving.restores(published.plan.target_version)
        self._restorer.follow(published, self._log.writer, self._log.servers, step)
        if done_again:
            self._log.done_again()

    def _ready_of(self, generation: int) -> Callable[[], None]:
        version, stages = self._state.version, self._state.stages
        indices = sorted({stage.stage_index for stage in stages})
        return lambda: self._member.client.call(
            pb.ReadyRequest(
                generation=generation,
                version=version,
                stages=indices,
                num_stages=stages[0].num_stages,
                shard=self._shard,
            )
        )

    def _await_running(self, view: pb.View, say_ready: Callable[[], None]) -> None:
        """Returns when all other ranks are ready too. Repeats Ready at each change of the View, and every `RESAY_S`."""
        while True:
            self._member.check()
            # `view` may be outdated by now: wait for a change of the newest one.
            latest = self._member.watcher.latest or view
            if latest.state == pb.RUNNING and latest.generation == view.generation:
                return
            self._member.say(say_ready)
            self._faults.while_others_replay(self._state.version)
            self._member.await_change(latest)


class StepDropped(Exception):
    """Raised if the plan drops the step that waited in the vote. The new generation's groups are built already."""


class Engine(Holder):
    def __init__(
        self,
        site: Site,
        participants: Sequence[Participant],
        *,
        log: OwnLog,
        saving: Saving,
        ending: Ending,
        lines: Lines,
        recording: Recording,
        witness: Witness,
    ):
        """`site`: its rank is the number of a slot in the full world."""
        config = site.config
        self._site = site
        self._rank = site.rank
        self._member = site.member
        self._communicator = site.communicator
        self._state = site.state
        self._store = site.store
        self._faults = site.faults
        self._world = site.world
        self._participants = participants
        self.log = log
        self._saving = saving
        self.ending = ending
        self._lines = lines
        self._recording = recording
        self._num_steps = 0
        self._reinits = config.setting.calls_again
        self.vote_seconds = 0.0
        self._held_up = (0.0, 0)  # by the log, when `measured` was called last
        self._gradient_bytes: dict[int, int] = {}
        retries = Retries(site.rank)
        self.failures = Failures(
            site.rank, site.member, site.communicator, retries, config.suspicion_timeout_s
        )
        self._restorer = Restorer(site)
        self._recovery = RankRecovery(site, log, saving, self._restorer, witness, participants)
        self.membership = Membership(
            site.rank,
            site.assignment,
            site.member,
            site.communicator,
            log,
            self.failures,
            self._recovery.report,
            redistributes=config.redistributes,
            reroutes=config.reroutes,
        )
        self._steps = StepRunner(site, participants, witness, retries)
        site.state.updates.vote.bind(self.vote)
        if site.staggering is not None:
            site.staggering.lasts.bind(lambda version: self._saving_or_end(version, config.checkpoint_every))

    def _saving_or_end(self, version: int, every: int) -> bool:
        """Returns whether that version is saved or ends the run, as far as this rank knows."""
        view = self._member.watcher.latest
        early = view is not None and view.HasField("checkpoint_at") and view.checkpoint_at == version
        return early or version % every == 0 or version >= self.ending.last(self._num_steps)

    def wait_vote(self) -> None:
        self._steps.wait_vote()

    def help_replay(self, make_module: MakeModule) -> None:
        self._restorer.make_module = make_module

    # --- called by the lease and watcher threads, and by metrics ---

    def progress(self) -> dict[str, float]:
        return {
            "generation": self.membership.generation,
            "version": self._state.version,
            "vote_seconds": self.vote_seconds,
            **asdict(self.log.stats),
            "queued_bytes": self.log.queued_bytes,
        }

    def measured(self) -> RankMeasured | None:
        """(lease thread) Returns the rank's current measurements for the planner, or None if there are none."""
        stats = self.log.stats
        held_up = (stats.blocked_seconds, stats.dropped_records)
        log_full, self._held_up = held_up > self._held_up, held_up
        profile, pace = self._site.channel.profile, stats.pace_bytes_per_s or None
        return profile.measured(self._gradient_bytes, self._store.saved, pace, log_full=log_full)

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        return self._saving.unsaved()

    def hangs(self) -> str:
        return self._steps.pulse.hangs()

    def interrupt(self, generation: int) -> None:
        """(notice thread) Frees the trainer's thread from any blocking operation."""
        self.membership.interrupt(generation)

    # --- the loop ---

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Runs steps until `num_steps` are done, through every recovery. Returns when all ranks have finished."""
        for participant in self._participants:
            participant.check()
        self.ending.begin(num_steps)
        self._num_steps = num_steps
        while True:
            if self.membership.finished:
                self.ending.come_back(self.membership.view, num_steps)
                return
            try:
                self._rejoin(train_step)
                while self._state.version < self.ending.last(num_steps):
                    self._faults.at("idle", self._state.version)
                    self._member.check()
                    self._steps.run(train_step)
                    if self._steps.rolled_forward:
                        self._rejoin(train_step)
                self._steps.wait_vote()
                write_digests(self._state, self._rank)
                self._lines.cut(self._state.version)
                self.ending.finish(num_steps, self.log.writer, self._member.await_change, self.vote_seconds)
                return
            except (JobFailed, Fenced):
                raise
            except StepDropped:
                self._steps.drop()
                continue
            except Exception as error:  # noqa: BLE001  (a lost peer can raise any error; others are raised again)
                self.failures.handle(self._blamed(error), self.membership.generation)
            self._freed()
            self._recording.abandon()
            if self._reinits:
                raise reinitialization.hand_on(self._member)
            self._steps.drop()
            self.membership.form()

    def _rejoin(self, train_step: TrainStep) -> None:
        """Goes from rebuilt groups to RUNNING."""
        self._steps.rolled_forward = False
        view, published = self.membership.view, self.membership.plan
        self._recovery.rejoin(view, published, lambda: self._steps.run(train_step))
        self._gradient_bytes = self._state.gradient_bytes()
        for participant in self._participants:
            participant.resume(at_start=view.state == pb.FORMING)

    def _blamed(self, error: Exception) -> Exception:
        """Returns the error that has ended the step: `error`, or that of a vote under way."""
        return error if self._site.staggering is None else self._site.staggering.blamed(error)

    def _freed(self) -> None:
        latest = self._member.watcher.latest
        events.emit("freed", rank=self._rank, generation=latest.generation if latest is not None else 0)

    def vote(self) -> None:
        """(inside optimizer.step, or at the end of a held step) Returns if this rank's update is to be applied, or
        stays applied.

        The vote is a barrier of all ranks. A rank enters it only after all its gradients are reduced. If it fails, this
        rank cannot know whether others have passed it, so it does not unwind: it takes part in the recovery from here,
        with the trainer's step on the stack, and finishes the step if the plan says roll forward. Raises StepDropped if
        the plan says anything else. A step that runs ahead of its vote does not wait here
        (`swift_ft.train.staggering`). If the ranks finish steps that were cut short together, it raises the error that
        broke the vote (`swift_ft.train.lossy`).
        """
        self._steps.wait_vote()
        staggering = self._site.staggering
        began = time.monotonic()
        self._member.check()
        self._communicator.check_whole()
        self._lines.write(self._state.version)
        updates, step = self._state.updates, self._state.version
        updates.voting = not updates.ahead  # only now: an error of a broken DDP reduction is not a vote
        stage_group = self.membership.slot.stage_group
        stage_groups = self.membership.assignment.stage_groups
        waits = staggering is not None and staggering.waits()
        ballot = updates.ballot(stage_group, stage_groups, lines=self._lines.in_use, waits=waits)
        if updates.ahead:
            assert staggering is not None, "only staggered steps run ahead of their vote"
            staggering.voted(ballot, self._world.submit(lambda collectives: collectives.barrier(ballot)))
            return
        try:
            self._world.run(lambda collectives: collectives.barrier(ballot))
            self.vote_seconds += time.monotonic() - began
            heard = updates.heard(ballot, step)
            if staggering is not None:
                staggering.agreed(heard.waits_next)
            return
        except (JobFailed, Fenced, UsageError):
            raise
        except Exception as error:
            if updates.cut_step.wanted:
                raise
            self.held_over(error)

    def held_over(self, error: Exception) -> bool:
        """(inside of the trainer's step) Goes from an error to the groups of a newer generation, in which the step is
        finished. Returns whether the plan has the remaining ranks finish it together. Raises the error if no failure
        caused it, StepDropped if the plan drops the step.
        """
        self.failures.handle(error, self.membership.generation)
        self._freed()
        self._recording.abandon()
        if self._reinits:
            raise reinitialization.hand_on(self._member)
        self.membership.form()
        if self.membership.finished:  # it was a spare
            raise StepDropped
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
        """Closes the parts. Unacknowledged log records are dropped. The coordinator connection stays open if it was
        handed on."""
        self.log.close()
        self._store.close()
        self._lines.close()
        handed_on = reinitialization.has(self._member)
        if not handed_on:
            self._member.close()
        self._communicator.let_go()
        if handed_on:
            self._member.let_go()

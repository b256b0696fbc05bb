"""Main loop of one rank: steps, and the recovery between them when a rank is lost.

    FORMING      build groups, save version 0, Ready
    RUNNING      steps; every K steps a checkpoint, and at the version that the View names
    (notice)     the step in flight is dropped; a step that waits in the commit vote is held until there is a plan
    PLANNING     log flushed under the new generation, Report
    RECOVERING   groups rebuilt; roll forward, undo, copy, restore and replay as the plan says; Ready
    RUNNING      from the plan's target version

This module has the loop, the vote, which may have to recover from within a step, and the protocol of a recovery. Its
parts: members and groups (`swift_ft.train.generation`), this rank's log (`swift_ft.train.log_session`), a step and the
run's end (`swift_ft.train.step`), the way to a plan's version (`swift_ft.train.replay`), errors
(`swift_ft.train.failures`).
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from swift_ft import events, reinitialization
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import PublishedPlan
from swift_ft.errors import Fenced, JobFailed, ReplayRefused, ServiceError, UsageError
from swift_ft.state import complete_mark
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.checkpointing import Saving
from swift_ft.train.coordinator_session import ENV_FROM_CHECKPOINTS, Holder
from swift_ft.train.failures import Failures, Retries
from swift_ft.train.generation import Membership
from swift_ft.train.log_session import OwnLog
from swift_ft.train.participants import Participant, Site, TrainStep
from swift_ft.train.recording import Recording
from swift_ft.train.replay import Restorer
from swift_ft.train.replay_helper import MakeModule
from swift_ft.train.step import Ending, Lines, StepRunner
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
    own = view.from_job == view.job
    if view.from_job:
        _load_first(view, rank, state, store)
    state.present = True
    write_every_version(state, rank)
    saving.save_first(view.from_version if own else None)


def _load_first(view: pb.View, rank: int, state: TrainerState, store: CheckpointStore) -> None:
    """Loads the checkpoint that the job begins with: the newest of its own that was complete when its coordinator was
    lost, or another job's. Raises UsageError if it is missing or another trainer's. If it is unreadable, raises
    ServiceError, or for its own ReplayRefused: then the job begins with an older one, if there is one."""
    job, version, own = view.from_job, view.from_version, view.from_job == view.job
    flag = "--from-checkpoints" if own else f"--from-job {job}"
    try:
        if own:
            place = complete_mark.place_of(store.place, os.environ.get(ENV_FROM_CHECKPOINTS, ""), version)
            if place is None:
                raise UsageError(
                    f"version {version}, with which job {job} goes on, is not in {store.where}: say --from-checkpoints "
                    "with its directory, as when the job was started"
                )
            source = store.at(place)
        else:
            source = store.of_job(job)
            if not source.is_there():
                raise UsageError(
                    f"{flag}: there is no {source.where}; --checkpoint-dir must be the one that job {job} has had"
                )
        saved = source.load(version)
    except (ServiceError, OSError) as error:
        raise ReplayRefused(str(error)) if own else ServiceError(f"{flag}: {error}") from None
    try:
        state.load_state_dict(saved)
    except Exception as error:
        raise UsageError(f"{flag}: its version {version} is not this trainer's: {error}") from error
    if not own:
        state.stopped = None  # it belongs to the other job
    events.emit("began_from", rank=rank, job=job, version=version)


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
    ):
        """`site`: its rank is the number of a slot in the full world."""
        self._site = site
        self._participants = participants
        self.log = log
        self._saving = saving
        self.ending = ending
        self._lines = lines
        self._recording = recording
        self.vote_seconds = 0.0
        self._held_up = (0.0, 0)  # by the log, when `measured` was called last
        self._gradient_bytes: dict[int, int] = {}
        retries = Retries(site.rank)
        self.failures = Failures(site, retries)
        self._restorer = Restorer(site)
        self.membership = Membership(site, log, self.failures, self.report)
        self._steps = StepRunner(site, participants, retries)
        site.state.updates.vote, site.state.updates.reduced = self.vote, self._steps.wait_vote
        if site.staggering is not None:
            site.staggering.lasts = self._saving_or_end

    def _saving_or_end(self, version: int) -> bool:
        """Returns whether that version is saved or ends the run, as far as this rank knows."""
        view = self._site.member.watcher.latest
        early = view is not None and view.HasField("checkpoint_at") and view.checkpoint_at == version
        return early or version % self._site.config.checkpoint_every == 0 or version >= self.ending.last()

    def help_replay(self, make_module: MakeModule) -> None:
        self._restorer.make_module = make_module

    # --- called by the lease and watcher threads, and by metrics ---

    def progress(self) -> dict[str, float]:
        return {
            "generation": self.membership.generation,
            "version": self._site.state.version,
            "vote_seconds": self.vote_seconds,
            **asdict(self.log.stats),
            "queued_bytes": self.log.queued_bytes,
        }

    def measured(self) -> pb.RankMeasured | None:
        """(lease thread) Returns the rank's current measurements for the planner, or None if there are none."""
        stats = self.log.stats
        held_up = (stats.blocked_seconds, stats.dropped_records)
        log_full, self._held_up = held_up > self._held_up, held_up
        profile, pace = self._site.channel.profile, stats.pace_bytes_per_s or None
        return profile.measured(self._gradient_bytes, self._site.store.saved, pace, log_full=log_full)

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
        while True:
            if self.membership.finished:
                self.ending.come_back(self.membership.view)
                return
            try:
                self._rejoin(train_step)
                while self._site.state.version < self.ending.last():
                    self._site.faults.at("idle", self._site.state.version)
                    self._site.member.check()
                    self._steps.run(train_step)
                    if self._steps.rolled_forward:
                        self._rejoin(train_step)
                self._steps.wait_vote()
                write_digests(self._site.state, self._site.rank)
                self._lines.cut(self._site.state.version)
                self.ending.finish(self.log.writer, self.vote_seconds)
                return
            except (JobFailed, Fenced):
                raise
            except StepDropped:
                self._steps.drop()
                continue
            except Exception as error:  # noqa: BLE001  (a lost peer can raise any error; others are raised again)
                self.failures.handle(self._blamed(error), self.membership.generation)
            self._leave_generation()
            self._steps.drop()
            self.membership.form()

    # --- a recovery ---

    def report(self, view: pb.View) -> None:
        """(PLANNING) Reports this rank's recovery offer. The caller repeats it until the View moves on."""
        if self.log.opened:
            self._site.flushed = self.log.enter(view) is None
        standing, snapshots = self._site.state.standing(), self._site.snapshots
        for participant in self._participants:
            standing = participant.offer(standing)
        generation = view.generation

        def statement() -> None:
            report = pb.ReportRequest(
                generation=generation,
                has_state=standing.version is not None,
                can_help=self._restorer.can_help,
                snapshots=[
                    pb.HeldSnapshot(rank=rank, version=version)
                    for rank, version in (snapshots.held_snapshots() if snapshots is not None else ())
                ],
                **asdict(standing),
            )
            self._site.member.client.call(report)

        if self._site.member.say(statement):
            events.emit("reported", rank=self._site.rank, generation=generation, **asdict(standing))

    def _rejoin(self, train_step: TrainStep) -> None:
        """(FORMING, RECOVERING) Goes from rebuilt groups to RUNNING."""
        site, view, published = self._site, self.membership.view, self.membership.plan
        self._steps.rolled_forward = False
        site.member.check()
        if view.state == pb.FORMING:
            begin_at_version_0(view, site.rank, site.state, site.store, self._saving)
            self.log.writer.await_ready()  # so that the first steps' records do not stay in the writer's ring
        else:
            assert published is not None
            self._follow(published, lambda: self._steps.run(train_step))
        version = site.member.version = site.state.version
        events.emit("ready", rank=site.rank, generation=view.generation, version=version)
        if view.state == pb.RECOVERING:
            write_digests(site.state, site.rank, recovered_in=view.generation)
        self._await_running(view, self._ready_of(view.generation))
        site.state.lived = True
        site.state.updates.hold_next = True  # a new rank does not know which holds the others need
        if published is not None and not published.plan.exact and version not in view.checkpoints:
            self._saving.save()  # it cannot be rebuilt from older data
        events.emit("resumed", rank=site.rank, generation=view.generation, version=version)
        self._gradient_bytes = site.state.gradient_bytes()
        for participant in self._participants:
            participant.resume(at_start=view.state == pb.FORMING)

    def _follow(self, published: PublishedPlan, step: Callable[[], None]) -> None:
        if not published.plan.exact:
            self._site.witness.forget()
        done_again = published.plan.of(self._site.rank).loads
        incomplete = self.log.why_incomplete()
        if incomplete is not None and not done_again:
            raise ReplayRefused(f"what rank {self._site.rank} has done is not in the log: {incomplete}")
        if published.plan.restores:
            self._saving.restores(published.plan.target_version)
        self._restorer.follow(published, self.log.writer, self.log.servers, step)
        if done_again:
            self.log.done_again()

    def _ready_of(self, generation: int) -> Callable[[], None]:
        version, stages = self._site.state.version, self._site.state.stages
        indices = sorted({stage.stage_index for stage in stages})
        return lambda: self._site.member.client.call(
            pb.ReadyRequest(
                generation=generation,
                version=version,
                stages=indices,
                num_stages=stages[0].num_stages,
                shard=self._site.assignment.slots[self._site.rank].shard,
            )
        )

    def _await_running(self, view: pb.View, say_ready: Callable[[], None]) -> None:
        """Returns when all other ranks are ready too. Repeats Ready at each change of the View, and every `RESAY_S`."""
        while True:
            self._site.member.check()
            # `view` may be outdated by now: wait for a change of the newest one.
            latest = self._site.member.watcher.latest or view
            if latest.state == pb.RUNNING and latest.generation == view.generation:
                return
            self._site.member.say(say_ready)
            self._site.faults.while_others_replay(self._site.state.version)
            self._site.member.await_change(latest)

    # --- ---

    def _blamed(self, error: Exception) -> Exception:
        """Returns the error that has ended the step: `error`, or that of a vote under way."""
        return error if self._site.staggering is None else self._site.staggering.blamed(error)

    def _leave_generation(self) -> None:
        """(the trainer's thread is freed, because a newer generation is published) Raises Reinitialize if the trainer's
        function begins again in it."""
        latest = self._site.member.watcher.latest
        events.emit("freed", rank=self._site.rank, generation=latest.generation if latest is not None else 0)
        self._recording.abandon()
        if self._site.config.setting.calls_again:
            raise reinitialization.hand_on(self._site.member)

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
        self._site.member.check()
        self._site.communicator.check_whole()
        self._lines.write(self._site.state.version)
        updates, step = self._site.state.updates, self._site.state.version
        updates.voting = not updates.ahead  # only now: an error of a broken DDP reduction is not a vote
        stage_group = self.membership.slot.stage_group
        stage_groups = self.membership.assignment.stage_groups
        waits = staggering is not None and staggering.waits()
        ballot = updates.ballot(stage_group, stage_groups, lines=self._lines.in_use, waits=waits)
        if updates.ahead:
            assert staggering is not None, "only staggered steps run ahead of their vote"
            staggering.voted(ballot, self._site.world.submit(lambda collectives: collectives.barrier(ballot)))
            return
        try:
            self._site.world.run(lambda collectives: collectives.barrier(ballot))
            self.vote_seconds += time.monotonic() - began
            heard = updates.apply_outcome(ballot, step)
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
        self._leave_generation()
        self.membership.form()
        if self.membership.finished:  # it was a spare
            raise StepDropped
        published = self.membership.plan
        assert published is not None
        mine = published.plan.of(self._site.rank)
        if not mine.policy.finishes_step:
            raise StepDropped
        self._steps.rolled_forward = True
        events.emit(
            "roll_forward", rank=self._site.rank, generation=published.generation, version=mine.from_version
        )
        return any(ranks.policy.together for ranks in published.plan.ranks)

    def close(self) -> None:
        """Closes the parts. Unacknowledged log records are dropped. The coordinator connection stays open if it was
        handed on."""
        self.log.close()
        self._site.store.close()
        self._lines.close()
        handed_on = reinitialization.has(self._site.member)
        if not handed_on:
            self._site.member.close()
        self._site.communicator.drop_session()
        if handed_on:
            self._site.member.detach()

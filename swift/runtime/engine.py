"""The loop around the trainer's step: run, drop or finish, restore, rejoin.

    FORMING      build groups, save version 0, Ready
    RUNNING      steps; every K steps a checkpoint, and at the version that the View names
    (notice)     the step in flight is dropped; one that waits in the commit vote is held until there is a plan
    PLANNING     log flushed under the new generation, Report
    RECOVERING   groups rebuilt; roll forward, undo, copy, restore and replay as the plan says; Ready
    RUNNING      on, at the plan's target version

What a member says in a state it says again until the View moves on: the coordinator may have been restarted.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.control.plans import PublishedPlan, of_view
from swift.errors import (
    Fenced,
    JobFailed,
    LogError,
    LogInterrupted,
    LogUnavailable,
    ReplayRefused,
    ServiceError,
    SwiftError,
    UsageError,
    is_difference,
)
from swift.log.writers import Writer, open_writer
from swift.recovery import Assignment, RankMeasured
from swift.runtime.audit import Audit
from swift.runtime.beginning import begin
from swift.runtime.channel import Channel
from swift.runtime.checkpointing import Saving
from swift.runtime.communicator import Communicator, Interrupted
from swift.runtime.config import SessionConfig
from swift.runtime.differences import Differences
from swift.runtime.early_checkpoint import EarlyCheckpoint, UnloggedSteps
from swift.runtime.ending import Ending
from swift.runtime.errors import advice_on, let_go, words_of
from swift.runtime.evidence import every_version, write_digests
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.lines import Lines
from swift.runtime.losses import Losses
from swift.runtime.measures import Measures, progress
from swift.runtime.member import RESAY_S, Member, is_filled, own_servers
from swift.runtime.rehearsal import Rehearsal
from swift.runtime.restore import FLUSH_TIMEOUT_S, Restorer
from swift.runtime.retries import Retries
from swift.runtime.script import Script
from swift.runtime.shared_replay.helper import MakeModule
from swift.runtime.standing import Standing
from swift.runtime.state import TrainerState
from swift.runtime.witness import Witness

TrainStep = Callable[[int], object]


class StepDropped(Exception):
    """The plan drops the step that waited in the vote. The new generation's groups are built already."""


_NOTICE_POLL_S = 0.005
_FAIL_S = 5.0
"""How long a rank that ends with an error tries to tell the coordinator."""


class Engine:
    """One rank's life, from join to the end of the run."""

    def __init__(
        self,
        rank: int,
        config: SessionConfig,
        member: Member,
        communicator: Communicator,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        faults: FaultInjector,
        world: ReconfigurableGroup,
        assignment: Assignment,
        *,
        witness: Witness,
        losses: Losses,
        differences: Differences,
        audit: Audit | None,
        lines: Lines,
    ):
        """`assignment`: of the full world, in which `rank` is the number of a slot. `audit`: None if there are no
        replicas to compare with."""
        self.lines = lines
        self._rank = rank
        self._config = config
        self._member = member
        self._communicator = communicator
        self._channel = channel
        self._state = state
        self._store = store
        self._faults = faults
        self._restorer = Restorer(rank, member, channel, state, store, faults, world, config.replay_stall_s)
        self._writer: Writer | None = None
        self.log_servers: list[str] = []
        self._own_servers: dict[str, int] = {}  # those that keep what this rank writes, and their numbers
        self._world = world  # all ranks
        self._audit = audit
        self.assignment = assignment
        """Of the generation whose groups are built; before there is one, of the full world."""
        self._slot = assignment.slots[rank]
        self._rolled_forward = False  # a step was finished on the plan's word; its recovery is not over
        self.vote_seconds = 0.0
        self._lost: SwiftError | None = None  # why the log lacks, or contradicts, what this rank has done
        self._view: pb.View | None = None
        self._plan: PublishedPlan | None = None  # of that view
        self._entering = threading.Lock()
        self._early = EarlyCheckpoint(member)
        self._unlogged = UnloggedSteps(member)
        self._gradient_bytes: dict[int, int] = {}  # of each stage
        self._measures = Measures(channel, store)
        self.losses = losses
        self._witness = witness
        self._rehearsal = Rehearsal(config.paranoid, channel, state, witness, differences)
        beside = state.beside
        self._script = Script(
            state.told, beside.transient, differences.say, warns=rank == 0, untellable=beside.untellable
        )
        self._saving = Saving(rank, member, state, store, channel.logged_groups)
        self.ending = Ending(rank, member, state, store, self._saving, saves=config.last_checkpoint)
        self._retries = Retries(rank)
        state.updates.vote.bind(self.vote)

    def help_replay(self, make_module: MakeModule) -> None:
        """This rank can build any stage."""
        self._restorer.make_module = make_module

    # --- membership ---

    def form(self) -> None:
        """Blocks until this rank is in a generation whose groups are built (FORMING or RECOVERING)."""
        while True:
            view = self._member.watcher.wait_for(lambda _view: True, None)
            with self._entering:
                self._member.enter(view.generation)
            try:
                self._member.check()
                if view.state == pb.PLANNING:
                    self._report(view)
                    self._member.await_change(view)
                elif view.state == pb.FINISHED:
                    self._view = view
                    self._communicator.stand_alone()
                    return  # this process has come for one that was lost after the end
                elif view.state in (pb.FORMING, pb.RECOVERING) and is_filled(view):
                    self._open_log(view)
                    assignment = self.assignment.held_by({member.rank: member.id for member in view.members})
                    self._communicator.build(view.generation, assignment.occupied)
                    self._view, self._plan, self.assignment = view, of_view(view), assignment
                    return
                else:
                    self._member.await_change(view)
            except (Interrupted, LogInterrupted):
                continue  # a newer generation came meanwhile
            except RuntimeError as error:  # a peer was lost while the groups were being built
                self._await_notice(error, view.generation)

    def _report(self, view: pb.View) -> None:
        if self._writer is not None:
            emptied = self._place_log(view)
            trouble: SwiftError | None = None
            try:
                self._writer.set_generation(view.generation, list(self._own_servers), emptied)
                self._writer.flush(FLUSH_TIMEOUT_S)
            except (ServiceError, LogError, ReplayRefused) as error:
                # The coordinator asks the log itself what it has, and plans without the rest. If it is still so when
                # training goes on, this rank refuses then; its state is not lost over it.
                trouble = error
            self._lost = self._lost or self._writer.unlogged.refusal()
            trouble = trouble or self._lost
            if trouble is not None:
                events.emit(
                    "log_incomplete", rank=self._rank, generation=view.generation, reason=str(trouble)
                )
            self._restorer.site.flushed = trouble is None
        standing = self._standing()
        self._member.client.report(
            view.generation,
            standing.version,
            undo_to=standing.undo_to,
            undo_exact=standing.undo_exact,
            forward_to=standing.forward_to,
            forward_by_all=standing.forward_by_all,
            can_help=self._restorer.can_help,
            off_log=standing.version is not None and self._channel.off_log,
        )
        events.emit("reported", rank=self._rank, generation=view.generation, **standing.words())

    def _standing(self) -> Standing:
        if not self._state.present:
            return Standing(version=None)
        standing = self._state.updates.standing(self._state.version)
        if standing.version is not None and not self._state.can_drop:  # in the vote: it can only be finished
            return replace(standing, version=None)
        return standing

    def _place_log(self, view: pb.View) -> list[str]:
        """Takes the servers that the View names for what this rank writes. Gives those that were emptied since."""
        before = self._own_servers
        self._own_servers = own_servers(view, self._rank)
        if self._own_servers != before:
            events.emit(
                "log_placed",
                rank=self._rank,
                generation=view.generation,
                servers=list(self._own_servers),
                instead_of=list(before),
            )
        return [s for s, number in self._own_servers.items() if before.get(s, number) != number]

    def _open_log(self, view: pb.View) -> None:
        self.log_servers = list(view.log_servers)
        if self._writer is not None and view.state == pb.FORMING:
            # Somebody was lost before the job has run: nothing is logged yet.
            emptied = self._place_log(view)
            self._writer.set_generation(view.generation, list(self._own_servers), emptied)
        if self._writer is None:
            self._place_log(view)
            self._writer = open_writer(
                list(self._own_servers),
                view.job,
                view.generation,
                codec=self._config.codec,
                fsync=self._config.log_fsync,
                queue_bytes=self._config.log_queue_bytes,
                when_full=self._config.log_when_full,
                name=f"rank{self._rank}",
                lease=self._member.lease,
            )
            self._channel.open(self._writer)

    def progress(self) -> dict[str, float]:
        """(any thread) What this rank has done so far, by the names of `metrics.Progress`."""
        generation = self._view.generation if self._view is not None else 0
        return progress(generation, self._state.version, self.vote_seconds, self._writer)

    def measured(self) -> RankMeasured | None:
        """(lease thread)"""
        return self._measures.now(self._writer, self._gradient_bytes)

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        """(lease thread) A checkpoint that could not be written yet."""
        return self._saving.unsaved()

    def interrupt(self, generation: int) -> None:
        """(notice thread) Frees the trainer's thread from whatever it waits in."""
        with self._entering:  # a notice that was acted on meanwhile must not stop the new generation
            if self._writer is not None and self._member.noticed:
                self._writer.interrupt()
        self._communicator.interrupt(generation, lambda: not self._member.noticed)

    # --- the loop ---

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Steps until `num_steps` are done, through every recovery. Returns when all ranks are there."""
        if self._view is not None and self._view.state == pb.FINISHED:
            self.ending.come_back(self._view, num_steps)
            return
        self.ending.begin(num_steps)
        while True:
            try:
                self._rejoin(train_step)
                while self._state.version < self.ending.last(num_steps):
                    self._faults.at("idle", self._state.version)
                    self._member.check()
                    self._step(train_step)
                    if self._rolled_forward:
                        self._rejoin(train_step)
                self._script.look()
                assert self._writer is not None
                write_digests(self._state, f"rank{self._rank}-v{self._state.version}.json")
                self.lines.cut(self._state.version)
                self.ending.finish(num_steps, self._writer, self._member.await_change, self.vote_seconds)
                return
            except (JobFailed, Fenced):
                raise
            except StepDropped:
                self._drop_step()
                continue
            except Exception as error:  # noqa: BLE001  (a lost peer shows as any error; _handle re-raises the rest)
                self._handle(error)
            self._freed()
            self._drop_step()
            self.form()

    def _freed(self) -> None:
        latest = self._member.watcher.latest
        events.emit("freed", rank=self._rank, generation=latest.generation if latest is not None else 0)

    def vote(self) -> None:
        """(inside optimizer.step, or at the end of a step that is held) Returns if this rank's update is to be applied,
        or stays applied.

        A barrier of all ranks, which nobody enters before its gradients are all reduced. If it fails, this rank
        cannot know whether others are through it. So it does not unwind: it takes part in the recovery
        from here, with the trainer's step on the stack, and finishes the step if the plan says roll forward.
        Raises StepDropped if the plan says anything else.
        """
        began = time.monotonic()
        self._member.check()
        self._communicator.check_whole()
        self.lines.write(self._state.version)
        updates = self._state.updates
        updates.voting = True  # only now: what DDP has made of a broken reduction is no vote
        # Also before the first line: who is to write it may be the one that is lost.
        lines = self.lines.in_use or self._script.loads("log")
        said = updates.ballot(self._slot.stage_group, self.assignment.stage_groups, lines=lines)
        try:
            self._world.run(lambda collectives: collectives.barrier(said))
            self.vote_seconds += time.monotonic() - began
            updates.heard(said)
            return
        except (JobFailed, Fenced, UsageError):
            raise
        except Exception as error:  # noqa: BLE001  (as in `run`)
            self._handle(error)
        self._freed()
        self.form()
        assert self._plan is not None
        generation, mine = self._plan.generation, self._plan.plan.of(self._rank)
        if not mine.policy.finishes_step:
            raise StepDropped
        self._rolled_forward = True
        events.emit("roll_forward", rank=self._rank, generation=generation, version=mine.from_version)

    def _rejoin(self, train_step: TrainStep) -> None:
        """From groups that are built to RUNNING."""
        view = self._view
        assert view is not None
        self._member.check()
        self._rolled_forward = False
        if view.state == pb.FORMING:
            begin(view, self._rank, self._state, self._store, self._saving, self._digest)
            if self._writer is not None:
                self._writer.await_ready()  # so that the first steps do not only lie in its ring
        else:
            assert self._plan is not None
            self._follow_plan(self._plan, train_step)
            if self._plan.plan.saves:
                self._saving.save_before_ready(view.generation)
        version = self._member.version = self._state.version
        self._gradient_bytes = self._state.gradient_bytes()
        stages = sorted({stage.stage_index for stage in self._state.stages})
        num_stages = self._state.stages[0].num_stages
        events.emit("ready", rank=self._rank, generation=view.generation, version=version)
        if view.state == pb.RECOVERING:
            write_digests(self._state, f"rank{self._rank}-v{version}-g{view.generation}.json")
        self._await_running(
            view,
            lambda: self._member.client.ready(
                view.generation, version, stages, num_stages, self._slot.shard, off_log=self._channel.off_log
            ),
        )
        self._state.lived = True
        self._state.updates.hold_next = True  # whoever is new here does not know what the others need
        self._rehearsal.arm(at_start=view.state == pb.FORMING)
        if self._plan is not None and self._plan.plan.saves_once_running and version not in view.checkpoints:
            self._saving.save()
        events.emit("resumed", rank=self._rank, generation=view.generation, version=version)

    def _await_running(self, view: pb.View, say_ready: Callable[[], None]) -> None:
        """Until all others are ready as well. It is said once for each change of the View, and every `RESAY_S`."""
        while True:
            self._member.check()
            # `view` may be an old one by now: what is awaited is a change of the newest.
            latest = self._member.watcher.latest or view
            if latest.state == pb.RUNNING and latest.generation == view.generation:
                return
            say_ready()
            self._faults.while_others_replay(self._state.version)
            self._member.await_change(latest)

    def _step(self, train_step: TrainStep) -> None:
        step = self._state.version
        replaying = self._channel.replaying
        self._saving.learn_groups()
        self._rehearsal.before(train_step, step, self._drop_step)
        events.emit("step_begin", rank=self._rank, step=step, replay=replaying)
        self._channel.begin_step(step)
        self._witness.begin(step)
        self.ending.begin_step()
        self._state.begin_step()
        self._script.begin(step, train_step, self._state.code)
        with self._retries.step(step):
            train_step(step)
        self._channel.settle()
        self._state.updates.end_step()
        due = (step + 1) % self._config.checkpoint_every == 0
        self.lines.end(step, lasts=due)
        self._state.end_step()
        version = self._member.version = self._state.version
        self.ending.end_step(version)
        events.emit("step_end", rank=self._rank, step=step, replay=replaying)
        self._channel.profile.end(step, replay=replaying, logged_by=self._channel.logged_by)
        self._digest()
        self._script.end(step, checkpoint=due)
        # One that has rolled forward compares nothing: those that were past the vote have done so or will not.
        if self._audit is not None and (due or version == 1) and not (replaying or self._rolled_forward):
            self._audit.compare(self._script.amiss)
        # On the way to a target that all save, no other version of this history is ever complete.
        passing = replaying and self._plan is not None and self._plan.plan.saves
        # An early checkpoint, too: ranks that have not heard of it do not save it.
        if not passing and (self._early.due(version) or due):
            self._saving.save()
        assert self._writer is not None
        self._unlogged.after_step(step, self._writer.unlogged.news())
        self._writer.forget_below(version)  # only a step that is dropped is sent again
        self._saving.prune()
        latest = self._member.watcher.latest
        self._witness.forget_below(min(latest.checkpoints, default=0) if latest is not None else 0)

    def _digest(self) -> None:
        if every_version():
            write_digests(self._state, f"rank{self._rank}-v{self._state.version}.json")

    # --- recovery ---

    def _follow_plan(self, published: PublishedPlan, train_step: TrainStep) -> None:
        assert self._writer is not None
        if not published.plan.exact:
            self._witness.forget()
        done_again = published.plan.of(self._rank).loads
        self._lost = self._lost or self._writer.unlogged.refusal()
        if self._lost is not None and not done_again:
            raise ReplayRefused(f"what rank {self._rank} has done is not in the log: {self._lost}")
        self._restorer.follow(
            published, self._writer, list(self._own_servers), lambda: self._step(train_step)
        )
        if done_again:
            self._writer.unlogged.refusal()
            self._lost = None

    def _drop_step(self) -> None:
        self._channel.end_replay()
        self._channel.drop_step()
        if self._state.present and self._state.updates.begun:
            # The optimizer has begun: the parameters are of no version, so this rank restores.
            self._state.present = False
        self._state.drop_step()
        self._script.drop(self._state.version)
        self.lines.forget()

    def _handle(self, error: Exception) -> None:
        """Returns if the error is a failure's consequence (a newer generation is there); else raises it."""
        let_go(error)
        generation = self._view.generation if self._view is not None else 0
        if self._member.noticed:
            self._await_notice(error)
        elif isinstance(error, ReplayRefused | LogError):
            self._member.client.refuse(generation, str(error), differs=is_difference(error))
            self._await_notice(error)
        elif (
            self._communicator.lost_peer(error)
            or isinstance(error, LogUnavailable)
            or self._communicator.broken is not None  # the trainer may have stumbled over what came of it
        ):
            # Not ours to decide: the coordinator hears of a death from a launcher or from the lease, and if there is
            # none, all go on together in another generation.
            self._await_notice(error, generation)
        elif again := self._retries.again(error):
            self._await_notice(error, generation, again)
        else:
            self._fail(error)

    def _await_notice(self, error: Exception, suspected_in: int = 0, again: str = "") -> None:
        """Returns once a newer generation is there. Raises Fenced or JobFailed; the error itself if none comes.

        `suspected_in`: the generation whose connections broke, which the coordinator is to know. `again`: it was not
        that, but the trainer's own error, after which the step is to be done again.
        """
        deadline = time.monotonic() + self._config.suspicion_timeout_s
        said = -math.inf
        while not self._member.noticed:
            if time.monotonic() > deadline:
                self._fail(error)
            if suspected_in and time.monotonic() - said > RESAY_S:
                self._member.client.suspect(suspected_in, again or words_of(error), again=bool(again))
                said = time.monotonic()
            time.sleep(_NOTICE_POLL_S)
        try:
            self._member.check()
        except Interrupted:
            return

    def _fail(self, error: Exception) -> None:
        """The job ends. Bad input is told by the exit code: the launcher stops the job with the same one."""
        if not isinstance(error, UsageError):
            try:
                self._member.client.fail(words_of(error)[:400] + advice_on(error), patience_s=_FAIL_S)
            except (
                SwiftError
            ) as untold:  # the launcher tells of our end, and its author is to see the error itself
                events.emit("failure_untold", rank=self._rank, reason=str(untold))
        raise error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(0.0)
        self._store.close()
        self.lines.close()
        self._member.close()
        self._communicator.tear_down()

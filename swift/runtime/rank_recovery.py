"""This rank's part in a recovery: what it reports before there is a plan, and what it does by the plan.

    PLANNING     ``report``: the log flushed under the new generation, the versions that this rank can give
    RECOVERING   ``rejoin``: undo, copy, restore and replay as the plan says; Ready; until RUNNING
    FORMING      ``rejoin``: version 0 saved, or what the job begins with loaded; Ready; until RUNNING

How a rank gets to the plan's version is `swift.runtime.restore`, and each strategy's part in it
`swift.runtime.strategies`.
"""

from collections.abc import Callable

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.control.plans import PublishedPlan
from swift.errors import ReplayRefused
from swift.runtime.beginning import begin
from swift.runtime.channel import Channel
from swift.runtime.checkpointing import Saving
from swift.runtime.evidence import write_digests
from swift.runtime.faults import FaultInjector
from swift.runtime.member import Member
from swift.runtime.own_log import OwnLog
from swift.runtime.restore import Restorer
from swift.runtime.staggering import Staggering
from swift.runtime.state import TrainerState
from swift.runtime.witness import Witness


class RankRecovery:
    """Trainer's thread."""

    def __init__(
        self,
        rank: int,
        shard: int,
        member: Member,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        log: OwnLog,
        *,
        saving: Saving,
        restorer: Restorer,
        witness: Witness,
        faults: FaultInjector,
        staggering: Staggering,
    ) -> None:
        self._rank = rank
        self._shard = shard
        self._member = member
        self._channel = channel
        self._state = state
        self._store = store
        self._log = log
        self._saving = saving
        self._restorer = restorer
        self._witness = witness
        self._faults = faults
        self._staggering = staggering

    def report(self, view: pb.View) -> None:
        """(PLANNING) What this rank has to offer. Said again by the caller until the View moves on."""
        if self._log.opened:
            self._restorer.site.flushed = self._log.enter(view) is None
        standing = self._staggering.standing(self._state.standing())
        generation = view.generation

        def statement() -> None:
            self._member.client.report(
                generation,
                standing.version,
                undo_to=standing.undo_to,
                undo_exact=standing.undo_exact,
                forward_to=standing.forward_to,
                forward_by_all=standing.forward_by_all,
                finish_to=standing.finish_to,
                can_help=self._restorer.can_help,
                off_log=standing.version is not None and self._channel.off_log,
                snapshots=self._restorer.site.snapshots.held(),
            )

        if self._member.say(statement):
            events.emit("reported", rank=self._rank, generation=generation, **standing.words())

    def rejoin(self, view: pb.View, published: PublishedPlan | None, step: Callable[[], None]) -> None:
        """From groups that are built to RUNNING. `published`: None where the job begins. `step` does one step of the
        trainer."""
        self._member.check()
        if view.state == pb.FORMING:
            begin(view, self._rank, self._state, self._store, self._saving)
            self._log.writer.await_ready()  # so that the first steps do not only lie in its ring
        else:
            assert published is not None
            self._follow(published, step)
            if published.plan.saves:
                self._saving.save_before_ready(view.generation)
        version = self._member.version = self._state.version
        events.emit("ready", rank=self._rank, generation=view.generation, version=version)
        if view.state == pb.RECOVERING:
            write_digests(self._state, self._rank, recovered_in=view.generation)
        self._await_running(view, self._ready_of(view.generation))
        self._state.lived = True
        self._state.updates.hold_next = True  # whoever is new here does not know what the others need
        if published is not None and published.plan.saves_once_running and version not in view.checkpoints:
            self._saving.save()
        events.emit("resumed", rank=self._rank, generation=view.generation, version=version)

    def _follow(self, published: PublishedPlan, step: Callable[[], None]) -> None:
        if not published.plan.exact:
            self._witness.forget()
        done_again = published.plan.of(self._rank).loads
        incomplete = self._log.why_incomplete()
        if incomplete is not None and not done_again:
            raise ReplayRefused(f"what rank {self._rank} has done is not in the log: {incomplete}")
        self._restorer.follow(published, self._log.writer, self._log.servers, step)
        if done_again:
            self._log.done_again()

    def _ready_of(self, generation: int) -> Callable[[], None]:
        version, stages = self._state.version, self._state.stages
        indices = sorted({stage.stage_index for stage in stages})
        return lambda: self._member.client.ready(
            generation,
            version,
            indices,
            stages[0].num_stages,
            self._shard,
            off_log=self._channel.off_log,
        )

    def _await_running(self, view: pb.View, say_ready: Callable[[], None]) -> None:
        """Until all others are ready as well. It is said once for each change of the View, and every `RESAY_S`."""
        while True:
            self._member.check()
            # `view` may be an old one by now: what is awaited is a change of the newest.
            latest = self._member.watcher.latest or view
            if latest.state == pb.RUNNING and latest.generation == view.generation:
                return
            self._member.say(say_ready)
            self._faults.while_others_replay(self._state.version)
            self._member.await_change(latest)

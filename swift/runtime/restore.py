"""Gets a rank to the plan's version.

own way   what its strategy does without any other rank (`swift.runtime.strategies`)
copies    whoever copies receives from its sources, which have gone their own way by then
replay    if that is below the plan's target: the steps up to it, out of the log
"""

import time
from collections.abc import Callable
from typing import Any

from swift import events
from swift.checkpoint.store import CheckpointStore
from swift.control.plans import PublishedPlan
from swift.errors import ReplayRefused
from swift.log.memory import freed_memory_kept
from swift.log.reader import LogReader
from swift.log.streams import collectives
from swift.log.writers import Writer
from swift.recovery import Help, Plan
from swift.recovery.groups import RecoveryGroups
from swift.runtime.channel import Channel
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.member import Member
from swift.runtime.own_log import FLUSH_TIMEOUT_S, log_totals
from swift.runtime.own_streams import OwnStreams, Servers
from swift.runtime.pace import Pace
from swift.runtime.shared_replay.helper import Helper, MakeModule
from swift.runtime.shared_replay.owner import Helped, Owner, send_away, why_alone, why_no_help
from swift.runtime.shared_replay.waits import bottleneck, split
from swift.runtime.snapshots import Snapshots
from swift.runtime.staggering import Staggering
from swift.runtime.standstill import Standstill
from swift.runtime.state import TrainerState
from swift.runtime.strategies import TABLE
from swift.runtime.strategies.restore import Site


class Restorer:
    """What one rank does in RECOVERING, besides building its groups."""

    def __init__(
        self,
        rank: int,
        member: Member,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        faults: FaultInjector,
        world: ReconfigurableGroup,
        stall_s: float,
        snapshots: Snapshots,
        staggering: Staggering,
    ):
        """`stall_s`: a replay that stands still for so long is refused."""
        self._world = world
        self._stall_s = stall_s
        self._rank = rank
        self._member = member
        self._channel = channel
        self._state = state
        self.site = Site(
            rank=rank,
            member=member,
            channel=channel,
            state=state,
            store=store,
            faults=faults,
            world=world,
            snapshots=snapshots,
            staggering=staggering,
        )
        self._own = OwnStreams(rank, member, channel, state)
        self.make_module: MakeModule | None = None
        """From the trainer: how the module of any stage is made."""

    @property
    def can_help(self) -> bool:
        """In another rank's replay. (A replacement that reports has not made its stage yet: it says no.)"""
        return self.make_module is not None and not why_no_help(self._state)

    def follow(
        self, published: PublishedPlan, writer: Writer, log_servers: list[str], step: Callable[[], None]
    ) -> None:
        """Returns with the state at the plan's target; `step` does one step of the trainer. `log_servers`: those that
        keep what this rank writes.

        Raises ReplayRefused if it cannot be done as planned, Interrupted if a newer generation comes.
        """
        plan, site = published.plan, self.site
        mine = plan.of(self._rank)
        site.generation = published.generation
        site.tell_drawn(plan.target_version)
        shared = plan.help_of(self._rank)
        sharing = self._asked(shared, published.generation)
        TABLE[mine.strategy].restore(site, mine)
        # Of older steps nothing comes again, and they may be trimmed: a sidecar's successor shall not ask for them.
        writer.forget_below(mine.from_version)
        if plan.gives_up_log:
            # The coordinator has emptied the job's streams; what comes now is logged anew.
            writer.restart(published.generation)
            self._channel.off_log = False
        if plan.restores:
            site.snapshots.forget_above(plan.target_version)
        for copy in plan.copies:
            TABLE[copy.strategy].copy(site, copy)
        with Servers(self._member) as servers:
            if not plan.gives_up_log and (plan.was_logged(self._rank) or not self._state.lived):
                # By a process that held the rank before, or by this one, which has forgotten it.
                self._own.expect(servers, writer, log_servers, mine.from_version)
            if site.copied is not None:
                self._own.declare_gaps(servers, writer, log_servers, site.copied)
                site.copied = None
        replays = self._rank in plan.replayed_from
        if replays or shared is not None:
            self._channel.groups = RecoveryGroups.parse(plan.groups)
        if replays:
            self._replay(published, writer, step, sharing)
        elif shared is not None:
            self._help(shared.owner, published)
        if self._state.version != plan.target_version:
            raise ReplayRefused(
                f"rank {self._rank} is at version {self._state.version}, the plan says {plan.target_version}"
            )

    def _asked(self, shared: Help | None, generation: int) -> Owner | None:
        """(an owner) Its helpers build the stage while it gets its state. None: nobody helps this rank."""
        if shared is None or shared.owner != self._rank:
            return None
        if why := why_alone(self._state):
            send_away(self._rank, shared, self._world, generation, why)
            return None
        sharing = Owner(self._rank, shared, self._world, self._channel, self._state, self._member.check)
        sharing.ask()
        return sharing

    def _replay(
        self,
        published: PublishedPlan,
        writer: Writer,
        step: Callable[[], None],
        sharing: Owner | None,
    ) -> None:
        plan, generation = published.plan, published.generation
        target, from_version = plan.target_version, plan.of(self._rank).from_version
        before = log_totals(writer)
        events.emit("replay_begin", rank=self._rank, generation=generation, version=from_version)
        reader = LogReader(published.sources, self._member.client.job)
        try:
            too = self._replayed_too(plan)
            self._channel.begin_replay(reader, from_version, plan.collective_sources, too)
            if sharing is not None:
                sharing.gather(from_version, generation)
            self._channel.read_ahead(self._streams_read(plan))
            began = time.monotonic()
            pace = Pace(self._rank, from_version, target, plan.predicted_s(self._rank))
            self._member.replay = pace.progress
            with freed_memory_kept(), self._bounded(generation):
                while self._state.version < target:
                    self._member.check()
                    if sharing is not None:
                        sharing.at(self._state.version)
                    step()
                    pace.at(self._state.version)
            if sharing is not None:
                sharing.at(target)
            seconds = time.monotonic() - began
        finally:
            self._member.replay = None
            if sharing is not None:
                sharing.close()
            self._channel.end_replay()
            reader.close()
        writer.flush(FLUSH_TIMEOUT_S)
        after = log_totals(writer)
        helped = sharing.helped if sharing is not None else Helped()
        events.emit(
            "replay_end",
            rank=self._rank,
            generation=generation,
            version=target,
            exact=not self._channel.off_log,
            steps=target - from_version,
            records=self._channel.records_read + helped.records,
            microbatches=self._channel.microbatches_replayed + helped.microbatches,
            verified=after["verified"] - before["verified"] + helped.verified,
            shared_steps=helped.steps,
            filled=after["records"] - before["records"],
            **self._where_time_went(seconds, helped),
        )

    def _bounded(self, generation: int) -> Standstill:
        return Standstill(
            self._stall_s,
            lambda: (self._state.version, self._channel.records_read, self._channel.microbatches_replayed),
            lambda why: self._member.client.refuse(generation, f"rank {self._rank}: {why}"),
            lambda: self._member.noticed,
        )

    def _where_time_went(self, seconds: float, helped: Helped) -> dict[str, Any]:
        own = self._channel.clock.told()
        shares = split(seconds, own, helped.seconds)
        return {
            "seconds": seconds,
            "bottleneck": bottleneck(shares),
            "split": shares,
            "waits": {str(rank): spent for rank, spent in {self._rank: own, **helped.seconds}.items()},
            "log_wait_s": own["log"],
        }

    def _streams_read(self, plan: Plan) -> list[str]:
        boundaries = [stream for stage in self._state.stages for stream in stage.streams_read()]
        return (
            boundaries if plan.collective_source < 0 else [*boundaries, collectives(plan.collective_source)]
        )

    def _replayed_too(self, plan: Plan) -> dict[int, int]:
        """Stages of other ranks -> the version from which they are replayed as well."""
        homes = self._state.stages[0].stage_index_to_group_rank
        ranks = {stage: self._channel.rank_at(home) for stage, home in homes.items()}
        begun = plan.replayed_from
        return {stage: begun[rank] for stage, rank in ranks.items() if rank in begun and rank != self._rank}

    def _help(self, owner: int, published: PublishedPlan) -> None:
        assert self.make_module is not None, "nobody plans with a rank that has not said that it can"
        helper = Helper(
            self._rank, self.make_module, self._world, self._channel, self._state, self._member.check
        )
        with freed_memory_kept():
            helper.run(owner, published, self._member.client.job)

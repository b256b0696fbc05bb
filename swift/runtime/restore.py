"""Gets a rank to the plan's version: undo, copy, restore, replay.

own way   KEEP, ROLL_FORWARD (done by the vote), UNDO, CHECKPOINT or REPLAY (load)
copies    a REPLICA receives from its sources, which have gone their own way by then
replay    if that is below the plan's target: the steps up to it, out of the log
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import (
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ReplayRefused,
    ReplicaDiffers,
    ServiceError,
)
from swift.log.gaps import gaps
from swift.log.memory import freed_memory_kept
from swift.log.reader import LogReader
from swift.log.record import RecordKey
from swift.log.streams import KINDS, collectives
from swift.log.unlogged import Steps, declared
from swift.log.writers import Writer
from swift.recovery.groups import RecoveryGroups
from swift.runtime.channel import Channel
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.member import Member
from swift.runtime.pace import Pace
from swift.runtime.plans import collective_sources, gives_up_log, own_plan
from swift.runtime.replica import Transfer, receive_state, send_state
from swift.runtime.shared_replay.helper import Helper, MakeModule
from swift.runtime.shared_replay.owner import Helped, Owner, send_away, why_alone, why_no_help
from swift.runtime.shared_replay.waits import bottleneck, split
from swift.runtime.standstill import Standstill
from swift.runtime.state import TrainerState
from swift.runtime.tags import REPLICA_CHUNK

FLUSH_TIMEOUT_S = 60.0


def load_checkpoint(state: TrainerState, store: CheckpointStore, version: int) -> dict[str, Any]:
    """What was loaded. Raises ReplayRefused, whatever the trainer's own objects raise: the coordinator may know another
    way."""
    try:
        saved: dict[str, Any] = store.load(version)
        state.load_state_dict(saved)
    except ServiceError as error:
        raise ReplayRefused(str(error)) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"the checkpoint of version {version} cannot be loaded: {why}") from error
    return saved


def log_totals(writer: Writer) -> dict[str, int]:
    stats = writer.stats
    return {"records": stats.records, "bytes": stats.bytes, "verified": stats.verified}


def _spanned(several: Collection[Steps]) -> Steps:
    return Steps(min(steps.first for steps in several), max(steps.last for steps in several))


class _Wire:
    """A replica's copy goes over the group of all ranks, whose waits a notice ends."""

    def __init__(self, world: ReconfigurableGroup, faults: FaultInjector):
        self._world = world
        self._faults = faults

    def send(self, data: torch.Tensor, to: int, tag: int) -> Any:
        return self._world.send([data], to, tag)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Any:
        pending = self._world.recv([data], source, tag)
        return _Arriving(pending, data, self._faults) if tag >= REPLICA_CHUNK else pending


class _Arriving:
    """A chunk on its way, into which a drill may flip a bit."""

    def __init__(self, pending: Any, data: torch.Tensor, faults: FaultInjector):
        self._pending = pending
        self._data = data
        self._faults = faults

    def wait(self) -> Any:
        result = self._pending.wait()
        self._faults.flip_in_copy(self._data)
        return result


class _Copied(NamedTuple):
    version: int
    witnesses: tuple[int, ...]


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
    ):
        """`stall_s`: a replay that stands still for so long is refused."""
        self._world = world
        self._stall_s = stall_s
        self._rank = rank
        self._member = member
        self._channel = channel
        self._state = state
        self._store = store
        self._faults = faults
        self._copied: _Copied | None = None
        """How this process got its state, until the log's gaps are declared."""
        self.flushed = True
        """What this process has done was in the log when it reported."""
        self.make_module: MakeModule | None = None
        """From the trainer: how the module of any stage is made."""

    @property
    def can_help(self) -> bool:
        """In another rank's replay. (A replacement that reports has not made its stage yet: it says no.)"""
        return self.make_module is not None and not why_no_help(self._state)

    def follow(self, plan: pb.Plan, writer: Writer, log_servers: list[str], step: Callable[[], None]) -> None:
        """Returns with the state at the plan's target; `step` does one step of the trainer. `log_servers`: those that
        keep what this rank writes.

        Raises ReplayRefused if it cannot be done as planned, Interrupted if a newer generation comes.
        """
        mine = own_plan(plan, self._rank)
        target = plan.target_version
        self._tell_drawn(target)
        shared = next((help for help in plan.help if self._rank in (help.owner, *help.helpers)), None)
        sharing: Owner | None = None
        if shared is not None and shared.owner == self._rank and (why := why_alone(self._state)):
            send_away(self._rank, shared, self._world, plan.generation, why)
        elif shared is not None and shared.owner == self._rank:
            sharing = Owner(self._rank, shared, self._world, self._channel, self._state, self._member.check)
            sharing.ask()
        if mine.strategy == pb.UNDO:
            self._undo(plan)
        elif mine.strategy in (pb.REPLAY, pb.CHECKPOINT):
            events.emit("restore_begin", rank=self._rank, generation=plan.generation)
            self._state.present = False
            self._copied = None
            saved = load_checkpoint(self._state, self._store, mine.from_version)
            self._tell_lost(saved, mine.from_version)
            self._state.present = True
            self._channel.off_log = False
            events.emit("restore_end", rank=self._rank, generation=plan.generation, version=mine.from_version)
        # Of older steps nothing comes again, and they may be trimmed: a sidecar's successor shall not ask for them.
        writer.forget_below(mine.from_version)
        if gives_up_log(plan):
            # The coordinator has emptied the job's streams; what comes now is logged anew.
            writer.restart(plan.generation)
            self._channel.off_log = False
        self._copy_replicas(plan)
        older = mine.strategy == pb.REPLAY or (mine.strategy == pb.REPLICA and mine.from_version < target)
        if older or not self._state.lived:
            # What is done from here on, be it the next step, was logged by a process that held the rank before, or by
            # this one, which has forgotten it.
            self._expect_own(writer, log_servers, mine.from_version)
        if self._copied is not None:
            self._declare_gaps(writer, log_servers, self._copied)
            self._copied = None
        if mine.from_version < target or shared is not None:
            self._channel.groups = RecoveryGroups.parse(plan.groups)
        if mine.from_version < target:
            self._replay(plan, mine, writer, step, sharing)
        elif shared is not None:
            self._help(shared.owner, plan)
        if self._state.version != target:
            raise ReplayRefused(
                f"rank {self._rank} is at version {self._state.version}, the plan says {target}"
            )

    def _undo(self, plan: pb.Plan) -> None:
        try:
            results = self._state.undo()
        except ServiceError as error:  # the parameters are of no version now; the next plan does without them
            self._state.present = False
            raise ReplayRefused(str(error)) from None
        for result in results:
            events.emit(
                "undone",
                rank=self._rank,
                generation=plan.generation,
                version=self._state.version,
                mode=result.mode,
                exact=result.exact,
                buckets=result.buckets,
                ulps_max=result.ulps_max,
                ulps_mean=result.ulps_mean,
                relative_error=result.step_error,
            )

    def _copy_replicas(self, plan: pb.Plan) -> None:
        """All copies of the plan that this rank takes part in, in one order for all ranks."""
        for entry in sorted(plan.ranks, key=lambda entry: entry.rank):
            if entry.strategy != pb.REPLICA or self._rank not in (entry.rank, *entry.sources):
                continue
            transfer = Transfer(joiner=entry.rank, sources=tuple(entry.sources), version=entry.from_version)
            if self._rank == entry.rank:
                self._receive_replica(transfer, plan.generation)
            else:
                self._send_replica(transfer, plan.generation)

    def _send_replica(self, transfer: Transfer, generation: int) -> None:
        events.emit(
            "copy_begin", rank=self._rank, generation=generation, role="source", peers=[transfer.joiner]
        )
        sent = send_state(
            transfer,
            self._rank,
            self._state.shared_dict(),
            self._member.check,
            self._faults.copying,
            wire=_Wire(self._world, self._faults),
            logged=self.flushed and self._copied is None,
        )
        events.emit(
            "copy_end",
            rank=self._rank,
            generation=generation,
            role="source",
            peers=[transfer.joiner],
            bytes=sent.bytes,
            digest=sent.digest,
            seconds=sent.seconds,
        )

    def _receive_replica(self, transfer: Transfer, generation: int) -> None:
        where: dict[str, Any] = {"rank": self._rank, "generation": generation}
        events.emit("restore_begin", **where)
        events.emit("copy_begin", **where, role="joiner", peers=list(transfer.sources))
        self._state.present = False
        received = receive_state(
            transfer,
            self._rank,
            self._state.destinations(),
            self._member.check,
            self._faults.copying,
            wire=_Wire(self._world, self._faults),
        )
        try:
            self._state.load_state_dict(received.state)
        except ServiceError as error:
            raise ReplicaDiffers(f"ranks {list(transfer.sources)} hold another state: {error}") from None
        except Exception as error:  # there may be another way
            why = f"{type(error).__name__}: {error}"
            raise ReplayRefused(
                f"the state of ranks {list(transfer.sources)} cannot be loaded: {why}"
            ) from error
        self._tell_lost(received.state, transfer.version)
        self._state.present = True
        self._copied = _Copied(transfer.version, received.witnesses)
        events.emit(
            "copy_end",
            **where,
            role="joiner",
            peers=list(transfer.sources),
            bytes=received.bytes,
            seconds=received.seconds,
        )
        events.emit(
            "replica_received",
            **where,
            version=transfer.version,
            digest=received.digest,
            sources=[{"rank": rank, "digest": received.digest} for rank in transfer.sources],
            bytes=received.bytes,
        )
        events.emit("restore_end", **where, version=transfer.version)

    def _tell_drawn(self, version: int) -> None:
        if drew := self._state.drew:
            self._state.drew = []
            self._member.client.differs(
                version,
                f"load_state_dict of {', '.join(drew)} (rank {self._rank}) draws other random numbers from the default "
                "generators than the first time; give it a generator of its own, or put what was drawn into its state",
            )

    def _tell_lost(self, state: dict[str, Any], version: int) -> None:
        """What the rank had and no state can hold."""
        self._tell_drawn(version)
        beside = state.get("beside", {})
        lost = [*beside.get("unknown", ()), *beside.get("apart", ()), *self._state.beside.lost]
        if lost := list(dict.fromkeys(lost)):
            self._member.client.differs(
                version,
                f"{', '.join(lost)} of rank {self._rank} cannot be given to another process, and was lost; if it need "
                f"not last: session.transient('{lost[0].rpartition('.')[2]}')",
            )

    def _replay(
        self,
        plan: pb.Plan,
        mine: pb.RankPlan,
        writer: Writer,
        step: Callable[[], None],
        sharing: Owner | None,
    ) -> None:
        target, from_version = plan.target_version, mine.from_version
        before = log_totals(writer)
        events.emit("replay_begin", rank=self._rank, generation=plan.generation, version=from_version)
        reader = LogReader({entry.stream: entry.servers for entry in plan.sources}, self._member.client.job)
        try:
            too = self._replayed_too(plan)
            self._channel.begin_replay(reader, from_version, collective_sources(plan), too)
            if sharing is not None:
                sharing.gather(from_version, plan.generation)
            self._channel.read_ahead(self._streams_read(plan))
            began = time.monotonic()
            predicted = next((one.seconds for one in plan.predictions if one.rank == self._rank), None)
            pace = Pace(self._rank, from_version, target, predicted)
            self._member.replay = pace.progress
            with freed_memory_kept(), self._bounded(plan.generation):
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
            generation=plan.generation,
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

    def _streams_read(self, plan: pb.Plan) -> list[str]:
        found = [stream for stage in self._state.stages for stream in stage.streams_read()]
        return found if plan.collective_source < 0 else [*found, collectives(plan.collective_source)]

    def _replayed_too(self, plan: pb.Plan) -> dict[int, int]:
        """Stages of other ranks -> the version from which they are replayed as well."""
        begun = {e.rank: e.from_version for e in plan.ranks if e.from_version < plan.target_version}
        homes = self._state.stages[0].stage_index_to_group_rank
        ranks = {stage: self._channel.rank_at(home) for stage, home in homes.items()}
        return {stage: begun[rank] for stage, rank in ranks.items() if rank in begun and rank != self._rank}

    def _help(self, owner: int, plan: pb.Plan) -> None:
        assert self.make_module is not None, "nobody plans with a rank that has not said that it can"
        helper = Helper(
            self._rank, self.make_module, self._world, self._channel, self._state, self._member.check
        )
        with freed_memory_kept():
            helper.run(owner, plan, self._member.client.job)

    def _declare_gaps(self, writer: Writer, log_servers: list[str], copied: _Copied) -> None:
        """What this rank has not logged of the steps that it has not done again: what the process that held it before
        had not got out, or the rest of a step that it has dropped and the replica has finished."""
        view = self._member.watcher.latest
        base = max(view.checkpoints, default=0) if view is not None else 0
        if view is None or base >= copied.version:
            return
        steps = Steps(base, copied.version - 1)
        ours = self._own_streams()
        own = [self._held(server, ours, base) for server in log_servers]
        copies = {stream: [held[stream] for held in own if stream in held] for stream in ours}
        found = gaps(copies, self._logged_alike(view, copied.witnesses, base), steps)
        for stream, lacking in found.items():
            writer.unlogged.lacks(stream, lacking)
        if found:
            hole = _spanned(found.values())
            events.emit(
                "gap_declared",
                rank=self._rank,
                first_step=hole.first,
                last_step=hole.last,
                streams=sorted(found),
            )
            writer.declare()  # before anybody waits for these records: others may replay at this moment
        # Marks that are there already count as well: who has put them there may have got no further.
        marks = (key for held in own for logged in held.values() for key in logged)
        touching = [one for one in map(declared, marks) if one is not None and one.first <= steps.last]
        if unlogged := [*touching, *found.values()]:
            hole = _spanned(unlogged)
            self._member.ask_checkpoint(
                hole.last, f"rank {self._rank} was copied, and its streams lack records of {hole}"
            )

    def _held(self, server: str, streams: list[str], from_step: int) -> dict[str, dict[RecordKey, bytes]]:
        """By stream, what a server has of it, where that is not damaged. Raises LogUnavailable: what does not answer
        has not nothing."""
        held: dict[str, dict[RecordKey, bytes]] = {}
        reader = LogReader([server], self._member.client.job)
        try:
            for stream in streams:
                self._member.check()
                with suppress(RecordCorrupt, RecordTrimmed):
                    held[stream] = reader.digests(
                        stream, from_step, server, cancelled=lambda: self._member.noticed
                    )
        finally:
            reader.close()
        return held

    def _logged_alike(
        self, view: pb.View, ranks: tuple[int, ...], from_step: int
    ) -> Iterator[dict[str, set[RecordKey]]]:
        """What each replica has logged, on the servers of its that answer, by the names of this rank's streams."""
        for rank in ranks:
            logged: dict[str, set[RecordKey]] = {}
            theirs = self._streams_of(rank)
            for server in [
                server for logs in view.log_copies if logs.rank == rank for server in logs.servers
            ]:
                try:
                    held = self._held(server, theirs, from_step)
                except LogInterrupted:
                    raise
                except LogUnavailable:
                    continue
                for ours, name in zip(self._own_streams(), theirs, strict=True):
                    if name in held:
                        logged.setdefault(ours, set()).update(held[name])
            yield logged

    def _expect_own(self, writer: Writer, log_servers: list[str], from_version: int) -> None:
        """What this rank's streams hold already, on each server, is compared, and not logged there again."""
        reader = LogReader(log_servers, self._member.client.job)
        try:
            for stream in self._own_streams():
                self._expect(reader, writer, stream, log_servers, from_version)
        finally:
            reader.close()

    def _expect(
        self, reader: LogReader, writer: Writer, stream: str, servers: list[str], from_version: int
    ) -> None:
        damaged: dict[str, RecordCorrupt] = {}
        sound: dict[RecordKey, bytes] = {}
        for server in servers:
            try:
                held = reader.digests(stream, from_version, server, cancelled=lambda: self._member.noticed)
            except RecordCorrupt as error:
                damaged[server] = error
                continue
            writer.expect(stream, held, server)
            sound |= held
        if damaged and len(damaged) == len(servers):
            raise next(iter(damaged.values()))
        for server in damaged:  # nothing is written over what may be there
            writer.expect(stream, sound, server)

    def _own_streams(self) -> list[str]:
        return self._streams_of(self._rank)

    def _streams_of(self, rank: int) -> list[str]:
        """What a rank of the same stages writes."""
        boundaries = [
            self._channel.stream(index, kind, rank)
            for index in dict.fromkeys(stage.stage_index for stage in self._state.stages)
            for kind in KINDS
        ]
        return [*boundaries, collectives(rank)]

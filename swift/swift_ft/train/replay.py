"""Gets a rank to the plan's version.

own way   what its strategy does without any other rank (`swift_ft.train.strategies`)
copies    whoever copies receives from its sources, which have gone their own way by then
replay    if that is below the plan's target: the steps up to it, out of the log
"""

import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import (
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    ReplayRefused,
    ServiceError,
)
from swift_ft.log.memory import freed_memory_kept
from swift_ft.log.reader import Holdings, LogReader
from swift_ft.log.record import KINDS, RecordKey, Steps, collectives, declared, mark
from swift_ft.log.sidecar_client import Writer
from swift_ft.planner import Help, Plan
from swift_ft.rpc.codec import PublishedPlan
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.boundary_log import Channel, bottleneck, split
from swift_ft.train.coordinator_session import Member
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.log_session import FLUSH_TIMEOUT_S, log_totals
from swift_ft.train.replay_helper import Helper, MakeModule
from swift_ft.train.shared_replay import Helped, Owner, send_away, why_alone, why_no_help
from swift_ft.train.snapshots import Snapshots
from swift_ft.train.staggering import Staggering
from swift_ft.train.strategies import TABLE, Copied, Site
from swift_ft.train.training_state import TrainerState

# Which steps a rank has not logged that was copied from a replica, so that it does not do them again. No I/O.
#
# It goes on behind what its streams hold already: what its predecessor had not sent any more when it was killed stays
# missing, and so does the rest of a step that it has dropped itself, while the replica has finished it. So whoever was
# copied looks, and declares these steps (`swift_ft.log.record`).
#
# A stream is written in order, so what the log has of it is whole, or declared, below its last step. Of that step,
# and of those behind it, nothing in the log says how many records there ought to be; but a replica's process lives,
# has flushed, and does the same with other batches: what it has logged is what there ought to be. A replica whose
# flush has failed, or that was copied itself and has not looked yet, is no witness: it says so with its copy
# (`swift_ft.state.transfer`).

Keys = Collection[RecordKey]


def gaps(
    own: Mapping[str, Sequence[Keys]], alike: Iterable[Mapping[str, Keys]], steps: Steps
) -> dict[str, Steps]:
    """Stream -> the steps among `steps` that it lacks and does not declare; the streams that lack none are not named.

    ``own``: by stream, what each server has of it. ``alike``: of each replica that has flushed, what it has logged, by
    the name of our own stream; a stream that cannot be read is left out. The next one is taken only where those before
    it cannot tell. Both from the first of `steps` on. Where no replica can tell, a step that is the last one there, or
    lies behind it, counts as missing.
    """
    replicas = _Replicas(alike, steps.first)
    if not any(map(any, own.values())) and not any(replica.ends is not None for replica in replicas):
        return {}  # a trainer that logs nothing
    gap_of: dict[str, Steps] = {}
    for stream, copies in own.items():
        # A server that has come meanwhile begins with nothing: the coordinator knows from where on it is whole.
        held = [copy for copy in copies if copy] or [()]
        lacking = sorted({step for copy in held for step in _lacking(stream, copy, replicas, steps)})
        if lacking:
            _add(gap_of, stream, Steps(lacking[0], lacking[-1]), held)
    return gap_of


def _add(gap_of: dict[str, Steps], stream: str, steps: Steps, copies: Sequence[Keys]) -> None:
    """One copy may hold the mark that another one lacks. It is not written again: a key has one sequence."""
    while any(mark(steps) in copy for copy in copies) and steps.first > 0:
        steps = Steps(steps.first - 1, steps.last)
    if not any(mark(steps) in copy for copy in copies):
        gap_of[stream] = steps


def _lacking(stream: str, copy: Keys, replicas: "_Replicas", steps: Steps) -> Iterable[int]:
    held = _Stream(copy)
    for step in range(max(held.last, steps.first), steps.last + 1):
        if held.lacks(step):
            continue
        wanted = replicas.of(stream, step)
        if wanted is None or not wanted <= held.keys[step]:
            yield step


class _Stream:
    """The keys of one stream, by step."""

    def __init__(self, keys: Keys) -> None:
        self.keys: defaultdict[int, set[RecordKey]] = defaultdict(set)
        self._marked: list[Steps] = []
        self.last = max((key.step for key in keys), default=-1)
        for key in keys:
            if (marked := declared(key)) is not None:
                self._marked.append(marked)
            else:
                self.keys[key.step].add(key)
        self.begins, self.ends = min(self.keys, default=None), max(self.keys, default=None)

    def lacks(self, step: int) -> bool:
        """It is declared."""
        return any(marked.first <= step <= marked.last for marked in self._marked)


class _Replica:
    """What one of them has logged, as far as that can be relied on."""

    def __init__(self, logged: Mapping[str, Keys], first: int) -> None:
        self._first = first
        self._streams = {name: _Stream(keys) for name, keys in logged.items()}
        written = [s for s in self._streams.values() if s.begins is not None and s.ends is not None]
        self.ends = max((s.ends for s in written if s.ends is not None), default=None)
        self._whole = all(s.begins == first for s in written)

    def of(self, stream: str, step: int) -> set[RecordKey] | None:
        """The keys of its step. None: it cannot tell, as its log begins later (a server was lost), does not go so far,
        has a gap there, or is damaged."""
        logged = self._streams.get(stream)
        if logged is None or logged.lacks(step) or self.ends is None or step > self.ends:
            return None
        begins = logged.begins
        if begins is None:  # it never writes it, or what it has written is gone
            return set() if self._whole else None
        if step < begins or (step == begins != self._first):
            return None
        return logged.keys[step]


class _Replicas:
    """Asked one after the other, as they are needed."""

    def __init__(self, alike: Iterable[Mapping[str, Keys]], first: int) -> None:
        self._coming = (_Replica(logged, first) for logged in alike)
        self._come: list[_Replica] = []

    def __iter__(self) -> Iterator[_Replica]:
        yield from self._come
        for replica in self._coming:
            self._come.append(replica)
            yield replica

    def of(self, stream: str, step: int) -> set[RecordKey] | None:
        """As the first one that can tell."""
        return next((keys for replica in self if (keys := replica.of(stream, step)) is not None), None)


# What this rank's streams hold of steps that it does again, or that it has not done itself.


class Servers:
    """(a context) What log servers hold, asked in one recovery by one reader.

    Each is asked once which streams there are, as most of a rank's hold nothing: in a job without pipelines, all of
    them. A question for each took longer than all else behind a copy.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._reader: LogReader | None = None
        self._holdings: dict[str, Holdings | None] = {}

    def __enter__(self) -> "Servers":
        return self

    def digests(self, server: str, stream: str, from_step: int) -> dict[RecordKey, bytes]:
        """As `LogReader.digests` of that server."""
        if self._reader is None:
            self._reader = LogReader([server], self._member.client.job)
        if server not in self._holdings:
            self._holdings[server] = self._reader.holdings(server)
        known = self._holdings[server]
        if known is not None and known.lacks(stream, from_step):
            return {}
        return self._reader.digests(stream, from_step, server, cancelled=lambda: self._member.noticed)

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()


class OwnStreams:
    """(restorer) ``expect`` before it does steps that may be logged already, ``declare_gaps`` behind a copy."""

    def __init__(self, rank: int, member: Member, channel: Channel, state: TrainerState) -> None:
        self._rank = rank
        self._member = member
        self._channel = channel
        self._state = state

    def expect(self, servers: Servers, writer: Writer, log_servers: list[str], from_version: int) -> None:
        """What this rank's streams hold already, on each server, is compared, and not logged there again."""
        for stream in self._own_streams():
            self._expect(servers, writer, stream, log_servers, from_version)

    def declare_gaps(self, servers: Servers, writer: Writer, log_servers: list[str], copied: Copied) -> None:
        """What this rank has not logged of the steps that it has not done again: what the process that held it before
        had not got out, or the rest of a step that it has dropped and the replica has finished."""
        view = self._member.watcher.latest
        base = max(view.checkpoints, default=0) if view is not None else 0
        if view is None or base >= copied.version:
            return
        steps = Steps(base, copied.version - 1)
        ours = self._own_streams()
        own = [self._held(servers, server, ours, base) for server in log_servers]
        copies = {stream: [held[stream] for held in own if stream in held] for stream in ours}
        lacking_of = gaps(copies, self._logged_alike(servers, view, copied.witnesses, base), steps)
        for stream, lacking in lacking_of.items():
            writer.unlogged.lacks(stream, lacking)
        if lacking_of:
            hole = _spanned(lacking_of.values())
            events.emit(
                "gap_declared",
                rank=self._rank,
                first_step=hole.first,
                last_step=hole.last,
                streams=sorted(lacking_of),
            )
            writer.declare()  # before anybody waits for these records: others may replay at this moment
        # Marks that are there already count as well: who has put them there may have got no further.
        marks = (key for held in own for logged in held.values() for key in logged)
        touching = [
            marked for marked in map(declared, marks) if marked is not None and marked.first <= steps.last
        ]
        if unlogged := [*touching, *lacking_of.values()]:
            hole = _spanned(unlogged)
            self._member.ask_checkpoint(
                hole.last, f"rank {self._rank} was copied, and its streams lack records of {hole}"
            )

    def _expect(
        self, servers: Servers, writer: Writer, stream: str, log_servers: list[str], from_version: int
    ) -> None:
        damaged: dict[str, RecordCorrupt] = {}
        sound: dict[RecordKey, bytes] = {}
        for server in log_servers:
            try:
                held = servers.digests(server, stream, from_version)
            except RecordCorrupt as error:
                damaged[server] = error
                continue
            writer.expect(stream, held, server)
            sound |= held
        if damaged and len(damaged) == len(log_servers):
            raise next(iter(damaged.values()))
        for server in damaged:  # nothing is written over what may be there
            writer.expect(stream, sound, server)

    def _held(
        self, servers: Servers, server: str, streams: list[str], from_step: int
    ) -> dict[str, dict[RecordKey, bytes]]:
        """By stream, what a server has of it, where that is not damaged. Raises LogUnavailable: a server that does not
        answer may still have records."""
        held: dict[str, dict[RecordKey, bytes]] = {}
        for stream in streams:
            self._member.check()
            with suppress(RecordCorrupt, RecordTrimmed):
                held[stream] = servers.digests(server, stream, from_step)
        return held

    def _logged_alike(
        self, servers: Servers, view: pb.View, ranks: tuple[int, ...], from_step: int
    ) -> Iterator[dict[str, set[RecordKey]]]:
        """What each replica has logged, on the servers of its that answer, by the names of this rank's streams."""
        for rank in ranks:
            logged: dict[str, set[RecordKey]] = {}
            theirs = self._streams_of(rank)
            for server in [
                server for logs in view.log_copies if logs.rank == rank for server in logs.servers
            ]:
                try:
                    held = self._held(servers, server, theirs, from_step)
                except LogInterrupted:
                    raise
                except LogUnavailable:
                    continue
                for ours, name in zip(self._own_streams(), theirs, strict=True):
                    if name in held:
                        logged.setdefault(ours, set()).update(held[name])
            yield logged

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


def _spanned(several: Collection[Steps]) -> Steps:
    return Steps(min(steps.first for steps in several), max(steps.last for steps in several))


# How far a replay is, and how long it will still take: for the trace, and for the coordinator, whom operators ask.

SAID_EVERY_S = 0.5
STEPS_MIN = 2
"""So many steps tell a pace; the first of them does not count, in which shapes are inferred."""


class Pace:
    """(trainer's thread) ``at`` behind every step; (any thread) ``progress``."""

    def __init__(
        self,
        rank: int,
        first: int,
        target: int,
        predicted_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`predicted_s`: of the plan, for all steps."""
        self._rank, self._first, self._target = rank, first, target
        self._predicted_s = predicted_s
        self._clock = clock
        self._began = self._warm_at = clock()
        self._last = (first, self._began)
        """The newest version, and since when."""
        self._say()

    def at(self, version: int) -> None:
        now = self._clock()
        if version == self._first + 1:
            self._warm_at = now
        self._last = (version, now)
        if now - self._said >= SAID_EVERY_S:
            self._say()

    def progress(self) -> pb.ReplayProgress:
        version, _ = self._last
        return pb.ReplayProgress(version=version, target=self._target, seconds_left=self.seconds_left())

    def seconds_left(self) -> float | None:
        """None: no pace yet, and no prediction."""
        (version, at), now = self._last, self._clock()
        done = version - self._first
        if done >= STEPS_MIN:
            each = (at - self._warm_at) / (done - 1)
            return max(0.0, each * (self._target - version) - (now - at))
        if self._predicted_s is None:
            return None
        return max(0.0, self._predicted_s - (now - self._began))

    def _say(self) -> None:
        self._said = self._clock()
        version, _ = self._last
        events.emit(
            "replay_progress",
            rank=self._rank,
            version=version,
            target=self._target,
            steps_left=self._target - version,
            seconds_left=self.seconds_left(),
        )


# A replay that stands still is ended with its reason.
#
# What a replay may wait for is in the log or refused (`swift_ft.train.collective_policy`). A trainer can still wait
# by means of its own: a socket, a lock, a file that another rank writes. That is seen from outside, by a thread
# beside the trainer's: no record was read, no microbatch computed, no step ended, and the trainer's thread has used
# no processor, for so long. Then the rank refuses this way, and all restore a checkpoint. If its thread does not come
# free by that, the process ends itself, and is replaced.

_BUSY = 0.1
"""A thread that uses this share of the time is computing, whatever it does."""
_LOOKS = 20
"""In the time that it may stand still."""
FREED_WITHIN_S = 20.0
"""A newer generation frees whoever waits in what is the session's."""
_ASK_AGAIN_S = 0.5
_NOT_THE_TRAINERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
)


class Stillness:
    """Since when nothing has moved. No clock of its own."""

    def __init__(self, limit_s: float, now: float, progress: Hashable, busy_s: float) -> None:
        self._limit_s = limit_s
        self._since, self._progress, self._busy_s = now, progress, busy_s

    def observe(self, now: float, progress: Hashable, busy_s: float) -> bool:
        """It has stood still for the limit. `progress`: anything that changes where it goes on; `busy_s`: processor
        time of its thread so far."""
        waited_s = now - self._since
        if progress != self._progress:
            self._since, self._progress, self._busy_s = now, progress, busy_s
        elif waited_s >= self._limit_s:
            if busy_s - self._busy_s < _BUSY * waited_s:
                return True
            self._since, self._busy_s = now, busy_s
        return False


class Standstill:
    """Around a replay: ``with Standstill(...):`` on the trainer's thread."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], Hashable],
        refuse: Callable[[str], None],
        noticed: Callable[[], bool],
    ) -> None:
        """`refuse(why)` tells the coordinator; `noticed`: it has answered with a newer generation."""
        self._limit_s = limit_s
        self._progress = progress
        self._refuse = refuse
        self._noticed = noticed
        self._over = threading.Event()
        self._trainer, self._process = threading.get_ident(), os.getpid()
        self._clock = time.pthread_getcpuclockid(self._trainer)
        self._thread = threading.Thread(target=self._watch, name="swift-standstill", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if (
            os.getpid() == self._process
        ):  # in a process that the step has forked, the other thread may have the lock
            self._over.set()

    def _watch(self) -> None:
        stillness = Stillness(self._limit_s, time.monotonic(), self._progress(), self._busy())
        while not self._over.wait(self._limit_s / _LOOKS):
            if stillness.observe(time.monotonic(), self._progress(), self._busy()):
                self._end()
                return

    def _busy(self) -> float:
        return time.clock_gettime(self._clock)

    def _end(self) -> None:
        why = f"the replay stands still for {self._limit_s:g} s{_place_of(self._trainer)}"
        events.emit("standstill", reason=why)
        while not self._noticed():
            if self._over.is_set():
                return
            with suppress(ServiceError):  # the coordinator is asked again
                self._refuse(why)
            self._over.wait(_ASK_AGAIN_S)
        if not self._over.wait(FREED_WITHIN_S):
            print(f"swift: {why}; this process ends, and is replaced", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def _place_of(thread: int) -> str:
    """Where in the trainer's own code a thread is."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame) if frame is not None else []
    for call in reversed(calls):
        if not call.filename.startswith((*_NOT_THE_TRAINERS, "<")):
            return f", in {Path(call.filename).name}:{call.lineno} ({call.line})"
    return ""


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
        if self._rank in plan.replayed_from:
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

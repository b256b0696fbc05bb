"""Brings a rank to the plan's version.

own way   the part of its strategy that needs no other rank (`swift_ft.train.strategies`)
copies    a rank that copies receives from its sources, which have gone their own way by then
replay    if the version reached is below the plan's target: the steps up to the target, from the log
"""

import functools
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import PublishedPlan
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
from swift_ft.log.record import KINDS, RecordKey, Steps, collectives, declared, mark, spanned
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.planner import Help, Plan
from swift_ft.text import tell_if_possible
from swift_ft.train.coordinator_session import Member
from swift_ft.train.log_session import FLUSH_TIMEOUT_S, log_totals
from swift_ft.train.participants import Copied, Site
from swift_ft.train.replay_helper import Helper, MakeModule
from swift_ft.train.shared_replay import Helped, Owner, send_away, why_alone, why_no_help
from swift_ft.train.strategies import TABLE

# Gaps in the log of a rank that was copied from a replica and so does not repeat the copied steps. No I/O.
#
# Two kinds of records stay missing from its streams: those that its predecessor had not sent when it was killed, and
# the rest of a step that it dropped itself while the replica finished it. So after a copy the rank looks for such steps
# and declares them (`swift_ft.log.record`).
#
# A stream is written in order, so below its last step it is complete or declared. The log does not say how many records
# that last step and later ones should have. A replica does: its process is alive, has flushed, and logs the same keys
# for other batches. A replica whose flush has failed, or that was copied itself and has not looked for gaps yet, is no
# witness; it says so with its copy (`swift_ft.state.transfer`).

Keys = Collection[RecordKey]


def gaps(
    own: Mapping[str, Sequence[Keys]], alike: Callable[[], Mapping[str, Keys]], steps: Steps
) -> dict[str, Steps]:
    """Returns stream -> the range of `steps` that it lacks and does not declare; complete streams are left out.

    ``own``: by stream, the keys that each server has. ``alike``: returns the keys that a replica which has flushed has
    logged, by the name of our own stream; a stream that cannot be read is left out. Both begin with the first of
    `steps`. If the replica cannot tell, the stream's last step and all later ones count as missing.
    """
    replica = functools.cache(lambda: _Replica(alike(), steps.first))  # asked only if it is needed
    if not any(map(any, own.values())) and replica().ends is None:
        return {}  # a trainer that logs nothing
    gap_of: dict[str, Steps] = {}
    for stream, copies in own.items():
        # A server that joined later has an empty stream: the coordinator knows from which step on it is complete.
        held = [copy for copy in copies if copy] or [()]
        lacking = sorted({step for copy in held for step in _lacking(stream, copy, replica, steps)})
        if lacking:
            _add(gap_of, stream, Steps(lacking[0], lacking[-1]), held)
    return gap_of


def _add(gap_of: dict[str, Steps], stream: str, steps: Steps, copies: Sequence[Keys]) -> None:
    """Adds `steps`, extended backwards until no copy has the mark of that range: a key is never written twice."""
    while any(mark(steps) in copy for copy in copies) and steps.first > 0:
        steps = Steps(steps.first - 1, steps.last)
    if not any(mark(steps) in copy for copy in copies):
        gap_of[stream] = steps


def _lacking(stream: str, copy: Keys, replica: Callable[[], "_Replica"], steps: Steps) -> Iterable[int]:
    held = _Stream(copy)
    for step in range(max(held.last, steps.first), steps.last + 1):
        if held.lacks(step):
            continue
        wanted = replica().of(stream, step)
        if wanted is None or not wanted <= held.keys[step]:
            yield step


class _Stream:
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
        return any(marked.first <= step <= marked.last for marked in self._marked)


class _Replica:
    """The keys that one replica has logged, as far as they are reliable. `first`: the first step that was read."""

    def __init__(self, logged: Mapping[str, Keys], first: int) -> None:
        self._first = first
        self._streams = {name: _Stream(keys) for name, keys in logged.items()}
        written = [s for s in self._streams.values() if s.begins is not None and s.ends is not None]
        self.ends = max((s.ends for s in written if s.ends is not None), default=None)
        self._whole = all(s.begins == first for s in written)

    def of(self, stream: str, step: int) -> set[RecordKey] | None:
        """Returns the keys of that step. None if the replica cannot tell: its log begins later (a server was lost),
        ends earlier, has a gap there, or is damaged."""
        logged = self._streams.get(stream)
        if logged is None or logged.lacks(step) or self.ends is None or step > self.ends:
            return None
        begins = logged.begins
        if begins is None:  # the replica never writes this stream, or its records are lost
            return set() if self._whole else None
        if step < begins or (step == begins != self._first):
            return None
        return logged.keys[step]


# Records in this rank's streams of steps that it repeats, or that it has not done itself.


class Servers:
    """(a context) The contents of the log servers, queried during one recovery by one reader.

    Each server is asked once for its streams, because most streams of a rank are empty: in a job without pipelines, all
    of them. One query per stream took longer than everything else after a copy.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._reader: LogReader | None = None
        self._holdings: dict[str, Holdings | None] = {}

    def __enter__(self) -> "Servers":
        return self

    def digests(self, server: str, stream: str, from_step: int) -> dict[RecordKey, bytes]:
        """Returns `LogReader.digests` of that server; without a query if the server has no such records."""
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
    """The streams that this rank writes.

    (restorer) ``expect`` before steps that may be logged already, ``declare_gaps`` after a copy
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def expect(
        self, servers: Servers, writer: SidecarWriter, log_servers: list[str], from_version: int
    ) -> None:
        """Makes the writer compare records that a server has already, instead of logging them there again. Raises
        RecordCorrupt if a stream is damaged on all servers."""
        for stream in self._streams_of(self._site.rank):
            self._expect(servers, writer, stream, log_servers, from_version)

    def declare_gaps(
        self, servers: Servers, writer: SidecarWriter, log_servers: list[str], copied: Copied
    ) -> None:
        """Declares the steps below the copied version whose records this rank lacks: those that its predecessor had not
        sent, or the rest of a step that it dropped and the replica finished. Asks for a checkpoint above them."""
        view = self._site.member.watcher.latest
        base = max(view.checkpoints, default=0) if view is not None else 0
        if view is None or base >= copied.version:
            return
        steps = Steps(base, copied.version - 1)
        ours = self._streams_of(self._site.rank)
        own = [self._digests_of(servers, server, ours, base) for server in log_servers]
        copies = {stream: [held[stream] for held in own if stream in held] for stream in ours}
        lacking_of = gaps(copies, lambda: self._logged_alike(servers, view, copied.witnesses, base), steps)
        for stream, lacking in lacking_of.items():
            writer.unlogged.lacks(stream, lacking)
        if (hole := spanned(lacking_of.values())) is not None:
            events.emit(
                "gap_declared",
                rank=self._site.rank,
                first_step=hole.first,
                last_step=hole.last,
                streams=sorted(lacking_of),
            )
            writer.declare()  # at once: other ranks may be replaying and waiting for these records
        # Existing marks count as well: the process that wrote them may have died before it asked for a checkpoint.
        marks = (key for held in own for logged in held.values() for key in logged)
        touching = [
            marked for marked in map(declared, marks) if marked is not None and marked.first <= steps.last
        ]
        if (hole := spanned([*touching, *lacking_of.values()])) is not None:
            self._site.member.ask_checkpoint(
                hole.last, f"rank {self._site.rank} was copied, and its streams lack records of {hole}"
            )

    def _expect(
        self, servers: Servers, writer: SidecarWriter, stream: str, log_servers: list[str], from_version: int
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
        for server in damaged:  # records that may still exist there are not written again
            writer.expect(stream, sound, server)

    def _digests_of(
        self, servers: Servers, server: str, streams: list[str], from_step: int
    ) -> dict[str, dict[RecordKey, bytes]]:
        """Returns the digests that a server has, by stream; damaged streams are left out. Raises LogUnavailable if the
        server does not answer, because it may still have records."""
        held: dict[str, dict[RecordKey, bytes]] = {}
        for stream in streams:
            self._site.member.check()
            with suppress(RecordCorrupt, RecordTrimmed):
                held[stream] = servers.digests(server, stream, from_step)
        return held

    def _logged_alike(
        self, servers: Servers, view: pb.View, witnesses: tuple[int, ...], from_step: int
    ) -> dict[str, set[RecordKey]]:
        """Returns the keys that one of these ranks has logged on those of its servers that answer, by this rank's
        stream: of the first rank that has records there, and none if no rank has any."""
        silent: set[str] = set()
        for rank in witnesses:
            logged: dict[str, set[RecordKey]] = {}
            theirs = self._streams_of(rank)
            copies = {s for logs in view.log_copies if logs.rank == rank for s in logs.servers}
            for server in sorted(copies - silent):  # each call waits long for one that does not answer
                try:
                    held = self._digests_of(servers, server, theirs, from_step)
                except LogInterrupted:
                    raise
                except LogUnavailable:
                    silent.add(server)
                    continue
                for ours, name in zip(self._streams_of(self._site.rank), theirs, strict=True):
                    if name in held:
                        logged.setdefault(ours, set()).update(held[name])
            if any(declared(key) is None for keys in logged.values() for key in keys):
                return logged
        return {}

    def _streams_of(self, rank: int) -> list[str]:
        boundaries = [
            self._site.channel.stream(index, kind, rank)
            for index in dict.fromkeys(stage.stage_index for stage in self._site.state.stages)
            for kind in KINDS
        ]
        return [*boundaries, collectives(rank)]


# Progress of a replay and its remaining time: for the trace, and for operators who ask the coordinator.

SAID_EVERY_S = 0.5
"""Minimum time between two progress events."""
STEPS_MIN = 2
"""Steps after which the pace is known. The first step is not measured, because shapes are inferred in it."""


class Pace:
    """Pace of a replay: (trainer's thread) ``at`` after every step; (any thread) ``progress``."""

    def __init__(
        self,
        rank: int,
        first: int,
        target: int,
        predicted_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`predicted_s`: the plan's prediction for all steps."""
        self._rank, self._first, self._target = rank, first, target
        self._predicted_s = predicted_s
        self._clock = clock
        self._began = self._warm_at = clock()
        self._last = (first, self._began)
        """The newest version and the time when it was reached."""
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
        """Returns the estimated remaining time. None if there is no pace yet and no prediction."""
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


# Detection of a stalled replay, which is refused with the reason.
#
# Everything that a replay may wait for is in the log or is refused (`swift_ft.train.collective_policy`). A trainer can
# still wait by means of its own: a socket, a lock, a file that another rank writes. A separate thread detects that: for
# the limit, no record was read, no microbatch computed, no step ended, and the trainer's thread used hardly any CPU
# time. Then the rank refuses the replay, and all ranks restore a checkpoint. If that does not free the trainer's
# thread, the process kills itself and is replaced.

_BUSY = 0.1
"""Share of the time from which on a thread counts as computing."""
_LOOKS = 20
"""Checks within the stall limit."""
FREED_WITHIN_S = 20.0
"""Seconds in which a newer generation must free a trainer's thread that waits in the session's own code."""
_ASK_AGAIN_S = 0.5
_NOT_THE_TRAINERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
)


class Stillness:
    """Time since the last progress of a replay. Has no clock of its own."""

    def __init__(self, limit_s: float, now: float, progress: Hashable, busy_s: float) -> None:
        self._limit_s = limit_s
        self._since, self._progress, self._busy_s = now, progress, busy_s

    def observe(self, now: float, progress: Hashable, busy_s: float) -> bool:
        """Returns whether the replay has stalled for the limit. `progress`: any value that changes with progress;
        `busy_s`: CPU time of its thread so far."""
        waited_s = now - self._since
        if progress != self._progress:
            self._since, self._progress, self._busy_s = now, progress, busy_s
        elif waited_s >= self._limit_s:
            if busy_s - self._busy_s < _BUSY * waited_s:
                return True
            self._since, self._busy_s = now, busy_s
        return False


class Standstill:
    """(a context) Watches a replay for a stall: ``with Standstill(...):`` on the trainer's thread."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], Hashable],
        refuse: Callable[[str], None],
        noticed: Callable[[], bool],
    ) -> None:
        """`refuse(why)` reports to the coordinator; `noticed()`: it has answered with a newer generation."""
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
            tell_if_possible(f"{why}; this process ends, and is replaced")
            os.kill(os.getpid(), signal.SIGKILL)


def _place_of(thread: int) -> str:
    """Returns the thread's position in the trainer's own code, as words; empty if there is none."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame) if frame is not None else []
    for call in reversed(calls):
        if not call.filename.startswith((*_NOT_THE_TRAINERS, "<")):
            return f", in {Path(call.filename).name}:{call.lineno} ({call.line})"
    return ""


class Restorer:
    """One rank's part of a recovery (state RECOVERING), except building its groups."""

    def __init__(self, site: Site):
        self._site = site
        self._own = OwnStreams(site)
        self.make_module: MakeModule | None = None
        """The trainer's function that builds the module of any stage."""

    @property
    def can_help(self) -> bool:
        """This rank can help in another rank's replay. False for a replacement, which reports before it has a stage."""
        return self.make_module is not None and not why_no_help(self._site.state)

    def follow(
        self,
        published: PublishedPlan,
        writer: SidecarWriter,
        log_servers: list[str],
        step: Callable[[], None],
    ) -> None:
        """Brings the state to the plan's target. `step` runs one step of the trainer. `log_servers`: servers that keep
        what this rank writes.

        Raises ReplayRefused if the plan cannot be carried out, Interrupted if a newer generation is published.
        """
        plan, site = published.plan, self._site
        mine = plan.of(self._site.rank)
        site.generation = published.generation
        shared = plan.help_of(self._site.rank)
        sharing = self._asked(shared, published.generation)
        TABLE[mine.strategy].restore(site, mine)
        # Older steps are not repeated and may be trimmed: a sidecar's successor must not ask for them.
        writer.forget_below(mine.from_version)
        if plan.gives_up_log:
            # The coordinator has emptied the job's streams; the log begins anew.
            writer.restart(published.generation)
        if plan.restores and site.snapshots is not None:
            site.snapshots.forget_above(plan.target_version)
        for copy in plan.copies:
            TABLE[copy.strategy].copy(site, copy)
        with Servers(self._site.member) as servers:
            if not plan.gives_up_log and (plan.was_logged(self._site.rank) or not self._site.state.lived):
                # Logged by an earlier process of this rank, or by this one before it lost its state.
                self._own.expect(servers, writer, log_servers, mine.from_version)
            if site.copied is not None:
                self._own.declare_gaps(servers, writer, log_servers, site.copied)
                site.copied = None
        if self._site.rank in plan.replayed_from:
            self._replay(published, writer, step, sharing)
        elif shared is not None:
            self._help(shared.owner, published)
        if self._site.state.version != plan.target_version:
            raise ReplayRefused(
                f"rank {self._site.rank} is at version {self._site.state.version}, the plan says {plan.target_version}"
            )

    def _asked(self, shared: Help | None, generation: int) -> Owner | None:
        """(an owner) Asks its helpers to build the stage while it restores its state. None: no rank helps this one."""
        if shared is None or shared.owner != self._site.rank:
            return None
        if why := why_alone(self._site.state):
            send_away(self._site.rank, shared, self._site.world, generation, why)
            return None
        sharing = Owner(self._site, shared)
        sharing.ask()
        return sharing

    def _replay(
        self,
        published: PublishedPlan,
        writer: SidecarWriter,
        step: Callable[[], None],
        sharing: Owner | None,
    ) -> None:
        plan, generation = published.plan, published.generation
        target, from_version = plan.target_version, plan.of(self._site.rank).from_version
        before = log_totals(writer)
        events.emit("replay_begin", rank=self._site.rank, generation=generation, version=from_version)
        reader = LogReader(published.sources, self._site.member.client.job)
        try:
            too = self._replayed_too(plan)
            self._site.channel.begin_replay(reader, from_version, plan.collective_sources, too)
            if sharing is not None:
                sharing.gather(from_version, generation)
            self._site.channel.read_ahead(self._streams_read(plan))
            began = time.monotonic()
            pace = Pace(self._site.rank, from_version, target, plan.predicted_s(self._site.rank))
            self._site.member.replay = pace.progress
            with freed_memory_kept(), self._bounded(generation):
                while self._site.state.version < target:
                    self._site.member.check()
                    if sharing is not None:
                        sharing.at(self._site.state.version)
                    step()
                    pace.at(self._site.state.version)
            if sharing is not None:
                sharing.at(target)
            seconds = time.monotonic() - began
        finally:
            self._site.member.replay = None
            if sharing is not None:
                sharing.close()
            self._site.channel.end_replay()
            reader.close()
        writer.flush(FLUSH_TIMEOUT_S)
        after = log_totals(writer)
        helped = sharing.helped if sharing is not None else Helped()
        events.emit(
            "replay_end",
            rank=self._site.rank,
            generation=generation,
            version=target,
            steps=target - from_version,
            records=self._site.channel.records_read + helped.records,
            microbatches=self._site.channel.microbatches_replayed + helped.microbatches,
            verified=after["verified"] - before["verified"] + helped.verified,
            shared_steps=helped.steps,
            filled=after["records"] - before["records"],
            seconds=seconds,
        )

    def _bounded(self, generation: int) -> Standstill:
        return Standstill(
            self._site.config.replay_stall_s,
            lambda: (
                self._site.state.version,
                self._site.channel.records_read,
                self._site.channel.microbatches_replayed,
            ),
            lambda why: self._site.member.client.call(
                pb.RefuseRequest(generation=generation, reason=f"rank {self._site.rank}: {why}")
            ),
            lambda: self._site.member.noticed,
        )

    def _streams_read(self, plan: Plan) -> list[str]:
        boundaries = [stream for stage in self._site.state.stages for stream in stage.streams_read()]
        source = plan.collective_source
        return boundaries if source < 0 else [*boundaries, collectives(source)]

    def _replayed_too(self, plan: Plan) -> dict[int, int]:
        """Returns stages of other ranks that are replayed as well -> the version from which they are."""
        homes = self._site.state.stages[0].stage_index_to_group_rank
        ranks = {stage: self._site.channel.rank_at(home) for stage, home in homes.items()}
        begun = plan.replayed_from
        return {
            stage: begun[rank] for stage, rank in ranks.items() if rank in begun and rank != self._site.rank
        }

    def _help(self, owner: int, published: PublishedPlan) -> None:
        assert self.make_module is not None, "nobody plans with a rank that has not said that it can"
        helper = Helper(self._site, self.make_module)
        with freed_memory_kept():
            helper.run(owner, published, self._site.member.client.job)

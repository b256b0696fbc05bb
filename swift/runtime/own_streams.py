"""What this rank's streams hold of steps that it does again, or that it has not done itself."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.errors import LogInterrupted, LogUnavailable, RecordCorrupt, RecordTrimmed
from swift.log.gaps import gaps
from swift.log.reader import Holdings, LogReader
from swift.log.record import RecordKey
from swift.log.streams import KINDS, collectives
from swift.log.unlogged import Steps, declared
from swift.log.writers import Writer
from swift.runtime.channel import Channel
from swift.runtime.member import Member
from swift.runtime.state import TrainerState
from swift.runtime.strategies.restore import Copied


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

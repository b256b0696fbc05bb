"""Log servers of a job: which are in use, where each rank's streams are kept, what remains after a loss.

::

    (all ranks have joined)     place: durable, in the View; every rank opens its streams there
    (a server is silent for log_lost_s, or with the ranks of its machine; or an operator gives it up or names another)
                                lose: never read or written again; its streams get new servers
    (RUNNING)                   mark_whole_from: the new copies are complete from the version training continues at
    (a plan)                    combined: what the copies of each stream hold, and which to read

A server that answers again within log_lost_s was never lost. The last one in use is never given up for its silence. Nor
is any while none of them answers: this process may be the one that is disconnected.
"""

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log import record
from swift_ft.log.placement import Sender, place
from swift_ft.planner.types import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.job_record import Copy, JobRow, LogServer, RankLogs, State
from swift_ft_services.coordinator.liveness import Leases
from swift_ft_services.coordinator.planning import assignment_of
from swift_ft_services.coordinator.timeouts import Timing

# One stream on several log servers: what its copies hold together, and which of them to read.


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCopy:
    server: int
    summary: StreamSummary
    whole_from: int | None = 0
    """First step from which this copy has every record. None: it was started by the current recovery, so it counts for
    no step."""


def with_moved(
    whole: StreamSummary, servers: tuple[int, ...], moved: Sequence[StreamCopy], *, floor: int = 0
) -> tuple[StreamSummary, tuple[int, ...]]:
    """Returns what `combined` does, with what lost servers have moved to the object store in front.

    A moved part has every record from the step at which its server joined the stream to the step before the last one
    that it has anything of. It counts if it leads to what follows without a gap: what its server had not moved yet is
    lost. `servers` then begin with the lost ones, as a reader takes one part after the other.
    """
    begin = whole.first_step if whole.records and not whole.corrupt else None
    while begin is not None and begin > floor:
        leads = {
            start: copy
            for copy in moved
            if not copy.summary.corrupt
            and (start := _copies_begin(copy)) is not None
            and start < begin <= copy.summary.last_step
        }
        if not leads:
            break
        begin = min(leads)
        copy = leads[begin]
        whole = replace(
            whole,
            first_step=begin,
            reason=whole.reason if begin > floor else "",
            unlogged=record.spanned((whole.unlogged, copy.summary.unlogged)),
        )
        servers = (copy.server, *servers)
    return whole, servers


def combined(
    copies: Sequence[StreamCopy], *, floor: int = 0, lost: str = ""
) -> tuple[StreamSummary, tuple[int, ...]]:
    """Returns the stream as a plan may rely on it, and the servers to read it from, best first.

    Copies are written together, record by record, each from the step at which its server joined the stream. So the copy
    that begins first has all that the others have, unless it is damaged. Copies that begin equally early are
    equivalent, and serve as fallbacks. Steps below `floor` are never read. `lost`: reason why older records are gone,
    if they are. `copies` must not be empty.
    """
    sound = [copy for copy in copies if not copy.summary.corrupt and _copies_begin(copy) is not None]
    servers = tuple(copy.server for copy in copies)
    trimmed = min(copy.summary.trimmed_below_step for copy in copies)
    # Over all copies: one may be incomplete, and records written again go also to copies that do not count yet.
    unlogged = record.spanned(copy.summary.unlogged for copy in copies)
    if not sound:
        damaged = [c for c in copies if c.summary.corrupt and c.whole_from is not None]
        if damaged:
            return damaged[0].summary, servers
        empty = StreamSummary(
            stream=copies[0].summary.stream,
            records=0,
            trimmed_below_step=trimmed,
            reason=lost,
            unlogged=unlogged,
        )
        return empty, servers
    start = min(max(_copies_begin(copy) or 0, floor) for copy in sound)
    chosen = [copy for copy in sound if max(_copies_begin(copy) or 0, floor) == start]
    chosen.sort(key=lambda copy: (-copy.summary.last_step, -copy.summary.records))
    first = min(_copies_begin(copy) or 0 for copy in chosen)
    best = chosen[0].summary
    whole = replace(
        best,
        first_step=first,
        last_step=max(best.last_step, first),
        trimmed_below_step=min(copy.summary.trimmed_below_step for copy in chosen),
        reason=lost if first > floor else "",
        unlogged=unlogged,
    )
    return whole, tuple(copy.server for copy in chosen)


def _copies_begin(copy: StreamCopy) -> int | None:
    """Returns the first step from which the copy is complete; None if it counts for no step."""
    summary = copy.summary
    if copy.whole_from is None or not summary.records or summary.last_step < copy.whole_from:
        return None
    return max(summary.first_step, copy.whole_from)


class Places:
    """The log servers of a job and the locations of its streams. Changes the row; the caller makes that durable."""

    def __init__(self, row: JobRow, timing: Timing, now: float) -> None:
        self._row = row
        self._timing = timing
        self.leases = Leases(row.living(), now)

    # --- liveness ---

    def renew(self, address: str, now: float) -> None:
        number = self.number_of(address)
        if number is not None:
            self.leases.renew(number, now)

    def overdue(self, now: float, hosts: Collection[str] = ()) -> dict[int, str]:
        """Returns the servers that are lost by their silence -> reason. `hosts`: machines whose ranks are all silent: a
        server that has been silent there for half a lease is lost with them, if another one has not been."""
        ages, limit_s, soon_s = self.ages_s(now), self._timing.log_lost_s, self._timing.lease_s / 2
        heard_s = min(ages.values(), default=limit_s)
        if not limit_s or heard_s >= limit_s / 2:
            return {}
        found = {n: f"has not answered for {age:.1f} s" for n, age in ages.items() if age > limit_s}
        with_ranks = {
            n: f"has not answered for {age:.1f} s, like the ranks of its machine"
            for n, age in ages.items()
            if self._row.log_servers[n].host in hosts and heard_s <= soon_s < age
        }
        return with_ranks | found

    def given_up_elsewhere(self, address: str, now: float) -> dict[int, str]:
        """Returns {number: reason} of a server that does not answer and that another job has given up, once another one
        has answered."""
        number, ages = self.number_of(address), self.ages_s(now)
        if number is None or not self._timing.log_lost_s or min(ages.values()) == ages[number]:
            return {}
        return {number: "does not answer, and another job has given it up"}

    def ages_s(self, now: float) -> dict[int, float]:
        """Returns number -> seconds since the server answered last, of those in use."""
        return {number: self.leases.age_s(number, now) for number in self._row.living()}

    def without(self, refused: m.LogsRefused) -> dict[int, str]:
        """Returns {number: reason} if the job can continue without the server that refused; empty if it cannot."""
        row, number = self._row, self.number_of(refused.address)
        if number is None:
            return {}
        others = len(row.living()) > 1 and row.state is not State.FORMING
        fits = others if refused.unfit else row.log_servers[number].fresh
        return {number: f"cannot be used: {refused.reason}"} if fits else {}

    def number_of(self, address: str) -> int | None:
        """Returns the number of the server in use with this address; None if there is none."""
        servers = self._row.log_servers
        return next((n for n in self._row.living() if servers[n].address == address), None)

    def block(self, address: str, reason: str) -> bool:
        """Records why a server blocks the recovery; empty: it does not. Returns False if that is known already."""
        blocked = self._row.blocked
        if blocked.get(address, "") == reason:
            return False
        if reason:
            blocked[address] = reason
        else:
            del blocked[address]
        return True

    # --- locations ---

    def seat(self, rank: int, host: str) -> None:
        """Records the host of the process that holds the rank. Its predecessor's records stay where they are."""
        placement = self._row.placement
        placement[rank] = replace(placement.get(rank, RankLogs(host=host)), host=host)
        self._place()

    def change(self, change: pb.ChangeLogServersRequest, now: float, why: str) -> tuple[bool, dict[int, str]]:
        """Applies a change. Returns (whether a server was added, number of each server to be lost ->
        reason). A repeated change has no effect."""
        number = self.number_of(change.lost) if change.lost else None
        lost = {number: why} if number is not None else {}
        if not change.add or self.number_of(change.add) not in (None, *lost):
            return False, lost
        came = LogServer(address=change.add, host=change.add_host, fresh=True, added=True)
        self._row.log_servers = [*self._row.log_servers, came]
        self.leases.renew(len(self._row.log_servers) - 1, now)
        if not lost:  # otherwise `lose` assigns the streams
            self._place()
        return True, lost

    def lose(self, lost: Mapping[int, str]) -> dict[int, str]:
        """Gives these servers up (number -> reason). Returns number -> a description of the loss."""
        row = self._row
        for number, why in lost.items():
            self._replace(number, lost=why)
            self.leases.forget(number)
        moved = row.moved(min(row.checkpoints, default=0))
        for rank, logs in row.placement.items():
            gone = [copy.server for copy in logs.copies if copy.server in lost]
            if not gone:
                continue
            left = replace(
                logs,
                copies=tuple(copy for copy in logs.copies if copy.server not in lost),
                moved=tuple(copy for copy in (*logs.moved, *logs.copies) if copy.server in moved),
            )
            if _begins(left) > _begins(logs):
                left = replace(left, lost="; ".join(self._lost_words(number) for number in gone))
            row.placement[rank] = left
        self._place()
        return {number: self._lost_words(number) for number in lost}

    def _place(self) -> None:
        row = self._row
        if row.lacks(row.placement):  # not all have joined yet
            return
        senders = [
            Sender(rank=rank, host=logs.host, held=tuple(copy.server for copy in logs.copies))
            for rank, logs in row.placement.items()
        ]
        servers = {number: row.log_servers[number].host for number in row.living()}
        for rank, chosen in place(senders, servers, row.copies, row.job).items():
            logs = row.placement[rank]
            held = {copy.server: copy for copy in logs.copies}
            copies = tuple(held.get(number) or Copy(server=number) for number in chosen)
            if copies != logs.copies:
                row.placement[rank] = replace(logs, copies=copies)

    def _replace(self, number: int, **changes: Any) -> None:
        servers = list(self._row.log_servers)
        servers[number] = replace(servers[number], **changes)
        self._row.log_servers = servers

    def granted(self) -> list[int]:
        """Marks the added servers as in use and returns them: all servers hold the generation, and these are emptied,
        so records written there from now on stay."""
        came = self.fresh()
        for number in came:
            self._replace(number, fresh=False)
        return came

    def fresh(self) -> list[int]:
        """Returns the servers that must be emptied first. A server that was lost before that is not among them: it may
        have been added again."""
        return [number for number in self._row.living() if self._row.log_servers[number].fresh]

    def in_order(self) -> list[int]:
        """Returns the servers in use in the order in which their addresses were first named."""
        addresses = [server.address for server in self._row.log_servers]
        return sorted(self._row.living(), key=lambda number: addresses.index(addresses[number]))

    def named(self, number: int) -> dict[str, object]:
        return {"server": number, "address": self._row.log_servers[number].address}

    def mark_whole_from(self, version: int) -> str:
        """Records `version`, from which training continues, as the first complete step of new copies.

        Returns why the log cannot feed a replay from the newest complete checkpoint; empty if no reason is known.
        """
        for number, server in enumerate(self._row.log_servers):
            if server.lost and server.below is None:
                self._replace(number, below=version)
        for rank, logs in self._row.placement.items():
            if any(copy.whole_from is None for copy in logs.copies):
                whole = tuple(
                    replace(copy, whole_from=version) if copy.whole_from is None else copy
                    for copy in logs.copies
                )
                self._row.placement[rank] = replace(logs, copies=whole)
        newest = max(self._row.checkpoints, default=0)
        late = {logs.lost for logs in self._row.placement.values() if logs.copies and _begins(logs) > newest}
        return "; ".join(sorted(filter(None, late)))

    def empty(self) -> None:
        """Marks all copies as complete: the job's records are dropped everywhere."""
        for rank, logs in self._row.placement.items():
            copies = tuple(replace(copy, whole_from=0) for copy in logs.copies)
            self._row.placement[rank] = replace(logs, copies=copies, lost="", moved=())

    def note_cold(self, cold: Mapping[str, str]) -> None:
        """Records where the servers (by address) have what they move to the object store. A lost one that was taken
        back, emptied, removes what it had moved."""
        for address, where in cold.items():
            number = self.number_of(address)
            if number is None or self._row.log_servers[number].cold == where:
                continue
            self._replace(number, cold=where)
            uid = where.partition("/")[0]
            for other, server in enumerate(self._row.log_servers):
                if server.lost and server.cold and server.cold.partition("/")[0] == uid:
                    self._replace(other, cold="")

    # --- contents ---

    def combined(
        self,
        inventories: Mapping[str, Sequence[StreamSummary]],
        moved: Mapping[int, Sequence[StreamSummary]],
    ) -> tuple[dict[str, StreamSummary], dict[str, list[int]]]:
        """Returns (stream -> summary of its copies together, stream -> servers to read), from those by address, and
        from what lost servers, by number, have moved to the object store."""
        row = self._row
        there_moved = {n: {summary.stream: summary for summary in found} for n, found in moved.items()}
        there = {
            number: {
                summary.stream: summary for summary in inventories.get(row.log_servers[number].address, ())
            }
            for number in row.living()
        }
        writers = self._writers()
        floor = min(row.checkpoints, default=0)
        summaries: dict[str, StreamSummary] = {}
        sources: dict[str, list[int]] = {}
        for stream in sorted({*writers, *(name for found in there.values() for name in found)}):
            logs = row.placement.get(writers.get(stream, -1))
            placed = {copy.server: copy.whole_from for copy in logs.copies} if logs is not None else {}
            nothing = StreamSummary(stream=stream, records=0)
            copies = [
                StreamCopy(server=number, summary=there[number].get(stream, nothing), whole_from=whole_from)
                for number, whole_from in (placed or dict.fromkeys(there, 0)).items()
            ]
            if copies:
                lost = logs.lost if logs is not None else ""
                parts = [
                    StreamCopy(
                        server=n, summary=_part(summary, row.log_servers[n]), whole_from=copy.whole_from
                    )
                    for copy in (logs.moved if logs is not None else ())
                    if (summary := there_moved.get(n := copy.server, {}).get(stream)) is not None
                ]
                found = combined(copies, floor=floor, lost=lost)
                summaries[stream], servers = with_moved(*found, parts, floor=floor)
                sources[stream] = list(servers)
        return summaries, sources

    def _writers(self) -> dict[str, int]:
        assignment = assignment_of(self._row)
        dp_size = assignment.dp_size
        found = {record.collectives(rank): rank for rank in assignment.stages}
        for rank, stages in assignment.stages.items():
            for stage in stages:
                for kind in record.KINDS:
                    found[record.boundary(stage, kind, assignment.slots[rank].dp_rank, dp_size)] = rank
        return found

    def _lost_words(self, number: int) -> str:
        server = self._row.log_servers[number]
        return f"log server {server.address} is lost: it {server.lost}"


def _part(summary: StreamSummary, server: LogServer) -> StreamSummary:
    """Returns what counts of the records that a lost server has moved."""
    below = summary.last_step if server.below is None else min(summary.last_step, server.below)
    return replace(summary, last_step=below)


def unreplaced(row: JobRow) -> int:
    """Returns how many servers fewer are in use than at the start of the job."""
    wanted = sum(not server.added for server in row.log_servers)
    in_use = sum(not server.lost and not (server.added and server.fresh) for server in row.log_servers)
    return max(0, wanted - in_use)


def _begins(logs: RankLogs) -> float:
    """Returns the first step from which some copy is complete; infinity if none is."""
    return min((c.whole_from for c in logs.copies if c.whole_from is not None), default=math.inf)


# Calls to the log servers that establish a generation, or an empty log, and the meaning of their answers.
#
# The driver makes them over gRPC, the simulation in simulated time.


class Call(enum.Enum):
    """A call to one server. If it fails, the sequence for that server is repeated from its first call."""

    FENCE = "it takes appends of this generation only"
    FENCE_HELD = (
        "the same, if it knows the job: once it is fenced nobody can tell any more that it came back empty"
    )
    EMPTY = "it drops what it has of the job: a new server's own records come later"
    GIVE_UP = "it drops the job's records, also those that came to a new server since"


# The resets of a generation, by number.
EMPTIED_WHEN_NEW, GIVEN_UP = 0, 1
RESETS: Mapping[Call, int] = {Call.EMPTY: EMPTIED_WHEN_NEW, Call.GIVE_UP: GIVEN_UP}


def to_fence(row: JobRow, places: Places) -> dict[str, tuple[Call, ...]]:
    """Returns the calls for every log server in use, by address. For a server that has lost the job see `LogLost`."""
    fresh = places.fresh()
    # before a job runs, no log holds records of it
    held = (Call.FENCE_HELD if row.granted and row.state is not State.FORMING else Call.FENCE,)
    return {
        row.log_servers[number].address: (Call.FENCE, Call.EMPTY) if number in fresh else held
        for number in row.living()
    }


def to_give_up(row: JobRow) -> dict[str, tuple[Call, ...]]:
    """Returns the calls by address. All servers hold the generation, except any that restarted empty since. A plain
    fence would let those accept appends, with a gap where their writers' acknowledged records were."""
    return dict.fromkeys(row.addresses(), (Call.FENCE_HELD, Call.GIVE_UP))

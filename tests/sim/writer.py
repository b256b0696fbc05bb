"""What one process writes in simulated time, on each of the servers that keep a copy.

It decides what a writer and its sidecar decide, with the product's `LinkCore` and `Unlogged`. But nothing blocks here,
so a flush and a full queue are states that the process looks at, not calls that wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import crc32c

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogUnavailable, SwiftError
from swift_ft.log.frame import CODEC_NONE
from swift_ft.log.record import MARK_DTYPE, MARK_SHAPE, RecordKey, digest_of, stream_tag
from swift_ft.log.sender_core import Outgoing
from tests.sim.checkers import Checkers
from tests.sim.client import SimLink
from tests.sim.dropping import Dropping
from tests.sim.kernel import Network, Process
from tests.sim.memory import SimMemory
from tests.sim.server import JOB, ServerProcess, at

PATIENCE_S = 12.0


class Surroundings(Protocol):
    checkers: Checkers
    drop_queue: int
    """Records that a writer lets wait before it drops the next; 0: it is blocked instead."""

    def servers(self) -> dict[str, ServerProcess | None]: ...


class _Logged:
    """A record that the log has, or that is on its way to it."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.servers: set[str] = set()


class SimWriter:
    def __init__(
        self, process: Process, network: Network, world: Surroundings, refuse: Callable[[str], None]
    ) -> None:
        self.links: dict[str, SimLink] = {}
        self.servers: dict[str, int] = {}
        """Those that keep what it writes -> their numbers."""
        self.dropping = Dropping(world.drop_queue)
        self._process = process
        self._network = network
        self._world = world
        self._refuse = refuse
        self._known: dict[str, dict[RecordKey, _Logged]] = {}
        self._generation = 0
        self._memory = SimMemory(process)

    @property
    def backlog(self) -> int:
        return sum(link.core.pending for link in self.links.values())

    def open(self, generation: int, servers: dict[str, int]) -> None:
        if self._generation != generation:
            self._generation = generation
            self._move(servers)
            for link in self.links.values():
                link.set_generation(generation, discard=False)

    def _move(self, servers: dict[str, int]) -> None:
        """What a server that is given up has not acknowledged, those that have come get."""
        before, self.servers = self.servers, servers
        if before and before != servers:
            self._process.kernel.count("streams moved")
        # One that was emptied since has another number.
        stay = {name for name, number in servers.items() if before.get(name) == number}
        for known in self._known.values():
            for logged in known.values():
                logged.servers.intersection_update(stay)
        left: dict[tuple[str, RecordKey], Outgoing] = {}
        for name in sorted(set(self.links) - stay):
            for record in self.links.pop(name).give_up():
                left.setdefault((record.stream, record.key), record)
        for (stream, key), record in left.items():
            had = self._known.get(stream, {}).get(key)
            for name in servers:
                if name not in stay and (had is None or name not in had.servers):
                    self._link(name).enqueue(replace(record, sequence=-1))
                if had is not None:
                    had.servers.add(name)

    def _link(self, name: str) -> SimLink:
        link = self.links.get(name)
        if link is None:
            link = self.links[name] = SimLink(
                self._process,
                self._network,
                self._world.checkers,
                self._generation,
                name,
                lambda: self._world.servers()[name],
                self._memory,
                self._free,
            )
        return link

    def _free(self) -> None:
        self._memory.keep(set().union(*(link.places for link in self.links.values())))

    def append(self, stream: str, step: int, body: bytes, keep: bool = False) -> None:
        """``keep``: it is not dropped."""
        dropping = self.dropping
        if dropping.queue and not keep and dropping.refuses(stream, step, self.backlog):
            self._process.kernel.count("record dropped")
            dropping.unlogged.drop(stream, step, len(body))
            writers = [at(name, self._process.name) for name in self.servers]
            self._world.checkers.dropped(writers, stream_tag(JOB, stream), step)
            return
        self._declare(stream)
        self._put(stream, RecordKey(step, 0, 0), "uint8", (len(body),), body)

    def _declare(self, stream: str) -> None:
        due = self.dropping.unlogged.due(stream)
        if due is not None:
            self._process.kernel.count("steps declared unlogged")
            self._put(stream, due, MARK_DTYPE, MARK_SHAPE, b"")
            self.dropping.unlogged.marked(stream)

    def declare_all(self) -> None:
        for stream in self.dropping.unlogged.streams:
            self._declare(stream)

    def _put(self, stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: bytes) -> None:
        """What the log has already is compared, what it has not is appended."""
        digest = digest_of(dtype, shape, body)
        logged = self._known.setdefault(stream, {}).setdefault(key, _Logged(digest))
        missing = [name for name in self.servers if name not in logged.servers]
        if logged.digest != digest:
            self._refuse("its own tensor differs from the logged one")
            return
        new = len(missing) == len(self.servers)
        self._process.kernel.count("record appended" if new else "record verified")
        record = Outgoing(
            stream=stream,
            key=key,
            dtype=dtype,
            shape=shape,
            raw_bytes=len(body),
            codec=CODEC_NONE,
            stored=body,
            body_crc=crc32c.crc32c(body),
            digest=digest,
            place=self._memory.put(body) if body and missing else -1,
        )
        for name in missing:
            self._link(name).enqueue(replace(record))
        logged.servers.update(missing)

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str) -> None:
        """What a server holds."""
        known = self._known.setdefault(stream, {})
        for key, digest in digests.items():
            logged = known.setdefault(key, _Logged(digest))
            if logged.digest != digest:
                self._refuse("copies differ")
            logged.servers.add(server)

    def writes_nothing_over(self, stream: str, server: str) -> None:
        """It is damaged there: it may have what others have."""
        for logged in self._known.get(stream, {}).values():
            logged.servers.add(server)

    def restart(self, generation: int) -> None:
        """The log is given up."""
        self._known.clear()
        self.dropping.forget()
        self._world.checkers.given_up(self._process.name)
        for link in self.links.values():
            link.set_generation(generation, discard=True)

    def has_failed(self, may_drop: bool = False) -> bool:
        for link in self.links.values():
            error: SwiftError | None = link.core.error(PATIENCE_S, self._process.kernel.now)
            if error is not None and not (may_drop and isinstance(error, LogUnavailable)):
                self._refuse(f"log: {type(error).__name__}")
                return True
        return False


def own_servers(view: pb.View, rank: int) -> dict[str, int]:
    """As the engine's."""
    numbers = {place.address: number for number, place in enumerate(view.log_places) if not place.lost}
    return {name: numbers[name] for logs in view.log_copies if logs.rank == rank for name in logs.servers}

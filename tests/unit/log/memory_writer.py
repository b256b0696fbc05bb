"""A writer of the log without a log: what it was given is in a dict. For tests of those that have a writer."""

import threading
from collections.abc import Collection, Mapping, Sequence

from swift_ft.errors import Divergence, LogInterrupted, RecordCorrupt, ServiceError, SwiftError, UsageError
from swift_ft.log.record import MARK_DTYPE, MARK_SHAPE, RecordKey, Unlogged, digest_of
from swift_ft.log.sender import WriterStats
from swift_ft.log.writer import check_record

Records = dict[tuple[str, RecordKey], bytes]


class MemoryWriter:
    """As `swift_ft.log.sidecar_client.Writer`; `tests.unit.log.test_writers` holds it to that.

    ``logged`` outlives it, as a log does: another writer may be given the same.
    """

    lending = None
    pid = None

    def __init__(
        self, servers: Sequence[str], generation: int, *, drops: bool = False, logged: Records | None = None
    ) -> None:
        self.drops = drops
        self.unlogged = Unlogged(threading.Lock())
        self.stats = WriterStats()
        self.servers = tuple(servers)
        self.generation = generation
        self.logged = {} if logged is None else logged
        self.takes = True
        """The log takes what it is given; else the queue is full."""
        self.known: dict[str, dict[RecordKey, tuple[bytes, set[str]]]] = {}
        """By stream: what the log has, and on which servers."""
        self.ready = False
        self._error: SwiftError | None = None
        self._interrupted = self._closed = False

    @property
    def queued_bytes(self) -> int:
        return 0

    def append(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        body: memoryview | bytes | bytearray,
        *,
        keep: bool = False,
    ) -> bool:
        view = check_record(stream, key, dtype, shape, body)
        self._raise_pending()
        if self.drops and not keep and (not self.takes or self.unlogged.refuses(stream, key.step, 0, 1)):
            self.unlogged.drop(stream, key.step, view.nbytes)
            self.stats.dropped_records, self.stats.dropped_bytes = self.unlogged.records, self.unlogged.bytes
            return False
        assert self.takes, "nobody would ever free it"
        self._declare(stream)
        self._put(stream, key, dtype, shape, view)
        return True

    def _put(self, stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: memoryview) -> None:
        digest = digest_of(dtype, shape, body)
        known, servers = self.known.setdefault(stream, {}).setdefault(key, (digest, set()))
        if known != digest:
            if self._error is None:
                self._error = Divergence(f"{stream} {key} is not what was logged")
                self.unlogged.refuse(self._error)
            return
        missing = set(self.servers) - servers
        if not missing or servers:
            self.stats.verified += 1
        else:
            self.stats.records += 1
            self.stats.bytes += body.nbytes
        if missing:
            self.logged[stream, key] = bytes(body)
        servers |= missing

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        for key, digest in digests.items():
            known, servers = self.known.setdefault(stream, {}).setdefault(key, (digest, set()))
            if known != digest:
                raise RecordCorrupt(f"{stream} {key} differs between its copies")
            servers |= {server} if server else set(self.servers)

    def declare(self) -> None:
        for stream in self.unlogged.streams:
            self._raise_pending()
            self._declare(stream)

    def _declare(self, stream: str) -> None:
        due = self.unlogged.due(stream)
        if due is not None:
            self._put(stream, due, MARK_DTYPE, MARK_SHAPE, memoryview(b""))
            self.unlogged.marked(stream)

    def flush(self, timeout_s: float) -> None:
        self.declare()
        self._raise_pending()

    def await_ready(self) -> None:
        self.ready = True

    def interrupt(self) -> None:
        self._interrupted = True

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        self._begin(generation)
        if servers:
            stay = set(servers) - set(emptied)
            for known in self.known.values():
                for _, having in known.values():
                    having &= stay
            self.servers = tuple(servers)

    def restart(self, generation: int) -> None:
        self._begin(generation)
        self.known.clear()
        self.unlogged.forget()

    def _begin(self, generation: int) -> None:
        if self._closed:
            raise ServiceError("this log writer is closed")
        if generation < self.generation:
            raise UsageError(f"generation {generation} is older than {self.generation}")
        self.generation = generation
        self._interrupted, self._error = False, None

    def forget_below(self, step: int) -> None:
        for stream, known in self.known.items():
            self.known[stream] = {key: value for key, value in known.items() if key.step >= step}

    def close(self, flush_timeout_s: float = 10.0) -> None:
        try:
            if flush_timeout_s > 0 and not self._closed:
                self.flush(flush_timeout_s)
        finally:
            self._closed = True

    def _raise_pending(self) -> None:
        if self._closed:
            raise ServiceError("this log writer is closed")
        if self._interrupted:
            raise LogInterrupted("the log writer was interrupted")
        if self._error is not None:
            raise self._error

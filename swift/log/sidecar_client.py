"""The writing end of the log for a trainer: a ring in shared memory, and the sidecar that empties it."""

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from swift.errors import LogUnavailable, SwiftError, UsageError
from swift.log.choice import Choice
from swift.log.lending import NOBODY, Borrower
from swift.log.memory import address_of
from swift.log.placement import PATIENCE_S
from swift.log.record import DIMS_MAX, DTYPE_BY_NAME, RecordKey, check_name
from swift.log.ring import HEADER_BYTES, Memory, Producer, Word, header_of, producer
from swift.log.sidecar_messages import Message
from swift.log.sidecar_supervisor import POLL_S, SidecarSupervisor
from swift.log.stats import WriterStats
from swift.log.unlogged import MARK_DTYPE, MARK_SHAPE, Unlogged
from swift.log.writer import check_options, check_record


class SidecarWriter:
    """The same calls as `LogWriter`'s, but the work is done by another process.

    `append` and `append_at` put a record into the ring, a matter of microseconds, and a native thread copies its
    body. What was given to them must stay as it is until `settle`, or until `copied` has passed the position that
    `append_at` has returned; then it is the caller's again.

    A `SidecarSupervisor` keeps the sidecar working. One that outlives its trainer sends what the ring holds, for at
    most 10 s.
    """

    module = "swift.log.sidecar"  # the program that is started

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str | Mapping[str, str] = "none",
        fsync: str | Mapping[str, str] = "",
        queue_bytes: int = 256 << 20,
        patience_s: float = PATIENCE_S,
        when_full: str = "block",
        name: str = "",
        lease: Mapping[str, Any] | None = None,
    ) -> None:
        """`lease`: which one the sidecar keeps besides (`swift.log.lease`)."""
        check_options(servers, job, codec, fsync, queue_bytes, patience_s, when_full)
        self.job = job
        self._patience_s = patience_s
        self._pushing = threading.Lock()
        # Held by who reads the ring's words, until `_stats` says that it is gone.
        self._mapped = threading.Lock()
        self.drops = when_full == "drop"
        self.unlogged = Unlogged(self._pushing)
        self._blocked_seconds = 0.0
        self._streams: dict[str, int] = {}
        self._lent: deque[tuple[int, object]] = deque()
        self._stats: WriterStats | None = None  # once it is closed
        self._borrower = NOBODY
        self._memory = Memory.create(queue_bytes)
        self._urgent = self.drops  # who drops records waits for no others
        self._memory.store(Word.URGENT, self._urgent)
        self._largest = self._memory.capacity - HEADER_BYTES
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._producer = producer(self._memory, self._wake)
        begin: Message = {
            "job": job,
            "codec": codec if isinstance(codec, str) else dict(codec),
            "fsync": fsync if isinstance(fsync, str) else dict(fsync),
            "patience_s": patience_s,
            "name": name,
            "lease": None if lease is None else dict(lease),
        }
        try:
            self._sidecar = SidecarSupervisor(
                self.module, self._memory.fd, self._wake, servers, generation, begin, self.unlogged.refuse
            )
        except SwiftError:
            self._free_ring()
            raise

    @property
    def stats(self) -> WriterStats:
        """What the log has acknowledged, and what was found equal."""
        with self._mapped:
            return self._stats or self._counted()

    def _counted(self) -> WriterStats:
        counts = self._memory.counts()._asdict()
        return WriterStats(
            **counts,
            resent=self._memory.load(Word.RESENT),
            blocked_seconds=self._blocked_seconds,
            dropped_records=self.unlogged.records,
            dropped_bytes=self.unlogged.bytes,
            pace_bytes_per_s=float(self._memory.load(Word.PACE)),
        )

    @property
    def generation(self) -> int:
        """Under which it writes."""
        return self._sidecar.generation

    @property
    def restarts(self) -> int:
        """So many sidecars have died, and were replaced."""
        return self._sidecar.restarts

    @property
    def queued_bytes(self) -> int:
        """What the ring holds that the log has not acknowledged."""
        with self._mapped:
            return 0 if self._stats is not None else self._producer.reserved - self._memory.load(Word.TAIL)

    @property
    def codec_choices(self) -> dict[str, Choice]:
        return self._sidecar.codec_choices

    @property
    def lending(self) -> "SidecarWriter":
        return self

    @property
    def pid(self) -> int:
        """Of the sidecar."""
        return self._sidecar.pid

    @property
    def copied(self) -> int:
        """What was appended below this position belongs to the caller again."""
        with self._mapped:
            return self._producer.reserved if self._stats is not None else self._memory.load(Word.HEAD)

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
        """As `LogWriter.append`; ``body`` must not change until `settle`."""
        view = check_record(stream, key, dtype, shape, body)
        end = self.append_at(stream, key, dtype, shape, address_of(view), view.nbytes, keep=keep)
        copied = self.copied
        while self._lent and self._lent[0][0] <= copied:
            self._lent.popleft()
        if end > copied:
            self._lent.append((end, view))
        return end >= 0

    def append_at(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        address: int,
        size: int,
        now: bool = False,
        keep: bool = False,
    ) -> int:
        """Takes ``size`` bytes at an address into the log; gives the position that `copied` will pass, or -1 if they
        were dropped.

        ``now``: they are copied before this returns, by the caller. While the ring is full, waits or drops them;
        with ``keep`` it waits in any case. Raises as `LogWriter.append` does, and UsageError for a record that is
        larger than the ring.
        """
        may_drop = self.drops and not keep
        with self._pushing:
            self._sidecar.raise_pending(may_drop)
            if size > self._largest:
                raise UsageError(
                    f"{stream} {key}: {size} bytes are more than the log's queue holds ({self._largest}); "
                    "give a larger log_queue_bytes"
                )
            if dtype not in DTYPE_BY_NAME:
                raise UsageError(f"{stream} {key}: element type {dtype!r} cannot be logged")
            if len(shape) > DIMS_MAX:
                raise UsageError(f"{stream} {key}: {len(shape)} dimensions; at most {DIMS_MAX} can be logged")
            header = header_of(self._index(stream), key, dtype, shape, size)
            if may_drop:
                refused = self.unlogged.refuses(stream, key.step, self.queued_bytes, self._memory.capacity)
                tried = not refused and self._declared(stream, wait=False)
                end = self._producer.push(header, address, size, now) if tried else -1
                if end < 0:
                    self.unlogged.drop(stream, key.step, size)
                return end
            if keep != self._urgent:  # a replay: others may wait for what it gives
                self._urgent = keep
                self._memory.store(Word.URGENT, keep)
            self._declared(stream, wait=True)
            end = self._producer.push(header, address, size, now)
            return end if end >= 0 else self._push_later(header, address, size, now)

    def _index(self, stream: str) -> int:
        index = self._streams.get(stream)
        if index is None:
            check_name("stream", stream)
            self._memory.set_stream(len(self._streams), stream)
            index = self._streams[stream] = len(self._streams)
        return index

    def declare(self) -> None:
        """As `LogWriter.declare`."""
        with self._pushing:
            for stream in self.unlogged.streams:
                self._sidecar.raise_pending()
                self._declared(stream, wait=True)

    def _declared(self, stream: str, wait: bool) -> bool:
        """(holding `_pushing`) Puts the mark that is due in front of what comes. False: there is no room."""
        due = self.unlogged.due(stream)
        if due is not None:
            header = header_of(self._index(stream), due, MARK_DTYPE, MARK_SHAPE, 0)
            if self._producer.push(header, self._memory.address, 0, True) < 0:
                if not wait:
                    return False
                self._push_later(header, self._memory.address, 0, True)
            self.unlogged.marked(stream)
        return True

    def _push_later(self, header: bytes, address: int, size: int, now: bool) -> int:
        """Waits for room."""
        tail, moved = self._memory.load(Word.TAIL), (began := time.monotonic())
        try:
            while True:
                self._borrower.finish()
                self._memory.store(Word.PRODUCER_WAITS, 1)
                with self._sidecar.changed:
                    if (end := self._producer.push(header, address, size, now)) >= 0:
                        return end
                    self._sidecar.changed.wait(POLL_S)
                    self._sidecar.raise_pending()
                if self._memory.load(Word.TAIL) != tail:
                    tail, moved = self._memory.load(Word.TAIL), time.monotonic()
                waited_s = time.monotonic() - moved
                if waited_s > self._patience_s + 2 * POLL_S:
                    raise LogUnavailable(f"the log has acknowledged nothing for {waited_s:.0f} s")
        finally:
            self._blocked_seconds += time.monotonic() - began

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """For bodies that somebody else writes (see Producer), appended at address 0. There is one borrower."""
        assert self._borrower is NOBODY
        self._borrower = borrower
        return self._memory, self._producer

    def settle(self) -> None:
        """Returns when everything that was appended belongs to the caller again; takes no longer than the copies."""
        with self._pushing:
            if self._stats is None:
                self._borrower.finish()
                self._producer.wait(self._producer.reserved)
            self._lent.clear()

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """As `LogWriter.expect`."""
        check_name("stream", stream)
        self._sidecar.expect(stream, server, digests)

    def flush(self, timeout_s: float) -> None:
        """As `LogWriter.flush`."""
        self.declare()
        self.settle()
        self._sidecar.flush(self.copied, timeout_s)

    def interrupt(self) -> None:
        """As `LogWriter.interrupt`."""
        self._sidecar.interrupt()

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """As `LogWriter.set_generation`."""
        self._sidecar.set_generation(generation, servers, emptied)

    def restart(self, generation: int) -> None:
        """As `LogWriter.restart`."""
        self.settle()
        with self._pushing:
            self.unlogged.forget()
        self._sidecar.restart(generation, self.copied)

    def await_ready(self) -> None:
        """Returns once the sidecar works. Nobody has to wait for it, but a trainer that begins can."""
        self._sidecar.await_ready()

    def forget_below(self, step: int) -> None:
        """As `LogWriter.forget_below`."""
        with self._mapped:
            if self._stats is not None:
                return
            self._memory.store(Word.FLOOR_AT, self._producer.reserved)
            self._memory.store(Word.FLOOR, step)
            os.eventfd_write(self._wake, 1)  # a step is done: its records go out
        self._sidecar.forget_below(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """As `LogWriter.close`; the sidecar has ended when this returns."""
        if self._sidecar.closed:
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self._sidecar.close()
            self._borrower.let_go()
            with self._pushing, self._mapped:
                self._free_ring()

    def _free_ring(self) -> None:
        self._producer.close()
        os.close(self._wake)
        self._stats = self._counted()
        self._memory.close()

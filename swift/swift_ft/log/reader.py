"""The reading end of the log, in a rank that replays."""

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import grpc

from swift_ft import events
from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.errors import (
    LogInterrupted,
    LogUnavailable,
    RecordCorrupt,
    RecordMissing,
    RecordTrimmed,
    SwiftError,
    UsageError,
)
from swift_ft.log.frame import BODY_BYTES_MAX, Assembler, FrameHeader, FrameIncomplete, decode_body
from swift_ft.log.protocol import (
    CALLS_PER_CONNECTION,
    Reason,
    as_error,
    code_of,
    message_of,
    method,
    open_channel,
    reason_of,
    split_frames,
)
from swift_ft.log.record import MARK_SLOT, STEP_MAX, Record, RecordKey, check_name, declared, stream_tag
from swift_ft.log.shared_memory import KNOWN, LentFiles, ask_for_files

# A part of a stream, for a reader that does not need all of it.


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFilter:
    """Filter that limits the microbatches below `of`, in steps below `below_step`, to those in [`first`, `behind`).

    All other records pass, including marks of unlogged steps.
    """

    first: int
    behind: int
    of: int
    below_step: int

    def has(self, key: RecordKey) -> bool:
        return (
            self.first <= key.microbatch < self.behind
            or key.microbatch >= self.of
            or key.step >= self.below_step
            or key.slot == MARK_SLOT
        )


_MOVED = re.compile(r"(.+)/([0-9a-f]{32}/[0-9]+\.[0-9]+)/([0-9]+)")


class _Source:
    """A copy that a plan names: a server, or a part that a lost server has moved, and the server that reads it."""

    def __init__(self, text: str) -> None:
        match = _MOVED.fullmatch(text)
        self.address, self.cold = (match[1], match[2]) if match else (text, "")
        self.below_step = int(match[3]) if match else STEP_MAX + 1


def lost_copy(address: str, cold: str, below_step: int) -> str:
    """Returns the name of the copy that a lost server has moved: its records of steps below ``below_step``, which the
    server at ``address`` reads from the folder ``cold`` of the store that both have."""
    return f"{address}/{cold}/{below_step}"


_CALL_TIMEOUT_S = 30.0
_POLL_S = 0.02
_RETRY_S = 0.05
_CURSORS_PER_CONNECTION = CALLS_PER_CONNECTION // 2
"""Limit of open cursors per connection. An open cursor is one call, and if cursors took all calls that a server accepts
per connection, the next call would wait for ever."""


def never() -> bool:
    """Returns False: a ``cancelled`` for `LogReader.digests` that never cancels."""
    return False


class Holdings(NamedTuple):
    streams: frozenset[str]
    trimmed_below_step: int

    def lacks(self, stream: str, from_step: int) -> bool:
        """Returns whether the server has no record of the stream from this step on, and never had one."""
        return stream not in self.streams and from_step >= self.trimmed_below_step


class LogReader:
    """Reader of all streams of a job, from the servers that hold them. Thread-safe.

    ``servers``: the servers that hold a copy, the best first, by stream or for all streams. Sequences differ between
    copies, so a record is identified by its key, and must have the same digest in all copies. A copy may be a part that
    a lost server has moved to an object store (`lost_copy`); such parts come first.
    """

    def __init__(
        self,
        servers: Sequence[str] | Mapping[str, Sequence[str]],
        job: str,
        *,
        prefetch_bytes: int = 64 << 20,
    ) -> None:
        if not servers:
            raise UsageError("a log reader needs at least one log server")
        check_name("job", job)
        self.job = job
        self._servers = servers
        self._prefetch_bytes = prefetch_bytes
        self._channels: dict[tuple[str, int], grpc.Channel] = {}
        """(server, number) -> connection. Each server has as many as its cursors need, numbered from 0."""
        self._cursors: Counter[int] = Counter()
        """Number of the connection -> number of cursors on it."""
        self._lock = threading.Lock()

    def _channel(self, address: str, number: int = 0) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get((address, number))
            if channel is None:
                channel = self._channels[address, number] = open_channel(address)
            return channel

    def _copies(self, stream: str) -> Sequence[str]:
        check_name("stream", stream)
        servers = self._servers.get(stream, ()) if isinstance(self._servers, Mapping) else self._servers
        if not servers:
            raise RecordMissing(f"no log server holds {stream}")
        return servers

    def digests(
        self,
        stream: str,
        from_step: int,
        server: str = "",
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        cancelled: Callable[[], bool],
    ) -> dict[RecordKey, bytes]:
        """Returns the digests of the stream's records of steps >= ``from_step``, from a server's index: that of
        ``server``, or of the first copy that can answer. Raises RecordTrimmed, RecordCorrupt, LogUnavailable,
        AccessDenied, and LogInterrupted if ``cancelled()`` is true while it waits for a server."""
        copies = [server] if server else self._copies(stream)
        moved: dict[RecordKey, bytes] = {}
        for address in copies[:-1]:
            try:
                found = self._digests(address, stream, from_step, timeout_s)
            except (LogUnavailable, RecordCorrupt, RecordTrimmed):
                continue
            if not _Source(address).cold:
                return moved | found
            moved |= found
        # The last server may be restarting, or may be about to be replaced.
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return moved | self._digests(copies[-1], stream, from_step, timeout_s)
            except LogUnavailable:
                if cancelled():
                    raise LogInterrupted(f"asking for the digests of {stream} was called off") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def holdings(self, server: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> Holdings | None:
        """Returns the job's streams on a server. None if it does not know the job or does not answer."""
        stub = log_pb2_grpc.LogStub(self._channel(server))
        try:
            reply = stub.Inventory(log_pb2.InventoryRequest(job=self.job), timeout=timeout_s)
        except grpc.RpcError:
            return None
        if not reply.generation:
            return None
        return Holdings(frozenset(stream.stream for stream in reply.streams), reply.trimmed_below_step)

    def _digests(self, address: str, stream: str, from_step: int, timeout_s: float) -> dict[RecordKey, bytes]:
        source = _Source(address)
        request = log_pb2.DigestsRequest(job=self.job, stream=stream, from_step=from_step, cold=source.cold)
        stub = log_pb2_grpc.LogStub(self._channel(source.address))
        deadline = time.monotonic() + timeout_s
        while True:
            digest_by_key: dict[RecordKey, bytes] = {}
            left = max(_RETRY_S, deadline - time.monotonic())
            try:
                for reply in stub.Digests(request, timeout=left):
                    for record in reply.records:
                        if record.step < source.below_step:
                            key = RecordKey(record.step, record.microbatch, record.slot)
                            digest_by_key[key] = record.digest
                return digest_by_key
            except grpc.RpcError as error:
                # As in `StreamCursor._retry`.
                if reason_of(error) != Reason.UNAUTHENTICATED or time.monotonic() + _RETRY_S >= deadline:
                    raise as_error(address, error) from None
            time.sleep(_RETRY_S)

    def follow(self, stream: str, from_step: int, share: ReadFilter | None = None) -> "StreamCursor":
        """Returns a cursor over the stream's records of steps >= ``from_step``, present and future ones, prefetched in
        log order. While it is open, the server that it reads from does not trim these steps.

        ``share``: the caller takes only records that pass this filter, so the others are not read.
        """
        addresses = self._copies(stream)
        with self._lock:
            number = next(number for number in count() if self._cursors[number] < _CURSORS_PER_CONNECTION)
            self._cursors[number] += 1
        copies = [(address, self._channel(_Source(address).address, number)) for address in addresses]
        over = partial(self._over, number)
        return StreamCursor(copies, self.job, stream, from_step, self._prefetch_bytes, share, over)

    def _over(self, number: int) -> None:
        with self._lock:
            self._cursors[number] -= 1

    def close(self) -> None:
        """Closes all connections. Close the cursors first."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()


class _Arrivals:
    """What one Read call brings: frames, and places of frames in files that the server lends."""

    def __init__(self, tag: int) -> None:
        """``tag``: the stream's."""
        self._tag = tag
        self._assembler = Assembler(BODY_BYTES_MAX)
        self._files: LentFiles | None = None

    @property
    def are_lent(self) -> bool:
        return self._files is not None

    def frames(self, message: bytes) -> Iterator[tuple[FrameHeader, list[memoryview]]]:
        """Yields as `Assembler.feed`. Raises OSError for a file that cannot be read."""
        frames = split_frames(message)
        if frames is not None:
            yield from self._assembler.feed(frames)
            return
        reply = log_pb2.ReadReply.FromString(message)
        if reply.file_socket and self._files is None:
            self._files = ask_for_files(reply.file_socket, reply.file_key)
        if reply.lent:
            if self._files is None:
                raise OSError("files that were not asked for")
            yield from self._lent(self._files, reply.lent)
        yield from self._assembler.feed(memoryview(reply.frames))

    def _lent(
        self, files: LentFiles, lent: Sequence[log_pb2.Lent]
    ) -> Iterator[tuple[FrameHeader, list[memoryview]]]:
        """Yields the frames at these places. They must be those that the server's index has there."""
        expected = b"".join(each.known for each in lent)
        known = deque(KNOWN.iter_unpack(expected[: len(expected) // KNOWN.size * KNOWN.size]))
        for part in files.read((each.file, each.offset, each.size) for each in lent):
            for header, parts in self._assembler.feed(part):
                key = header.key
                found = (
                    header.sequence,
                    header.generation,
                    key.step,
                    key.microbatch,
                    key.slot,
                    header.digest,
                )
                if header.stream_tag != self._tag or not known or found != known.popleft():
                    raise RecordCorrupt(f"{key}: another record is in its place")
                yield header, parts
        if known:  # a larger one is in its place
            raise RecordCorrupt(f"{len(known)} records are not in their places")

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class StreamCursor:
    """Records of one stream, taken by key in any order. Created by `LogReader.follow`.

    A thread prefetches in log order. Above ``prefetch_bytes`` it pauses, unless a consumer waits for a record that has
    not arrived yet. A record that was taken is dropped. If a server is gone or refuses a record, the next copy is read,
    from the first step still needed; records that arrived before are recognized by their keys.
    """

    def __init__(
        self,
        copies: Sequence[tuple[str, grpc.Channel]],
        job: str,
        stream: str,
        from_step: int,
        prefetch_bytes: int,
        share: ReadFilter | None,
        over: Callable[[], None],
    ) -> None:
        """``over``: called when the cursor has been closed."""
        self.stream = stream
        self._over = over
        self._share = share
        self._copies = [(address, _read_call(channel)) for address, channel in copies]
        """Copies whose servers have not refused; the first one is read."""
        self._job = job
        self._from_step = from_step
        self._prefetch_bytes = prefetch_bytes
        self._cond = threading.Condition()
        self._records: dict[RecordKey, Record] = {}
        self._marks: list[RecordKey] = []
        self._seen: dict[RecordKey, bytes] = {}  # digests of all records that arrived, taken or not
        self._held_bytes = 0
        self._waiting = 0
        self._next_sequence = 0
        self._below_step = 0
        self._error: SwiftError | None = None
        self._trouble = ""
        self._call: grpc.Call | None = None
        self._near = True  # a server on this machine lends its files
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"log-cursor-{stream}", daemon=True)
        self._thread.start()

    def get(self, key: RecordKey, timeout_s: float, cancelled: Callable[[], bool]) -> Record:
        """Waits for a record and returns it. Raises LogInterrupted as soon as ``cancelled()`` is true, RecordMissing
        after ``timeout_s``, RecordCorrupt or RecordTrimmed if the stream cannot be read as far as the key."""
        deadline = time.monotonic() + timeout_s
        with self._cond:
            record = self._records.pop(key, None)
            self._waiting += 1
            self._cond.notify_all()
            try:
                while record is None:
                    if cancelled():
                        raise LogInterrupted(f"waiting for {self.stream} {key} was called off")
                    if self._error is not None:
                        raise self._error
                    self._raise_if_dropped(key)
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise RecordMissing(
                            f"{self.stream} {key} did not come within {timeout_s:g} s"
                            + (f": {self._trouble}" if self._trouble else "")
                        )
                    self._cond.wait(min(left, _POLL_S))
                    record = self._records.pop(key, None)
            finally:
                self._waiting -= 1
            self._held_bytes -= record.body.nbytes
            self._cond.notify_all()
            return record

    def _raise_if_dropped(self, key: RecordKey) -> None:
        """(holding the lock) Raises RecordMissing if the key's step is declared unlogged, so that the caller does not
        wait for a record that does not exist. No plan reads such a step."""
        for steps in map(declared, self._marks):
            if steps is not None and steps.first <= key.step <= steps.last:
                raise RecordMissing(f"{self.stream} {key} was dropped: {steps} are declared unlogged")

    def drop_below(self, step: int) -> None:
        with self._cond:
            self._from_step = max(self._from_step, step)
            for key in [key for key in self._records if key.step < step]:
                self._held_bytes -= self._records.pop(key).body.nbytes
            for key in [key for key in self._seen if key.step < step]:
                del self._seen[key]
            self._cond.notify_all()

    def close(self) -> None:
        """Ends the call and its thread. A waiting `get` raises LogUnavailable. May be called twice."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            if self._call is not None:
                self._call.cancel()
            self._error = self._error or LogUnavailable(f"the cursor of {self.stream} is closed")
            self._cond.notify_all()
        self._thread.join(5.0)
        self._over()

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._cond:
                if self._closed:
                    return
                source = _Source(self._address)
                self._below_step = source.below_step
                request = log_pb2.ReadRequest(
                    job=self._job,
                    stream=self.stream,
                    from_step=self._from_step,
                    from_sequence=self._next_sequence,
                    follow=True,
                    share=_share_message(self._share),
                    cold=source.cold,
                    near=self._near,
                )
                # With other copies left, the call does not wait for a server to come back.
                read = self._copies[0][1]
                call = self._call = read(request, wait_for_ready=len(self._copies) == 1)
            arrivals = _Arrivals(stream_tag(self._job, self.stream))
            try:
                for message in call:
                    self._keep_all(arrivals.frames(message))
                if source.cold and not self._next_copy(RecordMissing(f"{self._address} ends"), refused=True):
                    return
            except grpc.RpcError as error:
                if not self._retry(error):
                    return
            except (SwiftError, OSError) as error:
                call.cancel()
                if isinstance(error, OSError) or arrivals.are_lent:
                    self._near = False  # the server reads it, and says what is wrong
                elif not self._next_copy(error, refused=True):
                    return
            finally:
                arrivals.close()
            with self._cond:
                self._cond.wait_for(lambda: self._closed, _RETRY_S)

    def _keep_all(self, frames: Iterable[tuple[FrameHeader, list[memoryview]]]) -> None:
        try:
            for header, parts in frames:
                self._keep(header, parts)
                with self._cond:
                    self._cond.wait_for(
                        lambda: self._closed or self._waiting > 0 or self._held_bytes < self._prefetch_bytes
                    )
                    if self._closed:
                        return
        except FrameIncomplete as error:
            raise RecordCorrupt(f"{self.stream}: {error}") from None

    def _keep(self, header: FrameHeader, parts: list[memoryview]) -> None:
        if self._share is not None and not self._share.has(header.key):  # an older server sends everything
            with self._cond:
                self._next_sequence = header.sequence + 1
            return
        frame = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        record = decode_body(header, frame[header.header_bytes :])
        with self._cond:
            if record.key.step >= self._below_step:
                pass  # its server has gone on after it was given up
            elif record.key.slot == MARK_SLOT:
                self._marks.append(record.key)
            elif record.key.step >= self._from_step and self._is_new(record):
                self._records[record.key] = record
                self._held_bytes += record.body.nbytes
            self._next_sequence = record.sequence + 1
            self._cond.notify_all()

    def _retry(self, error: grpc.RpcError) -> bool:
        """Handles a failed call. Returns whether to read on, from the same copy or from the next one."""
        reason = reason_of(error)
        with self._cond:
            if self._closed:
                return False
            self._trouble = f"log server {self._address}: {message_of(error)}"
        # Only members of the job read, so the token was valid once: a newer one may not be in the file yet.
        if reason == Reason.UNAUTHENTICATED or (reason == Reason.DENIED and self._next_sequence):
            return True
        lost = reason in ("", Reason.BUSY, Reason.DRAINING) and code_of(error) in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.UNKNOWN,
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        return self._next_copy(as_error(self._address, error), refused=not lost)

    def _next_copy(self, error: SwiftError, *, refused: bool) -> bool:
        """Switches to the next copy. Keeps the same one if it is the only one and did not refuse. Returns False, with
        the error set, if no copy is left."""
        with self._cond:
            left = self._copies.pop(0)
            if not refused:  # without a part that was moved the rest is of no use
                self._copies.insert(0 if _Source(left[0]).cold else len(self._copies), left)
            if not self._copies:
                self._error = error
                self._cond.notify_all()
                return False
            address = self._address
            if address != left[0]:
                self._next_sequence = 0  # sequences differ between servers
        if address != left[0]:
            events.emit(
                "copy_changed", stream=self.stream, address=address, instead_of=left[0], reason=str(error)
            )
        return True

    def _is_new(self, record: Record) -> bool:
        """Returns whether the record's key is new. Raises RecordCorrupt if an earlier copy had another record there."""
        before = self._seen.setdefault(record.key, record.digest)
        if before is record.digest:
            return True
        if before != record.digest:
            raise RecordCorrupt(
                f"{self.stream} {record.key} differs between its copies ({before.hex()}; on {self._address} "
                f"{record.digest.hex()})"
            )
        return False

    @property
    def _address(self) -> str:
        return self._copies[0][0]


def _share_message(share: ReadFilter | None) -> log_pb2.Share | None:
    if share is None:
        return None
    return log_pb2.Share(below_step=share.below_step, first=share.first, behind=share.behind, of=share.of)


def _read_call(channel: grpc.Channel) -> "grpc.UnaryStreamMultiCallable[log_pb2.ReadRequest, bytes]":
    call: grpc.UnaryStreamMultiCallable[log_pb2.ReadRequest, bytes] = channel.unary_stream(
        method("Read"),
        request_serializer=log_pb2.ReadRequest.SerializeToString,
        response_deserializer=None,
    )
    return call

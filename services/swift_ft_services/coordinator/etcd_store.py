"""EtcdStore: the rows of all jobs in etcd (API v3), for several coordinators, one of which holds them.

Below the store's prefix::

    hold          the holder's address, under its lease: whoever creates this key holds the store
    head          the newest transaction: {"revision", "staged"}; every transaction changes it
    rows/KEY\\0N   part N of a value; the first one begins with the number of its parts
    staged/N      a part of a transaction that is too large for one request, as etcd's own TxnRequest

A commit is one etcd transaction. Its conditions: `hold` is still the key that this holder has created, and `head` is as
this holder has left it. So a holder that has lost its lease commits nothing, whatever it believes, and an attempt that
is repeated because its answer was lost is made once.

A transaction that is too large is staged first; then one etcd transaction, the commit, writes in `head` how many parts
there are, and they are applied. A holder that finds staged parts in `head` applies them first, as often as it takes.

Answers are only given while the lease has not run out by the clock of this process, which began to count before etcd
did. A holder that was paused or cut off is silent until it knows better.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from swift_ft import events
from swift_ft._pb import etcd_pb2 as pb
from swift_ft._pb import etcd_pb2_grpc as pb_grpc
from swift_ft.credentials import Credentials, open_channel_on_loop
from swift_ft.errors import UsageError
from swift_ft.text import one_line
from swift_ft_services.coordinator.store import StoreConflict, StoreFailed, StoreHeld

LEASE_S = 3
"""A holder that is silent for so long has lost the store."""
RENEW_S = 0.75
"""Seconds between two renewals, and for which one waits for its answer before it asks the next member."""
ATTEMPT_S = 1.0
"""Seconds for which a call waits for a member; twice as long after each that was too short, as on a slow network."""
PAUSE_S = 0.05
UNHEARD_S = 30.0
"""Seconds without an answer from any member after which a call that waits for no lease fails."""
OPS_MAX = 96
"""Of one request; etcd allows 128 (--max-txn-ops)."""
BYTES_MAX = 1 << 20
"""Of one request; etcd allows 1.5 MiB (--max-request-bytes)."""
PART_BYTES = 1 << 18
"""Of a value."""
PAGE = 16
"""Rows of one answer, which may take an attempt's time."""
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.min_reconnect_backoff_ms", 1000),
)
_ASKED_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


@dataclass(kw_only=True, slots=True)
class _Held:
    """A lease, and the key that stands for it."""

    lease: int
    created: int = 0
    """`create_revision` of the key `hold`."""
    until: float = 0.0
    """Monotonic time until which etcd keeps the lease at least."""
    lost: str = ""
    """Why the store is not held any more."""


class EtcdStore:
    """As `MetadataStore`. Everything runs on the loop that called `hold`.

    `hold` can be called again once the store is lost."""

    def __init__(
        self,
        members: Sequence[str],
        prefix: str,
        credentials: Credentials,
        *,
        name: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members`: HOST:PORT of etcd's members. `name`: returns the address at which this coordinator serves."""
        self._members = list(members)
        self._where = f"etcd {','.join(members)}"
        self._prefix = prefix.encode() + b"/"
        self._credentials = credentials
        self._name = name
        self._clock = clock
        self._at = 0
        """The member that is asked now."""
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._held: _Held | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._head = (0, 0)
        """(revision, `mod_revision`) of the newest transaction."""
        self._parts: dict[str, int] = {}
        """Key -> the number of its parts."""
        self._turn = asyncio.Lock()

    # --- the interface ---

    async def hold(self) -> None:
        """As `MetadataStore.hold`. The error names the holder's address."""
        if self._held is not None:
            await self._release()
        if held_by := await self._range(self._key("hold"), limit=1):  # who stands by writes nothing
            raise self._held_elsewhere(held_by[0])
        began = self._clock()
        granted = await self._call("Lease", "LeaseGrant", pb.LeaseGrantRequest(TTL=LEASE_S))
        held = _Held(lease=granted.ID, until=began + granted.TTL)
        key = self._key("hold")
        mine = pb.PutRequest(key=key, value=self._name().encode(), lease=held.lease)
        free = pb.Compare(key=key, target=pb.Compare.CREATE, create_revision=0)
        there = pb.RequestOp(request_range=pb.RangeRequest(key=key))
        asked = pb.TxnRequest(
            compare=[free], success=[pb.RequestOp(request_put=mine), there], failure=[there]
        )
        # Repeated after a lost answer, it finds the key under this lease.
        reply = await self._call("KV", "Txn", asked)
        (found,) = reply.responses[-1].response_range.kvs or [pb.KeyValue()]
        if not reply.succeeded and found.lease != held.lease:
            with contextlib.suppress(StoreFailed):
                await self._call(
                    "Lease", "LeaseRevoke", pb.LeaseRevokeRequest(ID=held.lease), limit_s=ATTEMPT_S
                )
            raise self._held_elsewhere(found)
        held.created = found.create_revision
        self._held = held
        self._renewing = asyncio.create_task(self._renew(held))
        try:
            await self._begin()
        except BaseException:
            await self._release()
            raise

    def _held_elsewhere(self, found: pb.KeyValue) -> StoreHeld:
        holder = one_line(found.value.decode(errors="replace"))
        return StoreHeld(f"{self._where}: another coordinator uses it, {holder}")

    async def read(self, prefix: str = "") -> dict[str, str]:
        async with self._turn:
            rows = await self._read(self._key(f"rows/{prefix}"))
        found: dict[str, str] = {}
        parts: dict[str, list[bytes]] = {}
        for key, part in rows:
            parts.setdefault(key, []).append(part)
        for key, pieces in sorted(parts.items()):
            count, _, first = pieces[0].partition(b"\n")
            if count != b"%d" % len(pieces):
                raise StoreFailed(f"{self._where}: the value of {key} is damaged: parts of it are missing")
            found[key] = b"".join([first, *pieces[1:]]).decode(errors="replace")
            self._parts[key] = len(pieces)
        return found

    async def commit(self, puts: Mapping[str, str], deletes: Collection[str] = ()) -> None:
        held = self._held
        async with self._turn:
            # If it was held anew meanwhile, the caller knows only what was there before.
            if held is None or held is not self._held:
                raise StoreConflict(f"{self._where}: the store is not held")
            revision = self._head[0] + 1
            parts, operations = self._operations(puts, deletes)
            groups = list(_grouped(operations))
            if len(groups) == 1:
                await self._advance(revision, 0, groups[0])
            else:
                await self._stage(revision, groups)
            for key in deletes:
                self._parts.pop(key, None)
            self._parts |= parts

    def holds(self) -> bool:
        """As `MetadataStore.holds`."""
        held = self._held
        if held is not None and held.lost:
            raise StoreConflict(f"{self._where}: {held.lost}: another coordinator may hold the store")
        return held is not None and self._clock() < held.until

    async def close(self) -> None:
        """Gives the store up at once: the next holder does not wait for the lease's end."""
        await self._release()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _release(self) -> None:
        held = self._held
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
            self._renewing = None
        if held is None:
            return
        was_lost, held.lost = held.lost, held.lost or "it was given up"
        async with self._turn:  # a commit under way ends with this hold, not with the next one
            self._held = None
        if not was_lost:
            with contextlib.suppress(StoreFailed):
                await self._call(
                    "Lease", "LeaseRevoke", pb.LeaseRevokeRequest(ID=held.lease), limit_s=ATTEMPT_S
                )

    # --- the lease ---

    async def _renew(self, held: _Held) -> None:
        while not held.lost:
            began = self._clock()
            try:
                left_s = await self._keep_alive(held.lease)
            except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError, UsageError):
                # A call that ended while it was written to; certificates that are half written.
                self._next_member(self._at)
                await asyncio.sleep(PAUSE_S)
                continue
            if left_s <= 0:
                self._lose("its lease has ended")
                return
            held.until = max(held.until, began + left_s)
            await asyncio.sleep(max(0.0, began + RENEW_S - self._clock()))

    async def _keep_alive(self, lease: int) -> int:
        call = self._stub("Lease").LeaseKeepAlive(timeout=RENEW_S)
        try:
            await call.write(pb.LeaseKeepAliveRequest(ID=lease))
            await call.done_writing()
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise TimeoutError
            return int(reply.TTL)
        finally:
            call.cancel()

    def _lose(self, reason: str) -> None:
        if self._held is not None and not self._held.lost:
            self._held.lost = reason
            events.emit("store_lost", reason=reason)

    # --- transactions ---

    async def _begin(self) -> None:
        """(a new holder) Takes up where the one before has ended: applies what is staged, and removes leftovers."""
        (head,) = await self._range(self._key("head"), limit=1) or [pb.KeyValue()]
        staged = 0
        revision = 0
        if head.value:
            try:
                said = json.loads(head.value)
                revision, staged = int(said["revision"]), int(said["staged"])
            except (ValueError, KeyError, TypeError):
                raise StoreFailed(f"{self._where}: {self._key('head').decode()} is damaged") from None
        self._head = (revision, head.mod_revision)
        if staged:
            await self._apply(revision, staged)
        elif await self._range(self._key("staged/"), _end(self._key("staged/")), limit=1):
            await self._advance(revision, 0, [_delete(self._key("staged/"), _end(self._key("staged/")))])
        self._parts = {}
        await self.read()

    async def _stage(self, revision: int, groups: Sequence[Sequence[pb.RequestOp]]) -> None:
        for number, group in enumerate(groups):
            part = pb.TxnRequest(success=group).SerializeToString()
            await self._guarded([_put(self._key(f"staged/{number:08d}"), part)])
        await self._advance(revision, len(groups), [])
        await self._apply(revision, len(groups))

    async def _apply(self, revision: int, staged: int) -> None:
        """(after the commit) Carries its parts out. Repeated, it does the same again."""
        for number in range(staged):
            found = await self._range(self._key(f"staged/{number:08d}"), limit=1)
            if not found:
                raise StoreFailed(f"{self._where}: part {number} of transaction {revision} is missing")
            await self._guarded(list(pb.TxnRequest.FromString(found[0].value).success))
        await self._advance(revision, 0, [_delete(self._key("staged/"), _end(self._key("staged/")))])

    async def _advance(self, revision: int, staged: int, operations: Sequence[pb.RequestOp]) -> None:
        """Writes `head`, and carries the operations out with it, if nobody else has written it since."""
        key = self._key("head")
        content = json.dumps({"revision": revision, "staged": staged}).encode()
        held = self._held
        there = pb.RequestOp(request_range=pb.RangeRequest(key=key))
        asked = pb.TxnRequest(
            compare=[self._ours(), self._last()], success=[_put(key, content), *operations], failure=[there]
        )
        reply = await self._call("KV", "Txn", asked)
        if reply.succeeded:
            self._head = (revision, reply.header.revision)
            return
        (found,) = reply.responses[0].response_range.kvs or [pb.KeyValue()]
        if held is not None and found.value == content and await self._is_held(held):
            self._head = (revision, found.mod_revision)  # its first try was carried out, and the answer lost
            return
        self._lose("another coordinator has written to it")
        raise StoreConflict(f"{self._where}: another coordinator has taken the store over")

    async def _guarded(self, operations: Sequence[pb.RequestOp]) -> None:
        """Carries the operations out, perhaps twice, while the store is held and `head` is as it is now: an attempt
        that a paused member makes after its repetition must not undo a later transaction."""
        compare = [self._ours(), self._last()]
        if not (await self._call("KV", "Txn", pb.TxnRequest(compare=compare, success=operations))).succeeded:
            self._lose("another coordinator holds it")
            raise StoreConflict(f"{self._where}: another coordinator has taken the store over")

    async def _is_held(self, held: _Held) -> bool:
        found = await self._range(self._key("hold"), limit=1)
        return bool(found) and found[0].create_revision == held.created

    def _ours(self) -> pb.Compare:
        if self._held is None:
            raise StoreConflict(f"{self._where}: the store is not held")
        return pb.Compare(key=self._key("hold"), target=pb.Compare.CREATE, create_revision=self._held.created)

    def _last(self) -> pb.Compare:
        return pb.Compare(key=self._key("head"), target=pb.Compare.MOD, mod_revision=self._head[1])

    def _operations(
        self, puts: Mapping[str, str], deletes: Collection[str]
    ) -> tuple[dict[str, int], list[pb.RequestOp]]:
        """Returns the number of parts of each value that is put, and the operations."""
        parts: dict[str, int] = {}
        operations: list[pb.RequestOp] = []
        for key, value in puts.items():
            data = value.encode(errors="replace")
            pieces = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)] or [b""]
            pieces[0] = b"%d\n" % len(pieces) + pieces[0]
            operations += [_put(self._row_key(key, number), piece) for number, piece in enumerate(pieces)]
            parts[key] = len(pieces)
        for key in {*deletes, *puts}:
            gone = range(parts.get(key, 0), self._parts.get(key, 0))
            operations += [_delete(self._row_key(key, number)) for number in gone]
        return parts, operations

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _row_key(self, key: str, number: int) -> bytes:
        return self._key(f"rows/{key}\0{number:04d}")

    async def _read(self, first: bytes) -> list[tuple[str, bytes]]:
        rows = await self._range(first, _end(first))
        start = len(self._key("rows/"))
        return [(kv.key[start:].rpartition(b"\0")[0].decode(errors="replace"), kv.value) for kv in rows]

    async def _range(self, first: bytes, end: bytes = b"", limit: int = 0) -> list[pb.KeyValue]:
        """Returns all keys from `first` to before `end`, all of one moment."""
        found: list[pb.KeyValue] = []
        at = 0
        while True:
            asked = pb.RangeRequest(key=first, range_end=end, limit=limit or PAGE, revision=at)
            reply = await self._call("KV", "Range", asked)
            found += reply.kvs
            if limit or not reply.more:
                return found
            at, first = at or reply.header.revision, reply.kvs[-1].key + b"\0"

    # --- calls ---

    def _stub(self, service: str) -> Any:
        channel = self._channels.get(self._at)
        if channel is None:
            channel = open_channel_on_loop(self._members[self._at], OPTIONS, self._credentials)
            self._channels[self._at] = channel
        return getattr(pb_grpc, f"{service}Stub")(channel)

    def _next_member(self, after: int) -> None:
        if self._at == after:  # nobody else has moved on already
            self._at = (self._at + 1) % len(self._members)

    async def _call(self, service: str, method: str, request: Any, limit_s: float = UNHEARD_S) -> Any:
        """Makes the call at one member after the other until one answers. Raises StoreConflict once the store is lost
        meanwhile, StoreFailed for an error or if there is no answer for `limit_s`."""
        began, attempt_s = self._clock(), ATTEMPT_S
        while True:
            at = self._at
            try:
                return await getattr(self._stub(service), method)(request, timeout=min(limit_s, attempt_s))
            except grpc.RpcError as error:
                code, details = error.code(), one_line(error.details() or "")
                if code not in _ASKED_AGAIN:
                    raise StoreFailed(f"{self._where}: {code.name}: {details}") from None
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    attempt_s *= 2
            if self._held is not None and self._held.lost:
                raise StoreConflict(f"{self._where}: {self._held.lost}")
            if self._clock() - began > limit_s:
                raise StoreFailed(f"{self._where}: no answer for {limit_s:g} s: {details}")
            self._next_member(at)
            await asyncio.sleep(PAUSE_S)


def _put(key: bytes, value: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))


def _delete(key: bytes, end: bytes = b"") -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def _end(prefix: bytes) -> bytes:
    """Returns the first key after all keys with the prefix, which ends with no 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _grouped(operations: Sequence[pb.RequestOp]) -> Iterator[list[pb.RequestOp]]:
    """Yields the operations in groups, each small enough for one request."""
    group: list[pb.RequestOp] = []
    size = 0
    for operation in operations:
        more = operation.ByteSize()
        if group and (len(group) == OPS_MAX or size + more > BYTES_MAX):
            yield group
            group, size = [], 0
        group.append(operation)
        size += more
    yield group

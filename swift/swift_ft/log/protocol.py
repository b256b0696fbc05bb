"""The client side of a connection to one log server, and the mapping of its refusals to our errors."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import grpc

from swift_ft import credentials
from swift_ft.errors import (
    AccessDenied,
    JobSetApart,
    LogUnavailable,
    RecordCorrupt,
    RecordTrimmed,
    SequenceConflict,
    ServiceError,
    StaleGeneration,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift_ft.log.frame import BODY_BYTES_MAX, MESSAGE_BYTES, Bytes
from swift_ft.text import one_line

# Shared by client and server of the log: method names, reasons, channel options, frames outside protobuf.
#
# protobuf copies a ``bytes`` field on both sides. The one large field, ``frames``, is the last one of its message. So a
# sender joins tag, length and frames into the bytes that protobuf would produce, and a receiver slices them out.
# Everything else uses the generated code.

SERVICE = "swift.log.v1.Log"
REASON_KEY = "swift-reason"
VERSION_KEY = "swift-version"
"""Metadata key in a health answer: the server's version of swift-ft."""
MEMORY_KEY = "swift-memory"
"""Metadata key in a log server's health answer: the name of the socket that takes the memory of writers."""
TIME_KEY = "swift-time"
"""Metadata key in a health answer: the server's wall clock, in seconds since 1970."""

_FRAMES_TAG = 15 << 3 | 2  # field 15, length-delimited: one byte
_VARINT_BYTES_MAX = 10


class Reason(StrEnum):
    """Reason why a call was refused. More specific than the gRPC status code."""

    STALE_GENERATION = "stale-generation"
    NOT_GRANTED = "generation-not-granted"
    NOT_OPEN = "stream-not-open"
    GAP = "sequence-gap"
    CONFLICT = "conflict"
    CORRUPT = "corrupt"
    INVALID = "invalid"
    OVERSIZE = "oversize"
    TRIMMED = "trimmed"
    FULL = "disk-full"
    OVER_QUOTA = "over-quota"
    LIVES = "job-lives"
    UNKNOWN = "unknown-job"
    APART = "job-set-apart"
    """The job is quarantined: its files here are damaged. The server refuses it until it is dropped or restored."""
    BUSY = "busy"
    CLOSED = "closed"
    DRAINING = "draining"
    LIMIT = "limit"
    INTERNAL = "internal-error"
    """A bug. The server's log has the traceback."""
    UNAUTHENTICATED = "unauthenticated"
    DENIED = "denied"


class Fsync(StrEnum):
    ALWAYS = "always"
    """After fdatasync; appends that wait at the same time share one."""
    INTERVAL = "interval"
    """After the write; synced at intervals. A power cut loses at most one interval, a killed process loses no data."""
    NEVER = "never"
    """After the write; the kernel decides when to sync."""


def client_options(frame_bytes_max: int) -> list[tuple[str, int]]:
    """Returns channel options, by which a silently lost peer is detected within 20 s."""
    return [
        ("grpc.max_receive_message_length", frame_bytes_max + (1 << 20)),
        ("grpc.max_send_message_length", frame_bytes_max + (1 << 20)),
        # For so long may an attempt to connect take, on a busy machine or over a slow link.
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # of gRPC's own pings, which keepalive waits behind
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


CALLS_PER_CONNECTION = 16
"""Concurrent calls that a server accepts per connection; gRPC queues further ones. When a connection breaks, all its
calls end at once, which in Python takes 0.1 ms each and delays all other clients."""
MESSAGE_BYTES_MAX = MESSAGE_BYTES + (256 << 10)
"""Largest message that a server accepts; our clients send no larger one. Python converts a message to bytes while
holding the GIL, so large messages of one job delay the others."""


PINGS_TOO_SOON_MAX = 100
"""Pings in a row, without data in between, that a server tolerates. Clients ping every 10 s. A client that floods would
make gRPC queue answers without bound, so it loses its connection."""


def server_options() -> list[tuple[str, int]]:
    """Returns a server's options. gRPC refuses a message that declares a larger size before allocating memory for it,
    for any call."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # of gRPC's own pings, which keepalive waits behind
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", PINGS_TOO_SOON_MAX),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frames_message(parts: Iterable[Bytes], size: int) -> bytes:
    """Returns the encoded message whose only field is ``frames``, ``size`` bytes long. The join is the only copy."""
    return b"".join((bytes((_FRAMES_TAG,)), _varint(size), *parts))


def split_frames(message: bytes) -> memoryview | None:
    """Returns the frames of a message with no other field, without a copy. None for any other message, which protobuf
    must parse."""
    if not message or message[0] != _FRAMES_TAG:
        return None
    size = shift = 0
    for at in range(1, min(len(message), 1 + _VARINT_BYTES_MAX)):
        byte = message[at]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return memoryview(message)[at + 1 :] if len(message) == at + 1 + size else None
    return None


class Kind(NamedTuple):
    status: grpc.StatusCode
    error: type[SwiftError]
    """What the caller raises."""


KINDS: Mapping[str, Kind] = {
    Reason.STALE_GENERATION: Kind(grpc.StatusCode.FAILED_PRECONDITION, StaleGeneration),
    Reason.NOT_GRANTED: Kind(grpc.StatusCode.FAILED_PRECONDITION, StaleGeneration),
    Reason.NOT_OPEN: Kind(grpc.StatusCode.FAILED_PRECONDITION, ServiceError),
    Reason.GAP: Kind(grpc.StatusCode.OUT_OF_RANGE, SequenceConflict),
    Reason.CONFLICT: Kind(grpc.StatusCode.ALREADY_EXISTS, SequenceConflict),
    Reason.CORRUPT: Kind(grpc.StatusCode.DATA_LOSS, RecordCorrupt),
    Reason.INVALID: Kind(grpc.StatusCode.INVALID_ARGUMENT, UsageError),
    Reason.OVERSIZE: Kind(grpc.StatusCode.RESOURCE_EXHAUSTED, UsageError),
    Reason.TRIMMED: Kind(grpc.StatusCode.NOT_FOUND, RecordTrimmed),
    Reason.FULL: Kind(grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable),
    Reason.OVER_QUOTA: Kind(grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable),
    Reason.LIVES: Kind(grpc.StatusCode.FAILED_PRECONDITION, ServiceError),
    Reason.UNKNOWN: Kind(grpc.StatusCode.NOT_FOUND, UnknownJob),
    Reason.APART: Kind(grpc.StatusCode.DATA_LOSS, JobSetApart),
    Reason.BUSY: Kind(grpc.StatusCode.UNAVAILABLE, LogUnavailable),
    Reason.CLOSED: Kind(grpc.StatusCode.UNAVAILABLE, LogUnavailable),
    Reason.DRAINING: Kind(grpc.StatusCode.UNAVAILABLE, LogUnavailable),
    Reason.LIMIT: Kind(grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable),
    Reason.INTERNAL: Kind(grpc.StatusCode.INTERNAL, ServiceError),
    Reason.UNAUTHENTICATED: Kind(grpc.StatusCode.UNAUTHENTICATED, AccessDenied),
    Reason.DENIED: Kind(grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
}
"""How a call with this reason ends."""


def open_channel(address: str) -> grpc.Channel:
    """Returns a channel with this process's credentials. It connects, and reconnects, in the background."""
    return credentials.open_channel(address, client_options(BODY_BYTES_MAX))


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def _call(error: object) -> grpc.Call | None:
    """Returns the error as a call: the exception of a failed call is the call itself. None for other errors."""
    return error if isinstance(error, grpc.Call) else None


def reason_of(error: grpc.RpcError) -> str:
    """Returns the server's reason for a refusal; empty if it gave none, for example if it cannot be reached."""
    call = _call(error)
    for key, value in (call.trailing_metadata() if call is not None else None) or ():
        if key == REASON_KEY:
            return value if isinstance(value, str) else value.decode()
    return ""


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    call = _call(error)
    return call.code() if call is not None else grpc.StatusCode.UNKNOWN


def message_of(error: grpc.RpcError) -> str:
    call = _call(error)
    return one_line((call.details() if call is not None else "") or error)


def as_error(address: str, error: grpc.RpcError) -> SwiftError:
    reason = reason_of(error)
    kind = KINDS.get(reason)
    if kind is not None:
        return kind.error(message_of(error))
    code = code_of(error)
    if code is grpc.StatusCode.UNIMPLEMENTED or credentials.is_another_service(message_of(error)):
        return UsageError(f"at {address} is another service, not a log server")
    if code is grpc.StatusCode.UNAVAILABLE:
        return LogUnavailable(f"log server {address} cannot be reached: {message_of(error)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LogUnavailable(f"log server {address} did not answer in time")
    return ServiceError(f"log server {address}: {code.name}: {message_of(error)}")

"""The client side of a connection to one log server, and the mapping of its refusals to our errors."""

from collections.abc import Iterable
from enum import StrEnum

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
    """Reason why a call was refused: more specific than the gRPC status with which the call ends."""

    status: grpc.StatusCode
    error: type[SwiftError]
    """What the caller raises."""

    def __new__(cls, word: str, status: grpc.StatusCode, error: type[SwiftError]) -> "Reason":
        reason = str.__new__(cls, word)
        reason._value_, reason.status, reason.error = word, status, error
        return reason

    STALE_GENERATION = "stale-generation", grpc.StatusCode.FAILED_PRECONDITION, StaleGeneration
    NOT_GRANTED = "generation-not-granted", grpc.StatusCode.FAILED_PRECONDITION, StaleGeneration
    NOT_OPEN = "stream-not-open", grpc.StatusCode.FAILED_PRECONDITION, ServiceError
    GAP = "sequence-gap", grpc.StatusCode.OUT_OF_RANGE, SequenceConflict
    CONFLICT = "conflict", grpc.StatusCode.ALREADY_EXISTS, SequenceConflict
    CORRUPT = "corrupt", grpc.StatusCode.DATA_LOSS, RecordCorrupt
    INVALID = "invalid", grpc.StatusCode.INVALID_ARGUMENT, UsageError
    OVERSIZE = "oversize", grpc.StatusCode.RESOURCE_EXHAUSTED, UsageError
    TRIMMED = "trimmed", grpc.StatusCode.NOT_FOUND, RecordTrimmed
    FULL = "disk-full", grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable
    OVER_QUOTA = "over-quota", grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable
    LIVES = "job-lives", grpc.StatusCode.FAILED_PRECONDITION, ServiceError
    UNKNOWN = "unknown-job", grpc.StatusCode.NOT_FOUND, UnknownJob
    APART = "job-set-apart", grpc.StatusCode.DATA_LOSS, JobSetApart
    """The job is quarantined: its files here are damaged. The server refuses it until it is dropped or restored."""
    BUSY = "busy", grpc.StatusCode.UNAVAILABLE, LogUnavailable
    CLOSED = "closed", grpc.StatusCode.UNAVAILABLE, LogUnavailable
    DRAINING = "draining", grpc.StatusCode.UNAVAILABLE, LogUnavailable
    LIMIT = "limit", grpc.StatusCode.RESOURCE_EXHAUSTED, LogUnavailable
    INTERNAL = "internal-error", grpc.StatusCode.INTERNAL, ServiceError
    """A bug. The server's log has the traceback."""
    UNAUTHENTICATED = "unauthenticated", grpc.StatusCode.UNAUTHENTICATED, AccessDenied
    DENIED = "denied", grpc.StatusCode.PERMISSION_DENIED, AccessDenied


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
    reason = next((known for known in Reason if known == reason_of(error)), None)
    if reason is not None:
        return reason.error(message_of(error))
    code = code_of(error)
    if code is grpc.StatusCode.UNIMPLEMENTED or credentials.is_another_service(message_of(error)):
        return UsageError(f"at {address} is another service, not a log server")
    if code is grpc.StatusCode.UNAVAILABLE:
        return LogUnavailable(f"log server {address} cannot be reached: {message_of(error)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LogUnavailable(f"log server {address} did not answer in time")
    return ServiceError(f"log server {address}: {code.name}: {message_of(error)}")

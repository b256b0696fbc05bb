"""The client side of a connection to one log server, and how its refusals become our errors."""

import grpc

from swift.errors import (
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
from swift.log.frame import BODY_BYTES_MAX
from swift.log.wire import REASON_KEY, SERVICE, Reason, client_options
from swift.security import channel
from swift.words import one_line

_ERRORS: dict[str, type[SwiftError]] = {
    Reason.STALE_GENERATION: StaleGeneration,
    Reason.NOT_GRANTED: StaleGeneration,
    Reason.GAP: SequenceConflict,
    Reason.CONFLICT: SequenceConflict,
    Reason.CORRUPT: RecordCorrupt,
    Reason.TRIMMED: RecordTrimmed,
    Reason.INVALID: UsageError,
    Reason.OVERSIZE: UsageError,
    Reason.FULL: LogUnavailable,
    Reason.OVER_QUOTA: LogUnavailable,
    Reason.LIVES: ServiceError,
    Reason.UNKNOWN: UnknownJob,
    Reason.APART: JobSetApart,
    Reason.BUSY: LogUnavailable,
    Reason.CLOSED: LogUnavailable,
    Reason.DRAINING: LogUnavailable,
    Reason.LIMIT: LogUnavailable,
    Reason.INTERNAL: ServiceError,
    Reason.UNAUTHENTICATED: AccessDenied,
    Reason.DENIED: AccessDenied,
}


def open_channel(address: str) -> grpc.Channel:
    """Connects in the background, and again whenever the connection is lost; with this process's credentials."""
    return channel.open_channel(address, client_options(BODY_BYTES_MAX))


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def _call(error: object) -> grpc.Call | None:
    """What a failed call raises is the call itself."""
    return error if isinstance(error, grpc.Call) else None


def reason_of(error: grpc.RpcError) -> str:
    """The server's word for why it refused; empty if it did not, as when it cannot be reached."""
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
    """Our error for a failed call."""
    reason = reason_of(error)
    kind = _ERRORS.get(reason)
    if kind is not None:
        return kind(message_of(error))
    code = code_of(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return LogUnavailable(f"log server {address} cannot be reached: {message_of(error)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LogUnavailable(f"log server {address} did not answer in time")
    return ServiceError(f"log server {address}: {code.name}: {message_of(error)}")

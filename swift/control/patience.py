"""PatientLine: calls to the coordinator that are made again until it answers, through its restarts."""

import math
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

import grpc

from swift._pb import coordinator_pb2 as pb
from swift._pb import coordinator_pb2_grpc as pb_grpc
from swift.control.watcher import AWAY, Line, ViewWatcher, outcome
from swift.errors import (
    AccessDenied,
    Fenced,
    JobSetApart,
    JoinRefused,
    ServiceError,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift.security.advice import advised
from swift.security.channel import open_channel

Request = TypeVar("Request")
Reply = TypeVar("Reply")

# One attempt of a call. Long enough for a durable write on a slow disk, short against any patience.
ATTEMPT_TIMEOUT_S = 5.0
# Between attempts. The channel reconnects at most this often as well.
RETRY_PAUSE_S = 0.05
# ... where the coordinator says that it is asked too much; and how long whoever has no part in the job yet tries so.
LIMIT_PAUSE_S = 0.5
LIMIT_PATIENCE_S = 3.0
LAST_PATIENCE_S = 3.0

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # The time one attempt to connect may take; a refused one fails at once and waits for the backoff only.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A client that waits out a restart must not share its backoff with another one of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # The coordinator is named by address: a proxy for the outside world is never meant.
    ("grpc.enable_http_proxy", 0),
)

# Cancelled: by `close`, which is looked at then, or by a coordinator that stopped in the middle of the call.
_RETRIED = (*AWAY, grpc.StatusCode.CANCELLED)
_TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED
_NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class RankTaken(JoinRefused):
    """The rank has a live holder."""


class Unanswered(ServiceError):
    """Nobody has answered within the patience of a call. It may be made again."""


class PatientLine:
    """One job's line to its coordinator. Thread-safe.

    Errors of every call: ServiceError (Unanswered: nobody answered within `patience_s`; the message names the address.
    AccessDenied: it does not take this process's token), Fenced (this incarnation no longer holds its rank), UsageError
    (the call makes no sense: a bug or bad input).

    `tell` gets a line for people at once when nobody answers, though it is tried again, and when somebody does.
    """

    def __init__(
        self,
        address: str,
        job: str,
        *,
        patience_s: float = 60.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address = address
        self.job = job
        self.patience_s = patience_s
        self.member: pb.Member | None = None
        self.renewed_at = -math.inf
        """When this rank last began to say what renews its lease besides heartbeats; monotonic seconds."""
        self._line = Line(address, tell)
        self._channel = open_channel(address, CHANNEL_OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._closed = threading.Event()
        self._watchers: list[ViewWatcher] = []
        self._sent: object = None
        """The last call for whose answer nobody waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watchers and calls under way (they raise ServiceError)."""
        self._closed.set()
        for watcher in self._watchers:
            watcher.close()
        self._channel.close()

    @property
    def forgotten(self) -> str:
        """What is said where the job has run already, and nobody knows it."""
        return (
            f"the coordinator at {self.address} does not know job {self.job} any more: it runs on another --directory, "
            "or on one that was emptied; start it on the job's own, and then the job again"
        )

    @property
    def _let_in(self) -> bool:
        return self.member is not None or any(watcher.latest is not None for watcher in self._watchers)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        refused: type[SwiftError] = Fenced,
        patience_s: float | None = None,
    ) -> Reply:
        begun = time.monotonic()
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline = begun + patience_s
        while True:
            remaining_s, pause_s = deadline - time.monotonic(), RETRY_PAUSE_S
            try:
                reply = method(request, timeout=max(0.05, min(ATTEMPT_TIMEOUT_S, remaining_s)))
                self._line.came()
                return reply
            except grpc.RpcError as error:
                code, details = outcome(error)
                # Whoever was let in once had a good token: a newer one may be on its way into the file.
                if code not in _RETRIED and not (code in _NOT_ALLOWED and self._let_in) and code != _TOO_MUCH:
                    raise self._translated(code, details, refused) from None
                if (
                    code == _TOO_MUCH
                ):  # a limit, of calls a second for example: no reason to end a job that runs
                    pause_s = LIMIT_PAUSE_S
                    if not self._let_in:
                        deadline = min(deadline, begun + LIMIT_PATIENCE_S)
                if time.monotonic() + pause_s >= deadline:
                    if code in _NOT_ALLOWED or code == _TOO_MUCH:
                        raise self._translated(code, details, refused) from None
                    raise Unanswered(
                        f"no answer from the coordinator at {self.address} within {patience_s:g} s: "
                        + advised(self.address, details)
                    ) from None
                if code in AWAY and not self._closed.is_set():
                    self._line.went(details)
            except ValueError:  # grpc's word for a closed channel
                raise ServiceError(f"the line to the coordinator at {self.address} was closed") from None
            if self._closed.wait(pause_s):
                raise ServiceError(f"the line to the coordinator at {self.address} was closed")

    def _send(self, method: "grpc.UnaryUnaryMultiCallable[Request, Reply]", request: Request) -> None:
        """One attempt, for whose answer nobody waits."""
        try:
            # grpc cancels a call that nobody holds.
            self._sent = method.future(request, timeout=ATTEMPT_TIMEOUT_S)
        except ValueError:  # grpc's word for a closed channel
            raise ServiceError(f"the line to the coordinator at {self.address} was closed") from None

    def _translated(self, code: grpc.StatusCode, details: str, refused: type[SwiftError]) -> SwiftError:
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return refused(details)
        if code in _NOT_ALLOWED:
            return AccessDenied(f"the coordinator at {self.address}: {details}")
        if code == grpc.StatusCode.ALREADY_EXISTS:
            return RankTaken(details)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(details)
        if code == grpc.StatusCode.NOT_FOUND and self._let_in:
            return UnknownJob(self.forgotten)
        if code == grpc.StatusCode.DATA_LOSS:
            return JobSetApart(details)
        if code == grpc.StatusCode.NOT_FOUND:
            return UnknownJob(f"{details}: swift-ft jobs lists those that there are")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return UsageError(f"at {self.address} is another service, not a coordinator")
        return ServiceError(f"the coordinator at {self.address}: {code.name}: {details}")

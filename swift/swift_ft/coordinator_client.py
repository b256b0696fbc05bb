"""CoordinatorClient: every call to the coordinator, retried through its restarts.

(every rank)   client = CoordinatorClient(address, job); watcher = client.watch()
               client.join(pb.JoinRequest(member=make_member(rank), ...))
               client.call(pb.ReadyRequest(...))                           state FORMING
               client.call(pb.HeartbeatRequest(version=...))               HeartbeatReply.interval_s after `renewed_at`
               client.call(pb.CheckpointRequest(version=...))              every K steps
               client.call(pb.ReportRequest(generation=..., ...))          state PLANNING
               client.call(pb.ReadyRequest(...)), or pb.RefuseRequest      state RECOVERING
               client.call(pb.ShareRequest(...))                           while groups are built
               client.call(pb.FinishRequest(version=...))                  state RUNNING, after the last step
(launcher)     client.call(pb.MeetRequest(...)), pb.ExitRequest, pb.FailRequest, ...
(anyone)       client.status(); client.watch()

`coordinator.proto` says what each request means. The client adds the job and, where a rank makes the call, the member
that was passed to `join`. All calls are idempotent, so they are retried while the coordinator restarts. Once a call is
answered, it is durable at the coordinator.
"""

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.coordinator_messages import CALLS, applied, state_name
from swift_ft.credentials import AWAY, advice, advised, is_another_service, open_channel
from swift_ft.errors import (
    AccessDenied,
    Fenced,
    JobSetApart,
    JoinRefused,
    ServiceError,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift_ft.text import one_line

Request = TypeVar("Request")
Reply = TypeVar("Reply")

# Timeout of one attempt. Long enough for a durable write on a slow disk, short compared with any `patience_s`.
ATTEMPT_TIMEOUT_S = 5.0
# Pause between attempts. The channel reconnects at most this often as well.
RETRY_PAUSE_S = 0.05
# Pause after RESOURCE_EXHAUSTED; and how long a client that is not part of the job yet retries after it.
LIMIT_PAUSE_S = 0.5
LIMIT_PATIENCE_S = 3.0

CHANNEL_OPTIONS = (
    # Timeout of one connection attempt; a refused one fails at once and waits for the backoff only.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# CANCELLED comes from `close` (then `_closed` is set), or from a coordinator that stopped during the call.
_RETRIED = (*AWAY, grpc.StatusCode.CANCELLED)
_TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED
_NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


# A job's View, watched by whoever needs the newest.


def outcome(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Returns code and details of a failed call. A raised RpcError is also a Call, which grpc's types do not show."""
    call = cast("grpc.Call", error)
    return call.code(), one_line(call.details() or "")


class Line:
    """State of the connection to the coordinator. Reports each change once, as a human-readable line. Thread-safe."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self._address = address
        self._tell = tell
        self._lock = threading.Lock()
        self._is_down = False
        self._missed = 0
        """Calls in a row that were not answered."""

    def went(self, details: str) -> None:
        """Records that a call was not answered. `details`: grpc's text; its part after the last ": " is the cause. Of
        several coordinators all but one stand by, so that is reported only once each was asked."""
        with self._lock:
            self._missed += 1
            if self._missed <= self._address.count(","):
                return
            news, self._is_down = not self._is_down, True
        if news:
            why = details.rpartition(": ")[2].strip() or "no reason given"
            more = advice(self._address, details or why)
            why = f"{why}; {more}" if more else why
            self._tell(f"the coordinator at {self._address} does not answer ({why}): trying again")

    def came(self) -> None:
        with self._lock:
            news, self._is_down, self._missed = self._is_down, False, 0
        if news:
            self._tell(f"the coordinator at {self._address} answers again")


def newer(view: pb.View, than: pb.View | None) -> bool:
    """Returns whether `view` is newer than `than`, by (generation, revision). Both numbers are durable before a View is
    published."""
    return than is None or (view.generation, view.revision) > (than.generation, than.revision)


class ViewWatcher:
    """A daemon thread that follows the View of one job, through restarts of the coordinator, until closed.

    `latest` is the newest View seen. Callbacks run in the watcher's thread, one View at a time and in order;
    Views may be skipped, but never the newest. A callback must not raise: if it does, the watcher ends and
    `wait_for` raises ServiceError.
    """

    def __init__(
        self,
        stub: pb_grpc.CoordinatorStub,
        line: Line,
        address: str,
        job: str,
        *callbacks: Callable[[pb.View], None],
        rank: int | None = None,
    ) -> None:
        """`rank`: the watching rank. It is not sent what only other ranks need. None: an operator or a launcher."""
        self.latest: pb.View | None = None
        self._stub = stub
        self._line = line
        self._address = address
        self._job = job
        self._rank = rank
        self._callbacks = list(callbacks)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._ended = ""  # why the thread has ended
        self._problem = ""  # why the last attempt failed
        self._stream: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"view-watcher-{job}", daemon=True)
        self._thread.start()

    def subscribe(self, callback: Callable[[pb.View], None]) -> None:
        """Passes every newer View to `callback` from now on. Check `latest` afterwards: a View may already be there."""
        with self._changed:
            self._callbacks.append(callback)

    def wait_for(self, predicate: Callable[[pb.View], bool], timeout_s: float | None) -> pb.View:
        """Returns the first View (the latest included) that satisfies `predicate`. Raises ServiceError after
        `timeout_s`, or once the watcher has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.latest is not None and predicate(self.latest):
                    return self.latest
                if self._ended:
                    raise ServiceError(self._ended)
                remaining_s = None if deadline is None else deadline - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise ServiceError(f"waited {timeout_s:g} s for job {self._job}: {self._where()}")
                self._changed.wait(remaining_s)

    def close(self) -> None:
        """Ends the thread and waits for it, unless called from a callback."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _where(self) -> str:
        if self.latest is None:
            return f"no view of it from the coordinator at {self._address} {self._problem}".rstrip()
        view = self.latest
        waiting = f", waiting for {view.waiting_for}" if view.waiting_for else ""
        state = state_name(view.state)
        return f"{state} in generation {view.generation}{waiting} {self._problem}".rstrip()

    def _run(self) -> None:
        ended = f"a callback of the watcher of job {self._job} failed"
        try:
            while not self._closed.is_set():
                self._follow()
                self._closed.wait(RETRY_PAUSE_S)
            ended = f"the watcher of job {self._job} was closed"
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()

    def _follow(self) -> None:
        try:
            self._stream = self._stub.Watch(pb.WatchRequest(job=self._job, rank=self._rank))
            if self._closed.is_set():
                self._stream.cancel()
            known: pb.View | None = None
            for update in self._stream:
                self._problem = ""
                self._line.came()
                known = applied(update, known)
                if known is None:  # a new stream begins with the whole View
                    self._stream.cancel()
                    return
                self._accept_view(known)
        except grpc.RpcError as error:
            code, details = outcome(error)
            self._problem = f"({details})"
            if code in AWAY and not self._closed.is_set():
                self._line.went(details)
        except ValueError:  # grpc's word for a closed channel
            self._closed.set()

    def _accept_view(self, view: pb.View) -> None:
        with self._changed:
            if self._closed.is_set() or not newer(view, self.latest):
                return
            self.latest = view
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(view)


# Calls.


class RankTaken(JoinRefused):
    """Refusal of a Join because the rank still has a live holder."""


class Unanswered(ServiceError):
    """Error of a call that was not answered within its `patience_s`. The call may be made again."""


_ALSO_OF_OTHERS = (pb.AskCheckpointRequest, pb.FailRequest, pb.ShareRequest)
"""Requests that a process makes as a rank once it has joined, and that others make too."""


def make_member(rank: int) -> pb.Member:
    """Returns this process as the holder of `rank`, with a new incarnation on each call."""
    return pb.Member(rank=rank, incarnation=uuid.uuid4().hex, pid=os.getpid(), host=socket.gethostname())


class CoordinatorClient:
    """Connection of one job to its coordinator. Thread-safe.

    Errors of every call: ServiceError (Unanswered: no answer within `patience_s`; the message names the address.
    AccessDenied: the coordinator rejects this process's token), Fenced (this incarnation no longer holds its rank),
    UsageError (an invalid call: a bug or bad input).

    `tell` receives a human-readable line when the first attempt fails, though it is retried, and when answers resume.
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
        """Start of this rank's last call, other than heartbeats, that renewed its lease; monotonic seconds."""
        self._line = Line(address, tell)
        self._channel = open_channel(address, CHANNEL_OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._closed = threading.Event()
        self._watchers: list[ViewWatcher] = []
        self._was_answered = False
        self._sent: object = None
        """Last call that was sent without waiting for its answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watchers and the calls in progress, which raise ServiceError."""
        self._closed.set()
        for watcher in self._watchers:
            watcher.close()
        self._channel.close()

    @property
    def forgotten(self) -> str:
        """Error message for a job that has run before and that the coordinator no longer knows."""
        return (
            f"the coordinator at {self.address} does not know job {self.job} any more: it runs on another --directory, "
            "or on one that was emptied; start it on the job's own, and then the job again"
        )

    def join(self, request: pb.JoinRequest, *, takeover_s: float = 15.0) -> int:
        """Makes this process the holder of the rank of `request.member`. Returns the job's generation.

        Raises JoinRefused, with the coordinator's message, if fingerprint or configuration differ from the job's, or
        if the rank still has a live holder after `takeover_s`.

        A replacement may join before the coordinator knows that its predecessor is dead. The coordinator learns that
        from the launcher or from the expired lease, so `takeover_s` should be longer than the lease.
        """
        request.job = self.job
        deadline = time.monotonic() + takeover_s
        while True:
            try:
                reply = self._call(self._stub.Join, request, refused=JoinRefused)
                break
            except RankTaken as error:
                if time.monotonic() > deadline or self._closed.wait(RETRY_PAUSE_S):
                    raise JoinRefused(str(error)) from None
        self.member = request.member
        return reply.generation

    def call(self, request: Any, *, patience_s: float | None = None, waits: bool = True) -> Any:
        """Makes the call that takes this request, and returns its reply. Sets the request's job and, where a rank makes
        the call, its rank and incarnation. Raises UsageError for a call of ranks before `join`.

        `waits`: waits for the answer. Without it, a lost or refused call goes unnoticed.
        """
        request.job = self.job
        # Of all requests with an incarnation, only this one is about another process.
        of_rank = hasattr(request, "incarnation") and not isinstance(request, pb.ExitRequest)
        if of_rank and self.member is not None:
            request.rank, request.incarnation = self.member.rank, self.member.incarnation
        elif of_rank and not isinstance(request, _ALSO_OF_OTHERS):
            raise UsageError("join the job before you make calls as one of its ranks")
        method = getattr(self._stub, CALLS[request.DESCRIPTOR.name])
        if not waits:
            return self._send(method, request)
        begun = time.monotonic()
        reply = self._call(method, request, patience_s=patience_s)
        if isinstance(request, pb.ReportRequest | pb.ReadyRequest):
            self.renewed_at = begun
        return reply

    def status(self, *, history: bool = False) -> pb.StatusReply:
        """Returns the View, with every rank's lease, version and suspicions, and with the job's history if wanted."""
        reply: pb.StatusReply = self.call(pb.StatusRequest(history=history))
        return reply

    def jobs(self) -> pb.JobsReply:
        """Returns the coordinator's jobs that this process's token gives access to. Ignores the client's own job."""
        return self._call(self._stub.Jobs, pb.JobsRequest())

    def watch(self, *callbacks: Callable[[pb.View], None]) -> ViewWatcher:
        """Returns a running watcher of this job's View. `callbacks` are subscribed before the first View arrives."""
        rank = None if self.member is None else self.member.rank
        watcher = ViewWatcher(self._stub, self._line, self.address, self.job, *callbacks, rank=rank)
        self._watchers.append(watcher)
        return watcher

    # --- ---

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
                self._was_answered = True
                return reply
            except grpc.RpcError as error:
                code, details = outcome(error)
                if is_another_service(details):
                    code = grpc.StatusCode.UNIMPLEMENTED
                # A client that was admitted once had a valid token: a newer one may not be in the file yet.
                outdated = (code in _NOT_ALLOWED and self._let_in) or (
                    code == grpc.StatusCode.UNAUTHENTICATED and self._was_answered
                )
                if code not in (*_RETRIED, _TOO_MUCH) and not outdated:
                    raise self._translated(code, details, refused) from None
                if (
                    code == _TOO_MUCH
                ):  # a limit, of calls per second for example: not a reason to end a running job
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
        """Sends one attempt of a call and does not wait for the answer."""
        try:
            # grpc cancels a call that is no longer referenced.
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

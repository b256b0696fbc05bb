"""The gate in front of a service: token, role, job and generation of every call, and how many there are.

(interceptor)  `Gate.admit`: token and role, from the call's metadata, before a message is read
(handler)      `Visit.enter`: the number of calls of this peer; then the request is parsed here, so that bytes that
               are none get INVALID_ARGUMENT, and its job and generation are compared with the token's. A token that
               is bound to a generation is good while the job is there: `Gate.generation_of`
(streams)      `Visit.check` for every Open; `Visit.still_good` for every message: a token that has expired, was
               revoked or is bound to a generation that is over ends the call

What is refused looks the same whether the job is there or not: nothing was looked up yet.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from swift import events
from swift.log.wire import REASON_KEY, Reason
from swift.security.channel import AUTHORIZATION, BEARER
from swift.security.roles import MAY_CALL
from swift.security.tokens import EVERY_JOB, Authority, Grant, NotAuthenticated

HEALTH = "/grpc.health.v1.Health/"
_EVENT_EVERY_S = 1.0

Metadata = Sequence[tuple[str, "str | bytes"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    per_peer: int = 256
    """Calls of one kind (see `services.security.lanes`) under way from one address."""
    request_bytes_max: int = 1 << 20
    """Of a call that sends one message."""


class Denied(Exception):
    """The call is refused. Holds nothing of the token."""

    def __init__(self, code: grpc.StatusCode, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return ((REASON_KEY, self.reason.value),)


def _unauthenticated(why: str) -> Denied:
    return Denied(grpc.StatusCode.UNAUTHENTICATED, Reason.UNAUTHENTICATED, why)


_NOT_ALLOWED = "the token does not allow this: it is of another job or role"


def _left_behind(bound: int) -> str:
    """What the bearer's own token says, and nothing of what the server has."""
    return (
        f"the token is bound to generation {bound}, which this is not: put one that is not bound into its file "
        "(swift-ft token without --generation)"
    )


class Gate:
    """One for each server. Without an authority everybody may do everything. Thread-safe."""

    def __init__(
        self, authority: Authority | None, limits: CallLimits | None = None, shown: str = ""
    ) -> None:
        self.limits = limits or CallLimits()
        self.shown = shown
        self._authority = authority
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._said_at = -_EVENT_EVERY_S
        self._unsaid = 0
        self.on_denied: Callable[[str], None] = lambda reason: None
        """(whatever thread) Is told why, each time."""
        self.generation_of: Callable[[str], int] = lambda job: 0
        """(whatever thread) The generation that the job is in; 0: nobody knows the job."""

    def admit(self, method: str, metadata: Metadata) -> "Visit":
        """Raises Denied: no token that counts here, or one whose roles may not call this."""
        if self._authority is None:
            return Visit(self, method, "")
        visit = Visit(self, method, _bearer(metadata))
        if not visit.grant().roles & MAY_CALL.get(method, frozenset()):
            raise self.noted(method, Denied(grpc.StatusCode.PERMISSION_DENIED, Reason.DENIED, _NOT_ALLOWED))
        return visit

    def grant(self, method: str, token: str) -> Grant:
        assert self._authority is not None
        if not token:
            raise self.noted(method, _unauthenticated("a token is needed: name its file in SWIFT_TOKEN_FILE"))
        try:
            return self._authority.grant(token)
        except NotAuthenticated as error:
            raise self.noted(method, _unauthenticated(str(error))) from None

    @property
    def is_open(self) -> bool:
        return self._authority is None

    def noted(self, method: str, denied: Denied) -> Denied:
        """Leaves an event, one a second at most: a flood of refusals is not to become a flood of lines."""
        self.on_denied(denied.reason.value)
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _EVENT_EVERY_S:
                self._unsaid += 1
                return denied
            self._said_at = now
            unsaid, self._unsaid = self._unsaid, 0
        events.emit("denied", call=method, reason=denied.reason.value, others=unsaid)
        return denied

    def came(self, peer: str, kind: str) -> bool:
        with self._lock:
            if self._calls[kind, peer] >= self.limits.per_peer:
                return False
            self._calls[kind, peer] += 1
            return True

    def went(self, peer: str, kind: str) -> None:
        with self._lock:
            self._calls[kind, peer] -= 1
            if self._calls[kind, peer] <= 0:
                del self._calls[kind, peer]


class Visit:
    """One call that was admitted."""

    def __init__(self, gate: Gate, method: str, token: str) -> None:
        self._gate = gate
        self._method = method
        self._token = token
        self._peer = self._kind = ""
        self._jobs: set[str] = set()  # that this call is about

    def grant(self) -> Grant:
        return self._gate.grant(self._method, self._token)

    @property
    def holder(self) -> str:
        """The one job that its token is of; empty: it has none, or one of every job."""
        job = "" if self._gate.is_open else self.grant().job
        return "" if job == EVERY_JOB else job

    def enter(self, peer: str, kind: str = "") -> None:
        """Counts the call among those of its kind. Raises Denied if its peer has too many."""
        address = peer_address(peer)
        if not self._gate.came(address, kind):
            limit = self._gate.limits.per_peer
            message = f"{limit} calls are under way from this address: --calls-per-peer allows no more"
            raise Denied(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT, message)
        self._peer, self._kind = address, kind

    def leave(self) -> None:
        if self._peer:
            self._gate.went(self._peer, self._kind)
            self._peer = ""

    def parse(self, data: bytes, deserialize: Any) -> Any:
        """The request. Raises Denied if it is none, is too large, or names what the token does not cover."""
        limit = self._gate.limits.request_bytes_max
        if len(data) > limit:
            message = f"a request of {len(data)} bytes: at most {limit} are taken"
            raise Denied(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.OVERSIZE, message)
        try:
            request = deserialize(data)
        except DecodeError:
            raise Denied(
                grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID, "not a request of this call"
            ) from None
        job = getattr(request, "job", "")
        self.check(job, max(getattr(request, "generation", 0), self._now(job)))
        return request

    def check(self, job: str, generation: int = 0) -> None:
        """Raises Denied unless the token is of this job and reaches this generation."""
        if self._gate.is_open:
            return
        grant = self.grant()
        if not grant.covers(job):
            raise self._denied(_NOT_ALLOWED)
        if not grant.covers(job, generation):
            raise self._denied(_left_behind(grant.generation_max or 0))
        if grant.generation_max is not None:
            self._jobs.add(job)

    def still_good(self) -> None:
        """Raises Denied once the token has expired, was revoked, or has been left behind by the job."""
        if self._gate.is_open:
            return
        grant = self.grant()
        for job in self._jobs:
            if not grant.covers(job, self._now(job)):
                raise self._denied(_left_behind(grant.generation_max or 0))

    def _now(self, job: str) -> int:
        return self._gate.generation_of(job)

    def _denied(self, why: str) -> Denied:
        denied = Denied(grpc.StatusCode.PERMISSION_DENIED, Reason.DENIED, why)
        return self._gate.noted(self._method, denied)


def _bearer(metadata: Metadata) -> str:
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value.startswith(BEARER):
            return value.removeprefix(BEARER)
    return ""


def peer_address(peer: str) -> str:
    """The host of "ipv4:10.0.0.1:4567" or "ipv6:[::1]:4567"."""
    return peer.rpartition(":")[0] or peer

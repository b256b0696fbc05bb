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
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.security.audit import Audit
from services.security.rates import Rates
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
    per_token_s: float = 2000.0
    """Calls a second that one token may begin (all ranks of a job may have one); of a peer, without tokens. 0: any."""
    request_bytes_max: int = 1 << 20
    """Of a call that sends one message."""


class Denied(Exception):
    """The call is refused. Holds nothing of the token."""

    def __init__(self, code: grpc.StatusCode, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.tell: Callable[[str], None] = lambda peer: None
        """Is called with the peer, once it is known."""
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
        self,
        authority: Authority | None,
        limits: CallLimits | None = None,
        shown: str = "",
        audit: Audit | None = None,
    ) -> None:
        self.limits = limits or CallLimits()
        self.shown = shown
        self._authority = authority
        self._audit = audit
        self._rates = Rates(self.limits.per_token_s)
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
        grant = visit.grant()
        if not grant.roles & MAY_CALL.get(method, frozenset()):
            denied = Denied(grpc.StatusCode.PERMISSION_DENIED, Reason.DENIED, _NOT_ALLOWED)
            raise self.noted(method, denied, grant)
        return visit

    def grant(self, method: str, token: str, peer: str = "") -> Grant:
        assert self._authority is not None
        if not token:
            words = "a token is needed: name its file in SWIFT_TOKEN_FILE"
            raise self.noted(method, _unauthenticated(words), peer=peer)
        try:
            return self._authority.grant(token)
        except NotAuthenticated as error:
            raise self.noted(method, _unauthenticated(str(error)), error.grant, peer) from None

    @property
    def is_open(self) -> bool:
        return self._authority is None

    def noted(
        self, method: str, denied: Denied, grant: Grant | None = None, peer: str = "", job: str = ""
    ) -> Denied:
        """Leaves an event, one a second at most: a flood of refusals is not to become a flood of lines. The audit
        trail has its own bound."""
        self.on_denied(denied.reason.value)
        if self._audit is not None:
            tell = partial(self._tell_denied, self._audit, method, denied, grant, job)
            if peer:
                tell(peer)
            else:
                denied.tell = lambda peer: tell(peer_address(peer))
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _EVENT_EVERY_S:
                self._unsaid += 1
                return denied
            self._said_at = now
            unsaid, self._unsaid = self._unsaid, 0
        events.emit("denied", call=method, reason=denied.reason.value, others=unsaid)
        return denied

    @staticmethod
    def _tell_denied(
        audit: Audit, method: str, denied: Denied, grant: Grant | None, job: str, peer: str
    ) -> None:
        audit.denied(
            method,
            job=job or (grant.job if grant else ""),
            peer=peer,
            subject=grant.subject if grant else "",
            token=grant.token_id if grant else "",
            reason=denied.reason.value,
        )

    def let_in(self, method: str, job: str, grant: Grant | None, peer: str) -> None:
        """For the audit trail."""
        if self._audit is not None:
            subject, token = (grant.subject, grant.token_id) if grant else ("", "")
            self._audit.allowed(method, job=job, peer=peer, subject=subject, token=token)

    def is_too_often(self, grant: Grant | None, peer: str) -> bool:
        """A call begins."""
        who = (grant.token_id or f"{grant.subject} {grant.job}") if grant else peer
        return not self._rates.takes(who, time.monotonic())

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
        return self._gate.grant(self._method, self._token, self._peer)

    @property
    def holder(self) -> str:
        """The one job that its token is of; empty: it has none, or one of every job."""
        job = "" if self._gate.is_open else self.grant().job
        return "" if job == EVERY_JOB else job

    def enter(self, peer: str, kind: str = "") -> None:
        """Counts the call among those of its kind. Raises Denied if its peer has too many."""
        address = peer_address(peer)
        if self._gate.is_too_often(None if self._gate.is_open else self.grant(), address):
            limit = self._gate.limits.per_token_s
            message = f"more than {limit:g} calls a second with one token: --calls-per-token-s allows no more"
            raise Denied(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT, message)
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
        if hasattr(request, "job"):  # else it is about all that the token may see: see `covers`
            self.check(job, max(getattr(request, "generation", 0), self._now(job)))
        self._gate.let_in(self._method, job, None if self._gate.is_open else self.grant(), self._peer)
        return request

    def check(self, job: str, generation: int = 0) -> None:
        """Raises Denied unless the token is of this job and reaches this generation."""
        if self._gate.is_open:
            return
        grant = self.grant()
        if not grant.covers(job):
            raise self._denied(_NOT_ALLOWED, grant, job)
        if not grant.covers(job, generation):
            raise self._denied(_left_behind(grant.generation_max or 0), grant, job)
        if grant.generation_max is not None:
            self._jobs.add(job)

    def covers(self, job: str) -> bool:
        """Whether the token is of this job, as it is now."""
        return self._gate.is_open or self.grant().covers(job, self._now(job))

    def still_good(self) -> None:
        """Raises Denied once the token has expired, was revoked, or has been left behind by the job."""
        if self._gate.is_open:
            return
        grant = self.grant()
        for job in self._jobs:
            if not grant.covers(job, self._now(job)):
                raise self._denied(_left_behind(grant.generation_max or 0), grant, job)

    def _now(self, job: str) -> int:
        return self._gate.generation_of(job)

    def _denied(self, why: str, grant: Grant, job: str) -> Denied:
        denied = Denied(grpc.StatusCode.PERMISSION_DENIED, Reason.DENIED, why)
        return self._gate.noted(self._method, denied, grant, self._peer, job)


def _bearer(metadata: Metadata) -> str:
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value.startswith(BEARER):
            return value.removeprefix(BEARER)
    return ""


def peer_address(peer: str) -> str:
    """The host of "ipv4:10.0.0.1:4567" or "ipv6:[::1]:4567"."""
    return peer.rpartition(":")[0] or peer

"""Access control of a service: token, role, job and generation of every call, and limits on calls.

(interceptor)  `Gate.admit`: token and role, from the call's metadata, before a message is read
(handler)      `Visit.enter`: limits the calls of this peer; then the request is parsed here, so that invalid bytes
               get INVALID_ARGUMENT, and its job and generation are compared with the token's. A token that is bound
               to a generation is valid while the job is in it: `Gate.generation_of`
(streams)      `Visit.check` for every Open; `Visit.still_good` for every message: a token that has expired, was
               revoked or is bound to an older generation ends the call

A denial is the same whether the job exists or not: the job was not looked up yet.
"""

import errno
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from swift_ft import events
from swift_ft.credentials import AUTHORIZATION, BEARER
from swift_ft.errors import UsageError
from swift_ft.files import open_regular
from swift_ft.log.protocol import REASON_KEY, Reason
from swift_ft.tokens import EVERY_JOB, MAY_CALL, Authority, Grant, NotAuthenticated
from swift_ft_services.threads import Threads

# Audit file: changes and denials with their callers, one JSON object per line, readable by its owner only.
#
# A line records what the gate knows when a call comes: `who` (the token's subject and id; empty without tokens), the
# peer, the call and its job, and whether it was allowed. The outcome is in the service's own log.
#
# ``FILE`` grows to half of the limit and then replaces ``FILE.1``. A line is one write, so a kill tears at most the
# last line. If the file cannot be written, calls go on, and the event `audit_failed` is emitted once.

# Server side of security, used by both services.


# Rate limit by name: a token bucket that holds twice what it gains in a second.

_NAMES_MAX = 4096


class Rates:
    """Token buckets by name. Thread-safe. ``per_s`` of 0: no limit."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def takes(self, name: str, now: float) -> bool:
        if not self._per_s:
            return True
        most = max(2 * self._per_s, 1.0)
        with self._lock:
            left, at = self._left.get(name, (most, now))
            left = min(most, left + (now - at) * self._per_s)
            if len(self._left) >= _NAMES_MAX and name not in self._left:
                self._left.clear()  # all buckets start full again
            self._left[name] = (left - 1 if left >= 1 else left, now)
            return left >= 1


AUDITED = frozenset(
    {
        *("Fence", "Trim", "Reset", "Drop"),
        *("Fail", "Stop", "MemberExited", "ChangeLogServers"),
    }
)
"""Audited calls: those that change or end a job. Denials are audited for every call."""
BYTES_MAX = 128 << 20
_DENIALS_PER_S = 50.0
_FIELD_MAX = 200


class Audit:
    """One audit file. Thread-safe."""

    def __init__(self, path: Path, service: str, bytes_max: int = BYTES_MAX) -> None:
        """Opens the file. Raises UsageError if it cannot be written."""
        self._path = path
        self._service = service
        self._half = bytes_max // 2
        self._lock = threading.Lock()
        self._denials = Rates(_DENIALS_PER_S)
        self._unsaid = 0
        self._failed = False
        try:
            self._fd = self._open()
        except OSError as error:
            raise UsageError(f"--audit {path}: {error.strerror}: name a file that can be written") from None

    def _open(self) -> int:
        fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.fchmod(fd, 0o600)
        return fd

    def allowed(self, call: str, job: str, peer: str, grant: Grant | None) -> None:
        if call.rpartition("/")[2] in AUDITED:
            self._write(call, "allowed", job, peer, grant)

    def denied(self, call: str, job: str, peer: str, grant: Grant | None, reason: str) -> None:
        """Records a denial; of a flood, which would displace all other lines, most are only counted."""
        if self._denials.takes("", time.monotonic()):
            others, self._unsaid = self._unsaid, 0
            more = {"others": others} if others else {}
            self._write(call, "denied", job, peer, grant, reason=reason, **more)
        else:
            self._unsaid += 1

    def _write(
        self, call: str, outcome: str, job: str, peer: str, grant: Grant | None, **more: object
    ) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "service": self._service,
            "call": call.rpartition("/")[2],
            "outcome": outcome,
            "job": job[:_FIELD_MAX],
            "peer": peer[:_FIELD_MAX],
            "subject": grant.subject if grant else "",
            "token": grant.token_id if grant else "",
            **more,
        }
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                if os.fstat(self._fd).st_size + len(data) > self._half or not self._is_there():
                    self._turn()
                self._append(data)
                self._failed = False
                return
            except OSError as error:
                reason = error.strerror or str(error)
            failed_before, self._failed = self._failed, True
        if not failed_before:
            events.emit("audit_failed", path=str(self._path), reason=reason)

    def _append(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written < len(data):  # no space for the rest of the line
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _turn(self) -> None:
        """Starts a new file: this one is full, or was moved away by log rotation."""
        if self._is_there():
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        fd = self._open()
        with suppress(OSError):
            os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)


# Limits on every text and every list of a request, by the field's name.
#
# A list costs more than its bytes: each entry becomes an object, and code written for a few entries iterates over all.
# So entries are counted by field name over the whole request, before it is processed. Limits that depend on a job, such
# as how many ranks have joined it, are checked by the service.

NAME = 1 << 7
WORDS = 1 << 19
"""Length of messages for people; a service keeps their beginning."""
RANKS = 1 << 16

LENGTHS: Mapping[str, int] = {
    **dict.fromkeys(("job", "from_job", "stream", "incarnation", "run", "address", "fsync", "cold"), NAME),
    **dict.fromkeys(("host", "add", "add_host", "lost", "label", "key"), 1 << 10),
    **dict.fromkeys(("reason", "unfit", "over", "difference", "why_not", "inexact_reason"), WORDS),
    **dict.fromkeys(("place", "problem"), 1 << 13),
    **dict.fromkeys(("set", "expected", "desired"), 1 << 18),
    **dict.fromkeys(("frames", "shared"), 1 << 30),  # limited by a writer's credit
}
"""Field name -> maximum characters of a text, or bytes."""

ENTRIES: Mapping[str, tuple[int, int]] = {
    "config": (1 << 10, 1 << 16),
    "fingerprint": (1 << 10, 1 << 16),
    "stages": (1 << 10, 0),
    "versions": (1 << 10, 0),
    "sent": (1 << 12, 0),
    "snapshots": (1 << 10, 0),
    "acknowledged": (RANKS, 0),
    "machines": (1 << 12, 0),
    "changes": (1 << 14, 0),
    "until": (1 << 14, 1 << 19),
    "opens": (1 << 12, 0),
}
"""Name of a list or map -> maximum entries, and maximum characters of all entries together if they are texts."""


def problem(request: Message) -> str:
    """Returns the limit that the request exceeds, in words; empty if none."""
    return _problem(request, Counter())


def _problem(message: Message, entries: Counter[str]) -> str:
    for field, value in message.ListFields():
        if isinstance(value, MutableSequence | MutableMapping):
            wrong = _list_problem(field, value, entries)
        elif field.message_type is not None:
            wrong = _problem(value, entries)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            wrong = _too_long(field.name, len(value), LENGTHS.get(field.name, 0))
        else:
            wrong = ""
        if wrong:
            return wrong
    return ""


def _list_problem(field: FieldDescriptor, value: Any, entries: Counter[str]) -> str:
    name = field.name
    entries[name] += len(value)
    most, length = ENTRIES.get(name, (0, 0))
    if entries[name] > most:
        return f"{name} has {entries[name]} entries: at most {most} are taken"
    if field.message_type is None:
        texts = field.type == FieldDescriptor.TYPE_STRING
        return _too_long(name, sum(map(len, value)), length) if texts else ""
    if field.message_type.GetOptions().map_entry:
        return _too_long(name, sum(len(key) + len(word) for key, word in value.items()), length)
    return next(filter(None, (_problem(one, entries) for one in value)), "")


def _too_long(name: str, length: int, most: int) -> str:
    return f"{name} is {length} long: at most {most} are taken" if length > most else ""


# Concurrency limit per kind of call, and how long a call may block its thread. For a server with threads.
#
# Every call has a thread, from its beginning until its last answer was taken. So each kind of call has a limit of its
# own: a flood of health checks does not block writers, and a flood of writers does not block fences. Within a limit,
# tokens of one job get only a fraction. A call for which no thread can be started is refused. A client that begins a
# call and does not continue it is cancelled:
#
#     a request that does not come     after ``request_s``; at once if the limit is reached and another call waits
#     an answer that is not taken      after ``reply_s``
#
# Call sequence: ``Lane.admit`` (gRPC's own thread, before the call gets one), then in the call's thread ``Call.begin``,
# ``first``, and ``sending`` and ``sent`` around every answer. It leaves its lane when gRPC reports its end.

LOOK_EVERY_S = 0.5
_AHEAD = 4
"""Threads that a lane starts with, so that fences and health checks are answered when no more can be started."""
_PROMPT_S = 0.2
"""Seconds after which a call without a request is cancelled if its place is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLimits:
    calls: int
    """Maximum number of concurrent calls."""
    part: float
    """Fraction of them allowed to tokens of one job."""
    request_s: float = 10.0
    reply_s: float = 60.0


LIMITS: Mapping[str, LaneLimits] = {
    "health": LaneLimits(calls=24, part=1.0, request_s=2.0, reply_s=5.0),
    "control": LaneLimits(calls=128, part=0.5),
    "query": LaneLimits(calls=64, part=0.5),
    "append": LaneLimits(calls=512, part=0.5),
    # A rank that replays may process what it has read for a while.
    "read": LaneLimits(calls=512, part=0.5, reply_s=300.0),
}
LANE_OF: Mapping[str, str] = {
    "Check": "health",
    "Append": "append",
    "Read": "read",
    "Digests": "query",
    "Inventory": "query",
}
"""Method name -> lane; all other methods use "control"."""


def forget_frames(error: BaseException) -> None:
    """Clears the error's traceback. gRPC keeps its exceptions with the call, and their frames refer to the call, so it
    would occupy its place on the connection until garbage collection."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


class Call:
    def __init__(self, lane: "Lane", holder: str) -> None:
        self.holder = holder
        self.lane = lane.name
        self.context: Any = None
        self.waits_since: float | None = None
        """Time since which it waits for its request."""
        self.sends_since: float | None = None
        """Time since which an answer is not taken."""
        self.ending = False
        self.on_end: Callable[[], None] = lambda: None
        """Called when the server ends the call, which gRPC reports only later: it counts no more from here on."""
        self._lane = lane

    def begin(self, context: Any) -> None:
        self.context = context
        if not context.add_callback(self.leave):
            self.leave()

    def leave(self) -> None:
        self._lane.leave(self)

    def first(self, requests: Iterator[bytes]) -> bytes | None:
        """Waits for the single request of a call. Returns None if there is none or the call is over."""
        self.waits_since = self._lane.clock()
        try:
            return next(requests, None)
        except grpc.RpcError as over:
            forget_frames(over)
            return None
        finally:
            self.waits_since = None

    def sending(self) -> None:
        self.sends_since = self._lane.clock()

    def sent(self) -> None:
        self.sends_since = None

    def end(self) -> None:
        self.ending = True
        self.on_end()
        if self.context is not None:
            self.context.cancel()


class Lane:
    def __init__(self, name: str, limits: LaneLimits, clock: Callable[[], float]) -> None:
        self.name = name
        self.limits = limits
        self.clock = clock
        self.threads = Threads(limits.calls, name, ahead=_AHEAD)
        self._lock = threading.Lock()
        self._calls: dict[Call, None] = {}
        """Calls in the order in which they came."""
        self._of: Counter[str] = Counter()

    @property
    def share(self) -> int:
        return max(1, round(self.limits.part * self.limits.calls))

    def admit(self, holder: str) -> Call | None:
        """Counts a new call. Returns None if the limit is reached. ``holder``: the only job of its token, if it has
        one."""
        late = None
        with self._lock:
            if holder and self._of[holder] >= self.share:
                return None
            if sum(not call.ending for call in self._calls) >= self.limits.calls:
                late = self._late()
                if late is None:
                    return None
                late.ending = True
            call = Call(self, holder)
            self._calls[call] = None
            self._of[holder] += 1
        if late is not None:
            late.end()
        return call

    def _late(self) -> Call | None:
        now = self.clock()
        for call in self._calls:
            if not call.ending and call.waits_since is not None and now - call.waits_since > _PROMPT_S:
                return call
        return None

    def leave(self, call: Call) -> None:
        with self._lock:
            if call in self._calls:
                del self._calls[call]
                self._of[call.holder] -= 1
                if not self._of[call.holder]:
                    del self._of[call.holder]

    def end_stalled(self) -> None:
        now, limits = self.clock(), self.limits
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            waits, sends = call.waits_since, call.sends_since
            if (waits is not None and now - waits > limits.request_s) or (
                sends is not None and now - sends > limits.reply_s
            ):
                call.end()


class Lanes:
    """All lanes of a server, and a thread that cancels stalled calls."""

    def __init__(
        self, limits: Mapping[str, LaneLimits] = LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lanes = {name: Lane(name, its, clock) for name, its in limits.items()}
        self.refusals = Threads(_AHEAD, "refusal", ahead=_AHEAD)
        threading.Thread(target=_look_after, args=(weakref.ref(self),), name="lanes", daemon=True).start()

    def of(self, method: str) -> Lane:
        return self.lanes[LANE_OF.get(method.rpartition("/")[2], "control")]


def _look_after(lanes: "weakref.ref[Lanes]") -> None:
    while (there := lanes()) is not None:
        for lane in there.lanes.values():
            lane.end_stalled()
        del there
        time.sleep(LOOK_EVERY_S)


HEALTH = "/grpc.health.v1.Health/"
_EVENT_EVERY_S = 1.0

Metadata = Sequence[tuple[str, "str | bytes"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    per_peer: int = 128
    """Concurrent calls of one kind from one address."""
    per_token_s: float = 2000.0
    """Calls per second with one token (all ranks of a job may share one), or from one peer without tokens. 0: no
    limit."""
    request_bytes_max: int = 1 << 20
    """Maximum size of the request of a call that sends one message."""


class Denied(Exception):
    """Refuses the call. Contains no part of the token, and is noted where the call is aborted: `Gate.note`."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        grant: Grant | None = None,
        job: str = "",
        code: grpc.StatusCode | None = None,
    ) -> None:
        """``code``: None: the reason's."""
        super().__init__(message)
        self.reason = reason
        self.code = code or reason.status
        self.message = message
        self.grant = grant
        self.job = job or (grant.job if grant else "")

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return ((REASON_KEY, self.reason.value),)


_NOT_ALLOWED = "the token does not allow this: it is of another job or role"


def _left_behind(grant: Grant, job: str) -> Denied:
    """The message names the token's own generation, and reveals no state of the server."""
    message = (
        f"the token is bound to generation {grant.generation_max or 0}, which this is not: put one that is not bound "
        "into its file (swift-ft token without --generation)"
    )
    return Denied(Reason.DENIED, message, grant, job)


class Gate:
    """Access control of one server. Without an authority every call is allowed. Thread-safe."""

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
        """(any thread) Called with the reason of each denial."""
        self.generation_of: Callable[[str], int] = lambda job: 0
        """(any thread) Returns the job's current generation; 0 if the job is unknown."""

    def admit(self, method: str, metadata: Metadata) -> "Visit":
        """Admits a call. Raises Denied if it has no valid token, or if the token's roles may not call this method."""
        if self._authority is None:
            return Visit(self, method, "")
        visit = Visit(self, method, _bearer(metadata))
        grant = visit.grant()
        if not grant.roles & MAY_CALL.get(method, frozenset()):
            raise Denied(Reason.DENIED, _NOT_ALLOWED, grant)
        return visit

    def grant(self, token: str) -> Grant:
        assert self._authority is not None
        unauthenticated = partial(Denied, Reason.UNAUTHENTICATED)
        if not token:
            raise unauthenticated("a token is needed: name its file in SWIFT_TOKEN_FILE")
        try:
            return self._authority.grant(token)
        except NotAuthenticated as error:
            raise unauthenticated(str(error), error.grant) from None

    @property
    def is_open(self) -> bool:
        return self._authority is None

    def note(self, method: str, denied: Denied, peer: str) -> None:
        """Counts and audits a denial. Emits an event at most once per second: a flood must not fill the log."""
        self.on_denied(denied.reason.value)
        if self._audit is not None:
            self._audit.denied(method, denied.job, peer, denied.grant, denied.reason.value)
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _EVENT_EVERY_S:
                self._unsaid += 1
                return
            self._said_at = now
            unsaid, self._unsaid = self._unsaid, 0
        events.emit("denied", call=method, reason=denied.reason.value, others=unsaid)

    def let_in(self, method: str, job: str, grant: Grant | None, peer: str) -> None:
        if self._audit is not None:
            self._audit.allowed(method, job, peer, grant)

    def is_too_often(self, grant: Grant | None, peer: str) -> bool:
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
    def __init__(self, gate: Gate, method: str, token: str) -> None:
        self._gate = gate
        self._method = method
        self._token = token
        self._peer = ""
        self._counted: list[tuple[str, str]] = []  # places (peer, kind) that it has
        self._jobs: set[str] = set()  # jobs that this call concerns

    def grant(self) -> Grant:
        return self._gate.grant(self._token)

    noted = False
    """Whether a denial of this call is counted already."""

    def note(self, denied: Denied, peer: str = "") -> None:
        self.noted = True
        self._gate.note(self._method, denied, peer_address(peer) if peer else self._peer)

    @property
    def holder(self) -> str:
        """The only job of its token; empty if it has no token, or one for every job."""
        job = "" if self._gate.is_open else self.grant().job
        return "" if job == EVERY_JOB else job

    def enter(self, peer: str, kind: str = "") -> None:
        """Counts the call among those of its kind. Raises Denied if its peer has too many."""
        address = peer_address(peer)
        if self._gate.is_too_often(None if self._gate.is_open else self.grant(), address):
            limit = self._gate.limits.per_token_s
            message = f"more than {limit:g} calls a second with one token: --calls-per-token-s allows no more"
            raise Denied(Reason.LIMIT, message)
        if not self._gate.came(address, kind):
            limit = self._gate.limits.per_peer
            message = f"{limit} calls are under way from this address: --calls-per-peer allows no more"
            raise Denied(Reason.LIMIT, message)
        self._peer = address
        self._counted.append((address, kind))

    def leave(self) -> None:
        """Any thread, any number of times."""
        with suppress(IndexError):
            self._gate.went(*self._counted.pop())

    def parse(self, data: bytes, deserialize: Any) -> Any:
        """Returns the parsed request. Raises Denied: invalid, too large, or of a job that the token does not cover."""
        limit = self._gate.limits.request_bytes_max
        if len(data) > limit:
            message = f"a request of {len(data)} bytes: at most {limit} are taken"
            raise Denied(Reason.OVERSIZE, message)
        try:
            request = deserialize(data)
        except DecodeError:
            raise Denied(Reason.INVALID, "not a request of this call") from None
        self.check_limits(request)
        job = getattr(request, "job", "")
        if hasattr(request, "job"):  # else it concerns all jobs that the token covers: see `covers`
            self.check(job, max(getattr(request, "generation", 0), self._now(job)))
        self._gate.let_in(self._method, job, None if self._gate.is_open else self.grant(), self._peer)
        return request

    @staticmethod
    def check_limits(request: Message) -> None:
        if wrong := problem(request):
            raise Denied(Reason.OVERSIZE, wrong, code=grpc.StatusCode.INVALID_ARGUMENT)

    def check(self, job: str, generation: int = 0) -> None:
        """Raises Denied unless the token covers this job and this generation."""
        if self._gate.is_open:
            return
        grant = self.grant()
        if not grant.covers(job):
            raise Denied(Reason.DENIED, _NOT_ALLOWED, grant, job)
        if not grant.covers(job, generation):
            raise _left_behind(grant, job)
        if grant.generation_max is not None:
            self._jobs.add(job)

    def covers(self, job: str) -> bool:
        """Returns whether the token covers this job in its current generation."""
        return self._gate.is_open or self.grant().covers(job, self._now(job))

    def still_good(self) -> None:
        """Raises Denied once the token has expired, was revoked, or is bound to an older generation of the job."""
        if self._gate.is_open:
            return
        grant = self.grant()
        for job in self._jobs:
            if not grant.covers(job, self._now(job)):
                raise _left_behind(grant, job)

    def _now(self, job: str) -> int:
        return self._gate.generation_of(job)


def _bearer(metadata: Metadata) -> str:
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value.startswith(BEARER):
            return value.removeprefix(BEARER)
    return ""


def peer_address(peer: str) -> str:
    """Returns the host of "ipv4:10.0.0.1:4567" or "ipv6:[::1]:4567"."""
    return peer.rpartition(":")[0] or peer

"""How many calls of each kind are under way, and how long one may keep a thread waiting. For a server of threads.

Every call has a thread, from its beginning until its last answer was taken. So each kind of call has a lane of its own:
whoever fills the one of health checks keeps no writer out, and whoever fills the writers' keeps no fence out. In a
lane a token of one job gets a part only. A client that begins a call and does not go on with it is ended:

    a request that does not come     after ``request_s``; at once if the lane is full and somebody else waits
    an answer that is not taken      after ``reply_s``

Call sequence: ``Lanes.take`` (gRPC's own thread, before the call gets one), then of the `Call` in its thread ``begin``,
``first``, ``sending`` and ``sent`` around every answer; it leaves its lane when gRPC says that the call is over.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

LOOK_EVERY_S = 0.5
_PROMPT_S = 0.2
"""A request that is not there by then gives way if there is no other place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneLimits:
    calls: int
    """Under way at once."""
    part: float
    """... with tokens of one job."""
    request_s: float = 10.0
    reply_s: float = 60.0


LIMITS: Mapping[str, LaneLimits] = {
    "health": LaneLimits(calls=24, part=1.0, request_s=2.0, reply_s=5.0),
    "watch": LaneLimits(calls=32, part=1.0, request_s=2.0, reply_s=5.0),
    "control": LaneLimits(calls=128, part=0.5),
    "query": LaneLimits(calls=64, part=0.5),
    "append": LaneLimits(calls=512, part=0.5),
    # A rank that replays may take a while over what it has got.
    "read": LaneLimits(calls=512, part=0.5, reply_s=300.0),
}
LANE_OF: Mapping[str, str] = {
    "Check": "health",
    "Watch": "watch",
    "Append": "append",
    "Read": "read",
    "Digests": "query",
    "Inventory": "query",
}
"""By the method's name; all others are control."""


def forget_frames(error: BaseException) -> None:
    """What gRPC raises it keeps with the call, and the frames in which it was raised hold the call. So the call would
    have its place on its connection until somebody looks for cycles."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


class Call:
    """One call in its lane."""

    def __init__(self, lane: "Lane", holder: str) -> None:
        self.holder = holder
        self.lane = lane.name
        self.context: Any = None
        self.waits_since: float | None = None
        """For its request."""
        self.sends_since: float | None = None
        """An answer that was not taken yet."""
        self.ending = False
        self._lane = lane

    def begin(self, context: Any) -> None:
        self.context = context
        if not context.add_callback(self.leave):
            self.leave()

    def leave(self) -> None:
        self._lane.leave(self)

    def first(self, requests: Iterator[bytes]) -> bytes | None:
        """The request of a call that has one; None: there is none, or the call is over."""
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
        """Ends it, whatever its thread waits for."""
        self.ending = True
        if self.context is not None:
            self.context.cancel()


class Lane:
    """All calls of one kind."""

    def __init__(self, name: str, limits: LaneLimits, clock: Callable[[], float]) -> None:
        self.name = name
        self.limits = limits
        self.clock = clock
        self.pool = futures.ThreadPoolExecutor(limits.calls, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._calls: dict[Call, None] = {}
        """In the order in which they came."""
        self._of: Counter[str] = Counter()

    @property
    def share(self) -> int:
        """Calls with tokens of one job."""
        return max(1, round(self.limits.part * self.limits.calls))

    def take(self, holder: str) -> Call | None:
        """None: there is no room. ``holder``: the one job that its token is of, if there is one."""
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

    def look(self) -> bool:
        """Ends who keeps its thread waiting for too long. Whether there are calls at all."""
        now, limits = self.clock(), self.limits
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            waits, sends = call.waits_since, call.sends_since
            if (waits is not None and now - waits > limits.request_s) or (
                sends is not None and now - sends > limits.reply_s
            ):
                call.end()
        return bool(calls)

    def __len__(self) -> int:
        return len(self._calls)


class Lanes:
    """All lanes of a server. Looks after them in a thread while there are calls."""

    def __init__(
        self, limits: Mapping[str, LaneLimits] = LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lanes = {name: Lane(name, its, clock) for name, its in limits.items()}
        self.refusals = futures.ThreadPoolExecutor(4, thread_name_prefix="refusal")
        self._lock = threading.Lock()
        self._looking = False

    def of(self, method: str) -> Lane:
        return self.lanes[LANE_OF.get(method.rpartition("/")[2], "control")]

    def take(self, method: str, holder: str) -> Call | None:
        call = self.of(method).take(holder)
        if call is not None and not self._looking:
            with self._lock:
                if not self._looking:
                    self._looking = True
                    threading.Thread(target=self._look_after, name="lanes", daemon=True).start()
        return call

    def _look_after(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            there = [lane.look() for lane in self.lanes.values()]
            if any(there):
                continue
            with self._lock:
                if not any(map(len, self.lanes.values())):
                    self._looking = False
                    return

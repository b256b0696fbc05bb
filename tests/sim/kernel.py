"""The clock, the one source of chance, the processes and the network of a simulated world.

Nothing happens at once: what a process does next is an event on the kernel's heap. A paused process does what came
meanwhile when it goes on, in its order; a dead one does nothing any more.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

TRACE_LENGTH = 150

Action = Callable[..., None]


class Kernel:
    """Simulated seconds, and what happens in them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        """What was injected, and what came of it."""
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._events = 0
        self._trace: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=TRACE_LENGTH)

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """What is to be at the same time comes in the order of these calls. (A delay to it may be rounded.)"""
        self._events += 1
        heapq.heappush(self._heap, (time_s, self._events, action, args))

    def run(self, until: Callable[[], bool], until_s: float) -> bool:
        """False: the time was over first, or nothing happens any more."""
        heap = self._heap
        while heap and not until():
            at, _, action, args = heapq.heappop(heap)
            if at > until_s:
                self.after(0.0, action, *args)
                self.now = until_s
                return False
            self.now = at
            action(*args)
        return until()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def note(self, words: str, *values: object) -> None:
        """For the trace of a failure: formatted then only."""
        self._trace.append((self.now, words, values))

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def trace(self) -> list[str]:
        return [f"{at:9.4f}  {words.format(*values)}" for at, words, values in self._trace]


class Process:
    """Something that runs on a machine: it can be killed, and stopped for a while."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.alive = True
        self.resumes_at = 0.0

    def later(self, delay_s: float, action: Action, *args: Any) -> None:
        """Unless it has died by then."""
        self.at(self.kernel.now + delay_s, action, *args)

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """At that time, unless it has died by then."""
        self.kernel.at(time_s, self._do, action, args)

    def _do(self, action: Action, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.kernel.now < self.resumes_at:
            self.at(self.resumes_at, action, *args)
        else:
            action(*args)

    def pause(self, seconds: float) -> None:
        self.resumes_at = max(self.resumes_at, self.kernel.now + seconds)


class Network:
    """Messages take their time; between some pairs nothing gets through for a while; some get lost or come twice."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.loss = 0.0
        self.duplicates = 0.0
        self.slow_s = 0.0
        self._cut: Counter[frozenset[str]] = Counter()

    def cut(self, one: str, other: str) -> None:
        self._cut[frozenset((one, other))] += 1

    def heal(self, one: str, other: str) -> None:
        self._cut[frozenset((one, other))] -= 1

    def heal_all(self) -> None:
        self._cut.clear()
        self.loss = self.duplicates = self.slow_s = 0.0

    def connected(self, one: str, other: str) -> bool:
        return self._cut[frozenset((one, other))] <= 0

    def delay_s(self) -> float:
        chance = self.kernel.random.random()
        return 0.002 + 0.01 * chance + (self.slow_s * chance if self.slow_s and chance > 0.7 else 0.0)

    def send(self, sender: str, receiver: Process, action: Action, *args: Any) -> None:
        """One message of a unary call, which has no order among its like. A retried one may come twice."""
        if not self.connected(sender, receiver.name) or (self.loss and self.kernel.chance(self.loss)):
            self.kernel.count("message lost")
            return
        receiver.later(self.delay_s(), action, *args)
        if self.duplicates and self.kernel.chance(self.duplicates):
            self.kernel.count("message doubled")
            receiver.later(self.delay_s() + self.kernel.between(0.0, 3.0), action, *args)

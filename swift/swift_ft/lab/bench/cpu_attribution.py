"""Where a process's CPU time goes: its main thread's by parts of the program, the others' by their names.

Each moment of the main thread belongs to one part, the innermost that is under way; what no part claims is `BASE`'s. So
the parts add up to the thread's time, whatever is metered and however it is nested.
"""

import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BASE = "the loop"
ENDED = "threads that have ended"
UNNAMED = "the process groups' and gRPC's own threads"
_CALIBRATED = 2000


class Meter:
    """Of the thread that makes it.

    (before the objects exist) ``wrap(owner, names, part)`` → ``go()`` → … → ``taken()``: seconds by part since ``go``
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        self._clock = clock
        self._thread = threading.get_ident()
        self._parts: list[str] = [BASE]
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._at = clock()
        self._on = False

    def go(self) -> None:
        """From here on. Which part is under way is known meanwhile, too."""
        self._spent.clear()
        self._calls.clear()
        self._on = True
        self._at = self._clock()

    def taken(self) -> dict[str, tuple[float, int]]:
        """(seconds, calls) of each part since `go`. They add up to what the thread has computed."""
        self._turn()
        self._on = False
        return {part: (seconds, self._calls[part]) for part, seconds in self._spent.items()}

    def _turn(self) -> None:
        """The time since the last turn is the innermost part's."""
        if self._on:
            now = self._clock()
            self._spent[self._parts[-1]] += now - self._at
            self._at = now

    def _begin(self, part: str) -> None:
        self._turn()
        self._parts.append(part)
        self._calls[part] += self._on

    def _end(self) -> None:
        self._turn()
        self._parts.pop()

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, as a part: what it does is of that part, but for what is of a part inside of it."""

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._end()

        return metered

    def wrap(self, owner: Any, names: str, part: str) -> None:
        """These methods of a class, or functions of a module, are the part."""
        for name in names.split():
            setattr(owner, name, self.wrapped(getattr(owner, name), part))

    @staticmethod
    def cost_s() -> float:
        """Of one call that is metered, besides what it does: it is in the parts, and has to be taken out of them."""
        meter = Meter()
        empty = meter.wrapped(lambda: None, "empty")
        meter.go()
        began = time.thread_time()
        for _ in range(_CALIBRATED):
            empty()
        return (time.thread_time() - began) / _CALIBRATED


def process_cpu_s(pid: int) -> float:
    """What a process has computed, with threads that have ended: its clock, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime((~pid << 3) | 2)


def thread_cpu_s(thread: int) -> float:
    """The same of a thread of this process."""
    return time.clock_gettime((~thread << 3) | 6)


class Threads:
    """The threads of this process besides the main one, by what they are called."""

    def __init__(self, called: Mapping[str, str]):
        """`called`: beginning of a Python thread's name -> what it is said to be."""
        self._called = called
        self._before: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._process = 0.0

    def taken(self) -> dict[str, float]:
        """Seconds since the last time. Together with the main thread's they are the process's."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().native_id
        now: dict[int, float] = {}
        process = time.process_time()
        for path in Path("/proc/self/task").iterdir():
            thread = int(path.name)
            try:
                now[thread] = thread_cpu_s(thread)
            except OSError:
                continue  # it has just ended
            self._names[thread] = self._name(python.get(thread))
        seconds_of: defaultdict[str, float] = defaultdict(float)
        for thread, seconds in now.items():
            if thread != main:
                seconds_of[self._names[thread]] += seconds - self._before.get(thread, 0.0)
        main_seconds = now[main or 0] - self._before.get(main or 0, 0.0)
        seconds_of[ENDED] = max(0.0, process - self._process - main_seconds - sum(seconds_of.values()))
        self._before, self._process = now, process
        return dict(seconds_of)

    def _name(self, python: str | None) -> str:
        if python is None:
            return UNNAMED
        return next((what for start, what in self._called.items() if python.startswith(start)), python)

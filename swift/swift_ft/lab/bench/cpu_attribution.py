"""CPU time of a process: its main thread's by parts of the program, other threads' by their names.

Each moment of the main thread belongs to one part, the innermost that is running. Time outside of all parts belongs to
`BASE`. So the parts add up to the thread's time, whatever is metered and however it is nested.
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
    """Meters the thread that creates it.

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
        """Starts the measurement. The current part is tracked even while it is off."""
        self._spent.clear()
        self._calls.clear()
        self._on = True
        self._at = self._clock()

    def taken(self) -> dict[str, tuple[float, int]]:
        """Stops and returns (seconds, calls) of each part since `go`. They add up to the thread's CPU time."""
        self._turn()
        self._on = False
        return {part: (seconds, self._calls[part]) for part, seconds in self._spent.items()}

    def _turn(self) -> None:
        """Attributes the time since the last call to the innermost part."""
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
        """Returns the function, metered as `part`: its time counts for the part, except that of nested parts."""

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
        """Meters these methods of a class, or functions of a module, as the part."""
        for name in names.split():
            setattr(owner, name, self.wrapped(getattr(owner, name), part))

    @staticmethod
    def cost_s() -> float:
        """Returns the metering cost of one call. It is included in the parts and has to be subtracted."""
        meter = Meter()
        empty = meter.wrapped(lambda: None, "empty")
        meter.go()
        began = time.thread_time()
        for _ in range(_CALIBRATED):
            empty()
        return (time.thread_time() - began) / _CALIBRATED


def thread_cpu_s(thread: int) -> float:
    """Returns the CPU seconds of a thread of this process."""
    return time.clock_gettime((~thread << 3) | 6)


class Threads:
    """CPU time of this process's threads other than the main one, by name."""

    def __init__(self, called: Mapping[str, str]):
        """`called` maps the prefix of a Python thread's name to its label in the result."""
        self._called = called
        self._before: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._process = 0.0

    def taken(self) -> dict[str, float]:
        """Returns seconds by name since the last call. With the main thread's they add up to the process's."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().native_id
        now: dict[int, float] = {}
        process = time.process_time()
        for path in Path("/proc/self/task").iterdir():
            thread = int(path.name)
            try:
                now[thread] = thread_cpu_s(thread)
            except OSError:
                continue  # the thread has just ended
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

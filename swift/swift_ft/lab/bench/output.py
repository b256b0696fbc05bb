"""Shared by all benchmarks: processes, goals, confidence intervals, the machine's description."""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.drill.cluster import Process, await_address

STOP_S = 10.0

# Processes of a benchmark.


class Worker:
    """A process of a benchmark that runs a module. As a context manager it kills the process on exit.

    It prints "ready", waits for a line, and prints its measurements as JSON; or it answers line by line.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ServiceError(f"a process of the benchmark ended with exit code {self._process.wait()}")
        return line

    def begin(self) -> None:
        assert self.line() == "ready"
        self.tell("")

    def tell(self, line: str) -> None:
        """Sends a line to the process. That it has ended is seen when its answer is read."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Returns the measurements that the process prints. Raises ServiceError if it prints an ``error``."""
        result: dict[str, Any] = json.loads(self.line())
        if "error" in result:
            raise ServiceError(result["error"])
        return result


class Service(NamedTuple):
    pid: int
    address: str


@contextmanager
def service(module: str, directory: Path, *flags: str) -> Iterator[Service]:
    """Runs a service of swift. Raises ServiceError if it does not start."""
    path = directory / "address"
    words = [module, *flags, "--address-file", str(path)]
    process = Process(module, words, os.environ, directory / "output", last=signal.SIGTERM)
    try:
        yield Service(process.pid, await_address(process, path))
    finally:
        process.stop(STOP_S)


def await_end(poll: Callable[[], int | None], limit_s: float) -> int:
    """Waits for the end of a run. Returns its exit code. Raises ServiceError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (code := poll()) is None:
        if time.monotonic() > deadline:
            raise ServiceError(f"not at its end after {limit_s:.0f} s")
        time.sleep(0.05)
    return code


def cpu_s(pid: int) -> float:
    """Returns a process's CPU seconds, those of ended threads included (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        raise ServiceError("a process of the benchmark has ended") from None


# Rounds. A busy machine slows all of a round, so ratios are taken within rounds.


class Rounds:
    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)

    def note(self, name: str, value: float) -> None:
        self.values[name].append(value)

    def note_all(self, name: str, figures: Mapping[str, float]) -> None:
        for figure, value in figures.items():
            self.note(f"{name} {figure}", value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.note(name, time.monotonic() - began)

    def median(self, name: str) -> float:
        return float(statistics.median(self.values[name]))

    def ratio(self, name: str, over: str) -> float:
        """Returns the median of the rounds' ratios."""
        pairs = zip(self.values[name], self.values[over], strict=True)
        return statistics.median(one / other for one, other in pairs)

    def summary_ms(self, name: str) -> dict[str, float]:
        """Returns median and maximum of seconds, in milliseconds."""
        return {"median": round(1e3 * self.median(name), 2), "max": round(1e3 * max(self.values[name]), 2)}


# Goals: a limit, what was measured, and whether it is met.


def goal(value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    if at_most is None:
        assert at_least is not None
        return {"at_least": at_least, "value": value, "met": value >= at_least}
    return {"at_most": at_most, "value": value, "met": value <= at_most}


def goal_words(goal: Mapping[str, Any], what: str, unit: str = "") -> str:
    bound = f"at least {goal['at_least']:g}" if "at_least" in goal else f"at most {goal['at_most']:g}"
    outcome = "met" if goal["met"] else "missed"
    return f"goal {bound}{unit}: {goal['value']:.2f}{unit}, {outcome} ({what})"


# Noisy ratios: an interval around the median, and a verdict only if all of it is on one side of the goal.


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median by bootstrap; deterministic, since the random generator is seeded."""
    if len(values) == 1:
        return values[0], values[0]
    from scipy.stats import bootstrap

    found = bootstrap((values,), statistics.median, n_resamples=2000, method="percentile", random_state=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def verdict(low: float, high: float, goal: float) -> str:
    """Compares the interval with the goal. An interval wider than twice the goal's margin over 1 is INCONCLUSIVE."""
    if low > goal:
        return "missed"
    return "met" if high <= goal and high - low <= 2 * (goal - 1) else "INCONCLUSIVE"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "unknown")


def machine() -> str:
    """Describes the machine in words, with its load, since other processes disturb the measurement."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({cpu_model()}), {memory} GiB, loopback, load {os.getloadavg()[0]:.1f}"


def place(directory: Path | None) -> "TemporaryDirectory[str]":
    """Creates a temporary directory for a benchmark, within ``--directory``. Raises UsageError if that fails."""
    try:
        return TemporaryDirectory(prefix="swift-bench-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"--directory {directory or '(none given)'}: {error.strerror}; give one that can be written"
        ) from None


def some(words: str, known: Iterable[str], option: str) -> list[str]:
    """Parses names between commas, each once. Raises UsageError if there is no such name."""
    chosen = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    known = list(known)
    for name in chosen or [words]:
        if name not in known:
            raise UsageError(f"{option} {words}: there is no {name!r}; there are {', '.join(known)}")
    return chosen

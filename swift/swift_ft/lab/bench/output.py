"""Shared by all benchmarks: worker processes, confidence intervals, the machine's description, JSON output."""

import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import write_whole

# Processes of a benchmark: each prints "ready", waits for a line, works, and prints its times as JSON.


@contextmanager
def signals_held() -> Iterator[None]:
    """(main thread) Defers SIGINT and SIGTERM until the block ends. So a caller that starts processes in it knows all
    of them when it has to end them."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


class Worker:
    """A worker process of a benchmark. As a context manager it kills the process on exit."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def of_log(cls, role: str, address: str, stream: str, size: int, count: int) -> "Worker":
        """Starts a process of `swift_ft.lab.bench.log_ranks`."""
        arguments = [role, address, stream, str(size), str(count)]
        return cls([sys.executable, "-P", "-m", "swift_ft.lab.bench.log_ranks", *arguments])

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
        """Sends a line to the process. Raises ServiceError if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError:
            raise ServiceError(
                f"a process of the benchmark ended with exit code {self._process.wait()}"
            ) from None

    def result(self) -> dict[str, float]:
        result: dict[str, float] = json.loads(self.line())
        return result


# Noisy ratios: an interval around the median, and a verdict only if all of it is on one side of the goal.

_RESAMPLES = 2000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median by bootstrap; deterministic, since the random generator is seeded."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[round(0.025 * (_RESAMPLES - 1))], medians[round(0.975 * (_RESAMPLES - 1))]


def verdict(low: float, high: float, goal: float | None, enough: bool = True) -> str:
    """Compares the interval with the goal. An interval wider than twice the goal's margin over 1 is INCONCLUSIVE."""
    if goal is None:
        return ""
    if not enough:
        return "INCONCLUSIVE"
    if low > goal:
        return "missed"
    if high <= goal and high - low <= 2 * (goal - 1):
        return "met"
    return "INCONCLUSIVE"


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


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")


def check_json(path: Path | None, option: str = "--json") -> None:
    """Checks the path before anything is measured. Raises UsageError if the result could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{option} {path}: give a file in a directory that exists")


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the result as JSON, atomically, if a path was given."""
    if path is not None:
        write_text(path, json.dumps(result, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the file atomically. Raises ServiceError if that fails."""
    try:
        write_whole(path, text, mode=None)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error

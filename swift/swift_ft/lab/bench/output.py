"""What all benchmarks say alike: the machine in words, and the result as JSON."""

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

# Processes of a benchmark: each says "ready", waits for a line, works, and says what it took as JSON.


@contextmanager
def signals_held() -> Iterator[None]:
    """(main thread) SIGINT and SIGTERM that come meanwhile are followed at its end. So whoever starts processes in here
    knows of each of them when it has to end them."""
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
    """One of them. A context manager, which ends it."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def of_log(cls, role: str, address: str, stream: str, size: int, count: int) -> "Worker":
        """A process of `swift_ft.lab.bench.log_ranks`."""
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
        """ServiceError: it has ended."""
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


# What a benchmark says of noisy ratios: an interval around the median, a verdict only if all of it is on one side.

_RESAMPLES = 2000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap; the same for the same values."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[round(0.025 * (_RESAMPLES - 1))], medians[round(0.975 * (_RESAMPLES - 1))]


def verdict(low: float, high: float, goal: float | None, enough: bool = True) -> str:
    """The interval against the goal. An interval wider than twice what the goal allows shows nothing but noise."""
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
    """The machine in words; its load, too: whoever else computes meanwhile disturbs what is measured."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({cpu_model()}), {memory} GiB, loopback, load {os.getloadavg()[0]:.1f}"


def place(directory: Path | None) -> "TemporaryDirectory[str]":
    """Where a benchmark works, removed after it: within ``--directory``, which UsageError names if it cannot be."""
    try:
        return TemporaryDirectory(prefix="swift-bench-", dir=directory)
    except OSError as error:
        raise UsageError(
            f"--directory {directory or '(none given)'}: {error.strerror}; give one that can be written"
        ) from None


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")


def check_json(path: Path | None, option: str = "--json") -> None:
    """Before anything is measured: UsageError if the result could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{option} {path}: give a file in a directory that exists")


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    if path is not None:
        write_text(path, json.dumps(result, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all. ServiceError if that cannot be."""
    try:
        write_whole(path, text, mode=None)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error

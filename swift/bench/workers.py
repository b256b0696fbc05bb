"""Processes of a benchmark: each says "ready", waits for a line, works, and says what it took as JSON."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from swift.errors import ServiceError


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
        """A process of `swift.bench.log_ranks`."""
        arguments = [role, address, stream, str(size), str(count)]
        return cls([sys.executable, "-P", "-m", "swift.bench.log_ranks", *arguments])

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

"""Waits for what a real cluster does, with its output if that does not come."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Watched(ABC):
    limit_s: float
    """For which it is waited."""

    @abstractmethod
    def trace(self, event: str) -> list[dict[str, Any]]:
        """Returns the events of that name so far, of all processes."""

    @abstractmethod
    def output(self) -> str: ...

    def until_step(self, step: int) -> None:
        self.until(lambda: any(each["step"] >= step for each in self.trace("loss")), f"step {step}")

    def until(self, look: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self.limit_s
        while not look():
            assert time.monotonic() < deadline, f"waited for {what}: {self.output()}"
            time.sleep(0.1)

"""A run whose trace is followed while it goes on, so that a test does something at the right moment."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift import events
from swift.drill.cluster import LOG_SERVER, Cluster
from tests.integration.trainer_world import TRAINERS

PATIENCE_S = 100.0

Event = dict[str, Any]


class Run:
    """A cluster, and what it has said so far. The trainer is given how many steps, its pause in each, and `more`."""

    def __init__(
        self,
        directory: Path,
        trainer: str,
        steps: int,
        pause_s: float,
        *more: str,
        ranks: int,
        spares: int,
    ) -> None:
        self.directory = directory
        self.steps = steps
        self.ranks = ranks
        self.trace: list[Event] = []
        self.cluster = Cluster(
            directory,
            ranks=ranks,
            spares=spares,
            trainer=[str(TRAINERS / trainer)],
            trainer_arguments=[str(steps), str(pause_s), *more],
        )

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.cluster.poll() is None, f"it is over\n{self.cluster.output_tail()}"
            self._wait(deadline)

    def end(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.cluster.poll()) is None:
            self._wait(deadline)
        assert code == 0, self.cluster.output_tail()
        self.trace = events.read(self.directory / "events")

    def undisturbed(self) -> list[dict[str, str]]:
        """The digests of a run in which nothing fails."""
        with self.cluster:
            self.end()
        assert not self.said("plan")
        return self.digests()

    def _wait(self, deadline: float) -> None:
        assert time.monotonic() < deadline, self.cluster.output_tail()
        self.trace += self.cluster.tail.read()
        time.sleep(0.01)

    def said(self, name: str, /, **fields: object) -> list[Event]:
        return [
            event
            for event in self.trace
            if event["event"] == name and all(event.get(field) == value for field, value in fields.items())
        ]

    def signal_log_server(self, number: signal.Signals) -> None:
        os.kill(self.cluster._processes[LOG_SERVER].pid, number)

    def kill(self, *ranks: int) -> None:
        """SIGKILL, of the processes that hold them now."""
        for rank in ranks:
            os.kill(self.said("joined", rank=rank)[-1]["member_pid"], signal.SIGKILL)

    def digests(self) -> list[dict[str, str]]:
        name = "rank{}-v{}.json"
        return [
            json.loads((self.directory / "digests" / name.format(rank, self.steps)).read_text())
            for rank in range(self.ranks)
        ]

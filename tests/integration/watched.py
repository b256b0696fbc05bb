"""A run whose trace is followed while it goes on, so that a test does something at the right moment."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.lab.drill.cluster import LOG_SERVER
from tests.integration.forked import CalmCluster, ForkedCluster, Forks
from tests.integration.trainer_world import TRAINERS, until_over

PATIENCE_S = 100.0

Event = dict[str, Any]
Digests = dict[str, str]


class Run:
    """A cluster, and what it has said so far. The trainer is given how many steps, its pause in each, a file that ends
    the pauses once it is there, and `more`; `cluster` is what `Cluster` takes besides."""

    def __init__(
        self,
        directory: Path,
        trainer: str,
        steps: int,
        pause_s: float,
        *more: str,
        ranks: int,
        spares: int,
        kind: type[ForkedCluster] = ForkedCluster,
        **cluster: Any,
    ) -> None:
        self.directory = directory
        self.steps = steps
        self.ranks = ranks
        self.trace: list[Event] = []
        self._in_haste = directory / "haste"
        self.cluster = kind(
            directory,
            ranks=ranks,
            spares=spares,
            trainer=[str(TRAINERS / trainer)],
            trainer_arguments=[str(steps), str(pause_s), str(self._in_haste), *more],
            **cluster,
        )

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.cluster.poll() is None, f"it is over\n{self.cluster.output_tail()}"
            self._wait(deadline)

    def end(self) -> None:
        """Nothing is done to it any more, so that it makes no more pauses."""
        self._in_haste.touch()
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.cluster.poll()) is None:
            self._wait(deadline)
        assert code == 0, self.cluster.output_tail()
        self.trace = events.read(self.directory / "events")

    def look(self) -> None:
        """At what it has said meanwhile."""
        self.trace += self.cluster.tail.read()

    def _wait(self, deadline: float) -> None:
        assert time.monotonic() < deadline, self.cluster.output_tail()
        self.look()
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

    def digests(self) -> list[Digests]:
        return _digests(self.directory, self.ranks, self.steps)


def undisturbed(
    forks: Forks, directory: Path, trainer: str, steps: int, *more: str, ranks: int
) -> list[Digests]:
    """What such a run ends with if nothing fails."""
    cluster = CalmCluster(
        forks,
        directory,
        ranks=ranks,
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(steps), "0", "", *more],
    )
    with cluster:
        until_over(cluster)
    assert not [event for event in events.read(directory / "events") if event["event"] == "plan"]
    return _digests(directory, ranks, steps)


def _digests(directory: Path, ranks: int, steps: int) -> list[Digests]:
    found = [directory / "digests" / f"rank{rank}-v{steps}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in found]

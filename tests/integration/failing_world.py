"""A job whose launcher makes failures happen: `swift-ft run --failures`, with services that may be killed."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.errors import UsageError
from swift_ft.lab.drill.cluster import COORDINATOR, LAUNCHER, Process
from swift_ft.lab.failures.services import service_at
from tests.integration.forked import CalmCluster, ForkedCluster, Forks
from tests.integration.trainer_world import until_over
from tests.patience import eventually

STEPS = 20
PATIENCE_S = 150.0
_OF_VERSION = re.compile(r"rank\d+-v(\d+)\.json")
SHAPE = ("--model", "tiny", "--stages", "2", "--microbatches", "4", "--checkpoint-every", "5")
LEASES = ("--heartbeat-s", "0.2", "--lease-s", "2", "--step-bound-s", "4")
"""Of a coordinator that soon says what it thinks of a rank."""


def trainer(steps: int = STEPS, *more: str) -> list[str]:
    return [*SHAPE, "--steps", str(steps), *more]


class FailingCluster(ForkedCluster):
    """Services that are killed by somebody else, who starts them again, are no end of the run."""

    def __init__(
        self,
        directory: Path,
        *failures: str,
        ranks: int = 2,
        flags: Sequence[str] = (),
        coordinator_flags: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self._coordinator_flags = coordinator_flags
        given = ["--failures", ";".join(failures), "--log-dir", str(directory / "out")]
        more = {"spares": 1, "trainer_arguments": trainer(), "digests_every": True, **more}
        super().__init__(directory, ranks=ranks, launcher_flags=[*given, *flags], **more)

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name == COORDINATOR:
            arguments = [*arguments, *self._coordinator_flags]
        shared = self._env
        if name != LAUNCHER:  # as on a machine of their own: the launcher knows nothing of their events
            (self.directory / "services").mkdir(mode=0o700, exist_ok=True)
            self._env = {**shared, events.ENV_EVENTS_DIR: str(self.directory / "services")}
        super()._spawn(name, arguments)
        self._env = shared

    def poll(self) -> int | None:
        """The launcher's exit code once it has ended."""
        return self._processes[LAUNCHER].poll()

    @property
    def launcher(self) -> Process:
        return self._processes[LAUNCHER]

    def stop(self) -> None:
        super().stop()
        for address in self._addresses.values():
            try:
                service = service_at(address)
            except UsageError:
                continue
            service.kill()
            service.close()


class Ended:
    """What a run with failures has left."""

    def __init__(self, directory: Path, code: int, output: str) -> None:
        self.code = code
        self.output = output
        self.trace = events.read(directory / "events")
        self.digests = digests_of(directory)
        (report,) = (directory / "out").glob("*/failures.json")
        self.path = report
        self.report = json.loads(report.read_text())
        self.failures: list[dict[str, Any]] = self.report["failures"]

    def said(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.trace if event["event"] == name]


def digests_of(directory: Path) -> dict[str, Any]:
    """Of every rank, by file name, of the last version."""
    named = {path: _OF_VERSION.fullmatch(path.name) for path in (directory / "digests").iterdir()}
    found = {path: int(match[1]) for path, match in named.items() if match}
    return {path.name: json.loads(path.read_text()) for path in found if found[path] == max(found.values())}


def run(directory: Path, *failures: str, code: int = 0, **more: Any) -> Ended:
    """One run to its end."""
    cluster = FailingCluster(directory, *failures, **more)
    with cluster:
        eventually(lambda: cluster.poll() is not None, cluster.output_tail, PATIENCE_S)
        ended = cluster.poll()
        output = cluster.launcher.output.read_text()
    assert ended == code, output
    return Ended(directory, ended, output)


def undisturbed(
    forks: Forks, directory: Path, *more: str, ranks: int = 2, steps: int = STEPS
) -> dict[str, Any]:
    """The digests with which the same run ends if nothing fails."""
    cluster = CalmCluster(
        forks, directory, ranks=ranks, trainer_arguments=trainer(steps, *more), digests_every=True
    )
    with cluster:
        until_over(cluster)
    return digests_of(directory)

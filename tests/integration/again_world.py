"""One job that is started several times: the services stay, `swift-ft run` comes and goes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.lab.drill.cluster import COORDINATOR, JOB, LAUNCHER
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import TRAINERS

_PATIENCE_S = 100.0
Events = list[dict[str, Any]]


class Again(ForkedCluster):
    """(a test) ``with Again(directory, ranks=2) as job: code = job.run("unlucky.py", ...)``, and again."""

    def __init__(self, directory: Path, *, ranks: int = 2, **settings: str) -> None:
        super().__init__(
            directory, ranks=ranks, spares=1, trainer_arguments=[], digests_every=True, settings=settings
        )
        self.checkpoints: str | Path = directory / "checkpoints"
        self.kill_when: Callable[[], bool] = lambda: False
        """Kills the launcher, and so its ranks, once this is true; once."""
        self.said = ""
        """What the last launcher, and its ranks, have written."""

    def _start(self) -> None:
        self._start_service("logserver")
        self._await_service("logserver")
        self._start_service(COORDINATOR)
        self._await_service(COORDINATOR)

    def run(
        self,
        trainer: str,
        *arguments: object,
        flags: Sequence[str] = (),
        job: str = JOB,
        patience_s: float = _PATIENCE_S,
    ) -> int:
        """The exit code of one `swift-ft run`."""
        words = ["swift_ft.launch", "--nproc-per-node", str(self._ranks), "--spares", str(self._spares)]
        words += ["--coordinator", self._addresses[COORDINATOR], "--job", job, *flags]
        words += ["--checkpoint-dir", str(self.checkpoints)]
        output = self.directory / "output" / f"{LAUNCHER}.txt"
        output.unlink(missing_ok=True)
        self._spawn(LAUNCHER, [*words, str(TRAINERS / trainer), *map(str, arguments)])
        deadline = time.monotonic() + patience_s
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, self.output_tail()
            if self.kill_when():
                self._processes[LAUNCHER].kill()
                self.kill_when = lambda: False
            time.sleep(0.02)
        self.said = output.read_text(errors="replace")
        return code

    def unlucky(
        self,
        steps: int,
        *mishaps: dict[str, Any],
        replicas: int = 1,
        every: int = 5,
        non_finite_loss: str = "warn",
        rate: float = 0.01,
        flags: Sequence[str] = (),
        job: str = JOB,
    ) -> int:
        arguments = (self.directory, steps, json.dumps(mishaps), replicas, every, non_finite_loss, rate)
        return self.run("unlucky.py", *arguments, flags=flags, job=job)

    def status(self, job: str = JOB) -> str:
        """What `swift-ft status` prints."""
        command = [sys.executable, "-P", "-m", "swift_ft.cli", "status", "--job", job]
        command += ["--coordinator", self._addresses[COORDINATOR]]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def lines(self, job: str = JOB) -> list[list[dict[str, Any]]]:
        """What each rank has given to `Session.log`."""
        folder = self.directory / "checkpoints" / job / "metrics"
        texts = [(folder / f"rank{rank}.jsonl").read_text() for rank in range(self._ranks)]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]

    def events(self, name: str) -> Events:
        return [event for event in events.read(self.directory / "events") if event["event"] == name]

    def digests(self, version: int) -> list[dict[str, Any]]:
        """Of all ranks."""
        folder = self.directory / "digests"
        return [
            json.loads((folder / f"rank{rank}-v{version}.json").read_text()) for rank in range(self._ranks)
        ]

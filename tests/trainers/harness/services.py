"""One log server and one coordinator, which all jobs of a test session or a sweep share."""

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.forked import Forks
from tests.integration.logserver_world import serve


class Services:
    """Use as a context. What they keep lies in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = directory / "events"
        self.coordinator = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.forks: Forks | None = None

    def __enter__(self) -> Self:
        self.events.mkdir(parents=True, exist_ok=True)
        try:
            log = self._start("logserver")
            self.coordinator = self._start("coordinator", "--log-servers", log)
            self.forks = Forks()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.forks is not None:
            self.forks.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start(self, name: str, *flags: str) -> str:
        """Its address."""
        process, address = serve(name, self.directory, *flags, SWIFT_EVENTS=str(self.events))
        self._processes.append(process)
        return address

    def check(self) -> None:
        """AssertionError: one of them has ended."""
        for process in self._processes:
            assert process.poll() is None, f"{process.args} ended with {process.poll()}"

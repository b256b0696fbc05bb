"""A rank, a writer or an operator on a machine of the partition tests: does what each line says, answers each."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import SwiftError
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, StreamCursor
from swift_ft.log.record import RecordKey
from tests.integration.coordinator_world import FakeMember
from tests.log_client import LogWriter

JOB, TIMEOUT_S = "job", 30.0
SIZE = 20_000


class Agent:
    def __init__(self) -> None:
        self.writer: LogWriter | None = None
        self.member: FakeMember | None = None
        self.cursor: StreamCursor | None = None

    # -- the log ------------------------------------------------------------------------------------------

    def fence(self, log: str, generation: int) -> None:
        admin.fence(log, JOB, generation, TIMEOUT_S)

    def trim(self, log: str, below: int) -> int:
        return admin.trim(log, JOB, below, TIMEOUT_S)

    def trimmed_at(self, log: str, below: int) -> tuple[int, float]:
        """Asks until it is trimmed so far. How far it is then, and when."""
        while (trimmed := self.trim(log, below)) < below:
            time.sleep(0.05)
        return trimmed, time.monotonic()

    def follow(self, log: str, stream: str) -> None:
        """Holds a lease on all of it."""
        self.cursor = LogReader([log], JOB).follow(stream, 0)
        self.cursor.get(RecordKey(0, 0, 0), TIMEOUT_S, lambda: False)

    def open_writer(self, log: str, generation: int, patience_s: float) -> None:
        self.writer = LogWriter([log], JOB, generation, patience_s=patience_s)

    def write(self, stream: str, begin: int, end: int) -> None:
        assert self.writer is not None
        for step in range(begin, end):
            self.writer.append(stream, RecordKey(step, 0, 0), "uint8", (SIZE,), bytes(SIZE))
        self.writer.flush(TIMEOUT_S)

    def seconds_to_notice(self, timeout_s: float) -> list[Any]:
        """Until the connections of the writer, which writes into the cut, and of the reader are known to be
        dead; and with which words. None: not in time."""
        assert self.writer is not None
        assert self.cursor is not None
        (link,) = self.writer.sending.links.values()
        before = link.core.trouble
        begin = time.monotonic()
        self.writer.append("s9.F", RecordKey(0, 0, 0), "uint8", (1,), b"x")
        found: list[Any] = [None, None]
        while None in found and time.monotonic() - begin < timeout_s:
            for index, words in enumerate(
                (link.core.trouble if link.core.trouble != before else "", self.cursor._trouble)
            ):
                if words and found[index] is None:
                    found[index] = [time.monotonic() - begin, words]
            time.sleep(0.01)
        return found

    # -- the coordinator ------------------------------------------------------------------------------------

    def join(self, coordinator: str, rank: int, world_size: int) -> None:
        self.member = FakeMember(coordinator, JOB, rank, world_size).start()

    def status(self, coordinator: str, job: str) -> dict[str, Any]:
        """What anybody is told who asks."""
        with CoordinatorClient(coordinator, job) as client:
            view = client.status().view
        return {"generation": view.generation, "state": view.state, "waiting_for": view.waiting_for}

    def view(self) -> dict[str, Any]:
        assert self.member is not None
        view = self.member.watcher.latest
        return {
            "generation": view.generation if view else 0,
            "state": view.state if view else 0,
            "reason": view.reason if view else "",
            "waiting_for": view.waiting_for if view else "",
            "version": self.member.version,
            "fenced": self.member.fenced,
            "error": repr(self.member.error) if self.member.error else "",
        }


def main() -> None:
    agent = Agent()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        call: Callable[..., Any] = getattr(agent, name)
        try:
            answer = [call(*arguments), ""]
        except SwiftError as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

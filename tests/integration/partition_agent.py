"""A rank, a writer or an operator on a machine of the partition tests: does what each line says, answers each."""

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from swift_ft.errors import LogUnavailable, SwiftError
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, StreamCursor
from swift_ft.log.record import RecordKey
from swift_ft.rpc import CoordinatorClient
from tests.integration.coordinator_world import FakeMember
from tests.log_client import LogWriter

JOB, TIMEOUT_S = "job", 30.0
SIZE = 20_000


def body_of(stream: str, step: int, generation: int) -> bytes:
    """Tells by whom it was written, too."""
    return random.Random(f"{stream}/{step}/{generation}").randbytes(SIZE)


class Agent:
    def __init__(self) -> None:
        self.writer: LogWriter | None = None
        self._generation = 0
        """The writer's."""
        self.member: FakeMember | None = None
        self.cursor: StreamCursor | None = None
        self.durable = 0
        """Steps below were told to be durable."""
        self.failure = ""
        self.waited = 0
        """How often the writer said that it has lost patience with the log."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the log ------------------------------------------------------------------------------------------

    def fence(self, log: str, generation: int) -> None:
        admin.fence(log, JOB, generation, TIMEOUT_S)

    def trim(self, log: str, below: int) -> int:
        return admin.trim(log, JOB, below, TIMEOUT_S)

    def inventory(self, log: str, stream: str) -> dict[str, Any]:
        (found,) = [one for one in admin.inventory(log, JOB, TIMEOUT_S) if one.stream == stream]
        return {"records": found.records, "next": found.next_sequence, "corrupt": found.corrupt}

    def read(self, log: str, stream: str, begin: int, end: int) -> list[list[int]]:
        """(step, sequence, generation) of every record, in the stream's order. Bodies are compared."""
        reader = LogReader([log], JOB)
        cursor = reader.follow(stream, begin)
        found = []
        for step in range(begin, end):
            record = cursor.get(RecordKey(step, 0, 0), TIMEOUT_S, lambda: False)
            assert record.body == body_of(stream, step, record.generation), step
            found.append([step, record.sequence, record.generation])
        assert cursor._held_bytes == 0, "there is more than was asked for"
        cursor.close()
        reader.close()
        return found

    def follow(self, log: str, stream: str) -> None:
        """Holds a lease on all of it."""
        self.cursor = LogReader([log], JOB).follow(stream, 0)
        self.cursor.get(RecordKey(0, 0, 0), TIMEOUT_S, lambda: False)

    def open_writer(self, log: str, generation: int, patience_s: float) -> None:
        self._generation = generation
        self.writer = LogWriter([log], JOB, generation, patience_s=patience_s)

    def write(self, stream: str, begin: int, end: int) -> None:
        assert self.writer is not None
        for step in range(begin, end):
            body = body_of(stream, step, self._generation)
            self.writer.append(stream, RecordKey(step, 0, 0), "uint8", (SIZE,), body)
        self.writer.flush(TIMEOUT_S)

    def _insist(self, stream: str, step: int) -> None:
        """Makes it durable, however long the log cannot be reached."""
        assert self.writer is not None
        body = body_of(stream, step, self._generation)
        self.writer.append(stream, RecordKey(step, 0, 0), "uint8", (SIZE,), body)
        while True:
            try:
                return self.writer.flush(TIMEOUT_S)
            except LogUnavailable:
                self.waited += 1
                time.sleep(0.05)

    def write_on(self, stream: str, begin: int) -> None:
        """One step after the other, each durable before the next, until `stop_writing` or a refusal."""

        def work() -> None:
            step = begin
            try:
                while not self._stop.wait(0.002):
                    self._insist(stream, step)
                    step += 1
                    self.durable = step
            except SwiftError as error:
                self.failure = type(error).__name__

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def written(self) -> list[Any]:
        return [self.durable, self.failure]

    def resent(self) -> int:
        assert self.writer is not None
        return self.writer.stats.resent

    def trouble(self) -> str:
        """Why the writer's last call ended."""
        assert self.writer is not None
        (link,) = self.writer.delivery.links.values()
        return link.trouble

    def stop_writing(self) -> int:
        assert self._thread is not None
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        assert not self.failure, self.failure
        return self.durable

    def seconds_to_notice(self, timeout_s: float) -> list[Any]:
        """Until the connections of the writer, which writes into the cut, and of the reader are known to be
        dead; and with which words. None: not in time."""
        assert self.writer is not None
        assert self.cursor is not None
        (link,) = self.writer.delivery.links.values()
        before = link.trouble
        begin = time.monotonic()
        self.writer.append("s9.F", RecordKey(0, 0, 0), "uint8", (1,), b"x")
        found: list[Any] = [None, None]
        while None in found and time.monotonic() - begin < timeout_s:
            for index, words in enumerate(
                (link.trouble if link.trouble != before else "", self.cursor._trouble)
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

    def die(self) -> None:
        """It says nothing any more; its launcher, on the same machine, says so until it is heard."""
        assert self.member is not None
        self.member._killed.set()
        self.member.client.close()  # else its calls would wait for the coordinator
        self.member.kill()
        threading.Thread(target=self.member.report_exit, daemon=True).start()


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

"""The process beside a trainer that sends to the log what the trainer puts into the ring.

    (trainer)  SidecarWriter starts ``python -m swift.log.sidecar`` with a socket, the ring and a pidfd of its own
    (main)     reads the ring, hands records to the writer; the writer digests, compares, compresses, sends
    (control)  answers the trainer's requests; notices that it is gone: then the ring is drained, and that was all
    (watch)    tells the trainer when something is wrong with the log, and when it is well again

It may be killed at any time. Its successor reads the ring from the tail: records that were given a sequence are sent
again under the same one, the others are compared with what the servers have. For other servers the trainer kills it.

Requests and answers are lines of JSON: ``{"id": 3, "do": "flush", …}``, ``{"id": 3, "error": null}``; unasked
``{"trouble": …}``, ``{"codec": …}`` and ``{"room": true}``. What has the number 0 is not answered: nobody reads.
"""

import argparse
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from swift import events
from swift.errors import (
    ServiceError,
    SwiftError,
)
from swift.log.lease import LeaseKeeper
from swift.log.memory import keep_freed_memory
from swift.log.record import RecordKey
from swift.log.ring import Memory
from swift.log.ring_writer import RingWriter
from swift.log.sidecar_messages import Message, error_to_json

DRAIN_S = 10.0
"""How long a sidecar outlives its trainer at most, but for a call that has begun."""
_SLEEP_S = 0.1
NEVER_REACHED = 1 << 62


class Sidecar:
    """The process."""

    def __init__(self, line: socket.socket, memory: Memory, wake: int, trainer: int) -> None:
        """``trainer``: a pidfd. A process that the trainer has forked may keep the socket open."""
        self._line = line
        self._memory = memory
        self._wake = wake
        self._trainer = trainer
        self._sending = threading.Lock()
        self._judging = threading.Lock()
        self._told: SwiftError | None = None
        self._begun = threading.Event()
        self._gone = threading.Event()
        self._drain_s = DRAIN_S
        self._until = float("inf")
        self._writer: RingWriter | None = None

    def run(self) -> None:
        """Returns when the trainer is gone and the ring is drained, or when the trainer said that it is over."""
        threading.Thread(target=self._control, name="control", daemon=True).start()
        threading.Thread(target=self._memory.populate, name="populate", daemon=True).start()
        self._begun.wait()
        writer = self._writer
        if writer is None:
            return  # the trainer was gone before it said what to do
        threading.Thread(target=self._watch, args=(writer,), name="watch", daemon=True).start()
        while not self._gone.is_set() or not (writer.drained() or self._over()):
            writer.pump()

    def _over(self) -> bool:
        return time.monotonic() > self._until

    def _leave(self) -> None:
        """The trainer is gone."""
        if not self._gone.is_set():
            self._until = time.monotonic() + self._drain_s
            self._gone.set()
            if self._writer is not None:
                self._writer.want(NEVER_REACHED)

    def tell(self, message: Message) -> None:
        with self._sending:
            try:
                self._line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._leave()

    # -- control --------------------------------------------------------------------------------------

    def _control(self) -> None:
        try:
            for line in self._lines():
                self._hear(json.loads(line))
        except Exception as error:  # noqa: BLE001  (one that does not listen is worse than none: it is replaced)
            self.tell({"failed": f"{type(error).__name__}: {error}"})
            os._exit(1)
        self._leave()
        self._begun.set()

    def _hear(self, request: Message) -> None:
        if request["do"] == "flush":
            threading.Thread(target=self._flush, args=(request,), daemon=True).start()
            return
        with self._judging:
            error: SwiftError | None = None
            try:
                self._do(request)
            except SwiftError as raised:
                error = raised
            self._answer(request, error)

    def _lines(self) -> Iterator[bytes]:
        """Until the trainer is gone, or closes the line."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._trainer, select.POLLIN)
        rest = b""
        while True:
            ready = dict(poll.poll())
            if self._line.fileno() not in ready:
                return  # the trainer has ended, and everything that it said was read
            try:
                part = self._line.recv(1 << 16)
            except OSError:
                return
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines

    def _do(self, request: Message) -> None:
        do = request["do"]
        if do == "begin":
            self._drain_s = min(request["patience_s"], DRAIN_S)
            events.configure(f"sidecar-{request['name'] or request['job']}")
            if request["lease"] is not None:
                LeaseKeeper(request["job"], request["lease"], self._trainer)
            self._writer = RingWriter(
                self._memory,
                self._wake,
                self.tell,
                request["dropped"],
                over=self._over,
                servers=request["servers"],
                job=request["job"],
                generation=request["generation"],
                codec=request["codec"],
                fsync=request["fsync"],
                patience_s=request["patience_s"],
                name=request["name"],
            )
            return
        writer = self._writer
        assert writer is not None
        if do == "go":
            self._begun.set()
        elif do == "expect":
            writer.expect(
                request["stream"],
                {RecordKey(*numbers): bytes.fromhex(digest) for *numbers, digest in request["digests"]},
                request["server"],
            )
        elif do == "set_generation":
            writer.set_generation(request["generation"])
            self._told = None
        elif do == "restart":
            writer.discard(request["generation"], request["upto"])
            self._told = None
        elif do == "close":
            os._exit(0)  # what is not acknowledged is given up
        else:
            raise ServiceError(f"the log's sidecar does not know {do!r}")

    def _flush(self, request: Message) -> None:
        assert self._writer is not None
        error: SwiftError | None = None
        try:
            self._writer.flush_to(request["upto"], request["timeout_s"])
        except SwiftError as raised:
            error = raised
        self._answer(request, error)

    def _answer(self, request: Message, error: SwiftError | None) -> None:
        if request["id"]:
            self.tell({"id": request["id"], "error": error_to_json(error)})
        elif error is not None:  # it was not even begun
            self.tell({"failed": str(error)})
            os._exit(1)

    # -- watch ----------------------------------------------------------------------------------------

    def _watch(self, writer: RingWriter) -> None:
        while not self._gone.is_set():
            with self._judging:  # no verdict about a generation that is over by the time it is told
                error = writer.trouble()
                if type(error) is not type(self._told):
                    self._told = error
                    self.tell({"trouble": error_to_json(error), "final": False})
            writer.look()
            self._gone.wait(_SLEEP_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swift.log.sidecar",
        description="Sends to the log what a trainer puts into a ring. Started by the trainer's session.",
    )
    for name in ("socket", "ring", "wake", "trainer"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="FD")
    given = parser.parse_args(arguments)
    # The end of the trainer ends it, and nothing that is said to a whole group or container does before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sidecar = Sidecar(socket.socket(fileno=given.socket), Memory(given.ring), given.wake, given.trainer)
    keep_freed_memory()
    try:
        sidecar.run()
    except Exception as error:  # noqa: BLE001  (said to the trainer: our output goes nowhere)
        sidecar.tell({"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)  # gRPC's threads may be in the middle of something


if __name__ == "__main__":
    main()

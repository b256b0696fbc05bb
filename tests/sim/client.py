"""A simulated writer: the real `LinkCore` of each server, over calls that break."""

from collections.abc import Callable

from swift_ft._pb import log_pb2
from swift_ft.errors import SequenceConflict, ServiceError, SwiftError
from swift_ft.log.protocol import Reason
from swift_ft.log.sender_core import LinkCore, Outgoing
from tests.sim.checkers import Checkers
from tests.sim.kernel import Network, Process
from tests.sim.memory import NEAR, SimMemory, whole
from tests.sim.server import JOB, Call, ServerProcess, at


class SimLink:
    """All streams that one process writes on one server."""

    def __init__(
        self,
        process: Process,
        network: Network,
        checkers: Checkers,
        generation: int,
        server_name: str,
        find_server: Callable[[], ServerProcess | None],
        memory: SimMemory,
        freed: Callable[[], None],
    ) -> None:
        """``freed()``: something was acknowledged."""
        self._memory = memory
        self._freed = freed
        self.core = LinkCore(server_name, JOB, generation, process.kernel.now, "")
        self._process = process
        self._network = network
        self._checkers = checkers
        self._server_name = server_name
        self._find_server = find_server
        self._call: Call | None = None
        self._waiting = False

    def enqueue(self, record: Outgoing) -> None:
        self.core.enqueue(record, self._process.kernel.now)
        self._go_on()

    def set_generation(self, generation: int, discard: bool) -> None:
        self.core.set_generation(generation, discard, self._process.kernel.now)
        if self._call is not None:
            self.break_call(self._call, told=False)
            self._call = None
        self._waiting = False
        self._go_on()

    @property
    def places(self) -> set[int]:
        """Where the bodies are that it may still send."""
        streams = self.core._streams.values()
        return {record.place for stream in streams for record in (*stream.sent, *stream.unsent)}

    def give_up(self) -> list[Outgoing]:
        """Nobody speaks to that server any more; what it has not acknowledged."""
        self.core.end_call()
        if self._call is not None:
            self.break_call(self._call, told=False)
            self._call = None
        self._waiting = True  # it never connects again
        return [record for stream in self.core._streams.values() for record in (*stream.sent, *stream.unsent)]

    def _go_on(self) -> None:
        if self._call is not None:
            self._pump(self._call)
        elif self.core.may_connect and not self._waiting:
            self._connect()

    def _retry(self) -> None:
        self._waiting = False
        self._go_on()

    def _pause(self, seconds: float) -> None:
        if not self._waiting:
            self._waiting = True
            self._process.later(seconds, self._retry)

    def _connect(self) -> None:
        server = self._find_server()
        if server is None or not self._network.connected(self._process.name, self._server_name):
            self._pause(0.3)
            return
        call = self._call = Call(self._process.name, self.core.begin_call(self._process.kernel.now), server)
        call.client, call.on_reply, call.on_end = self._process, self._on_reply, self._on_end
        server.calls.add(call)
        self._send(call, None)
        self._pump(call)

    def _pump(self, call: Call) -> None:
        while (message := self.core.next_message(call.number)) is not None:
            self._checkers.sent(at(self._server_name, self._process.name), whole(message, self._memory))
            self._send(call, message)

    def _send(self, call: Call, message: bytes | None) -> None:
        if call.broken:
            return
        call.up_at = max(call.up_at, self._process.kernel.now + self._network.delay_s())
        call.server.at(call.up_at, call.server.guarded, call.server.receive, call, message)

    def _on_reply(self, call: Call, reply: log_pb2.AppendReply) -> None:
        if call is not self._call:
            return
        session = call.session
        if reply.HasField("welcome") and session is not None and self._process.kernel.chance(NEAR):
            self._process.kernel.count("memory handed over")
            session.memory = self._memory
            self.core.share(call.number)
        try:
            if self.core.on_reply(call.number, reply, self._process.kernel.now):
                self._freed()
        except SwiftError as error:
            self.core.on_error(error)
            self.break_call(call, told=False)
            self._ended(call, 0.05)
            return
        self._pump(call)

    def _on_end(self, call: Call, reason: str, message: str) -> None:
        if call is not self._call:
            return
        kind = SequenceConflict if reason == Reason.CONFLICT else ServiceError
        self._ended(call, self.core.on_failure(call.number, reason, message, kind(message)))

    def _ended(self, call: Call, pause_s: float) -> None:
        self.core.end_call()
        call.broken = True
        self._call = None
        self._pause(pause_s)

    def break_call(self, call: Call | None = None, told: bool = True) -> None:
        """The connection is gone. Each side notices later; what was under way to the server may still arrive."""
        call = call or self._call
        if call is None or call.broken:
            return
        call.server.calls.discard(call)
        kernel = self._process.kernel
        call.broken = True
        call.deaf_from = kernel.now + kernel.between(0.0, 0.1 if kernel.chance(0.7) else 1.5)
        call.server.later(call.deaf_from - kernel.now + 0.001, call.server.detach, call)
        if told:
            kernel.count("connection broken")
            self._process.later(kernel.between(0.0, 1.0), self._on_end, call, "", "connection lost")

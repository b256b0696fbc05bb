"""One Append call, message by message, as a client in another language would make it."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import MAGIC, decode_header
from swift_ft.log.protocol import Reason, code_of, frames_message, message_of, method, reason_of
from swift_ft.log.shared_memory import PLACE, hand_over
from swift_ft_services.logserver.core import Refused
from tests.shared_bodies import bodies
from tests.unit.log.frames import STREAM
from tests.unit.log.service import JOB

TIMEOUT_S = 60.0


def opening(**fields: Any) -> bytes:
    """A message that opens one stream."""
    opens = [log_pb2.Open(**{"job": JOB, "stream": STREAM, "generation": 1, **fields})]
    return log_pb2.AppendRequest(opens=opens).SerializeToString()


class HasChannel(Protocol):
    """A log server in this process or another one."""

    channel: grpc.Channel


class Call:
    """An Append call: `send` a message, `until` what is awaited has come."""

    def __init__(self, server: HasChannel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # As the writers' own calls: a server that was just started again is waited for, and not found to be gone.
        self._call = server.channel.stream_stream(method("Append"), None, log_pb2.AppendReply.FromString)(
            iter(self._requests.get, None), timeout=TIMEOUT_S, wait_for_ready=True
        )
        self.acked: dict[str, int] = {}
        self.opened: dict[str, int] = {}
        self.credit = 0
        self.welcome: log_pb2.Welcome | None = None
        self._bodies = bodies()
        self._shared = False

    def open(self, *streams: str, generation: int = 1, acked: int = 0) -> None:
        opens = [
            log_pb2.Open(job=JOB, stream=stream, generation=generation, acked_sequence=acked)
            for stream in streams or [STREAM]
        ]
        self._requests.put(log_pb2.AppendRequest(opens=opens).SerializeToString())
        self.read(lambda: set(streams or [STREAM]) <= set(self.opened))
        if self._bodies is not None and self.welcome is not None and not self._shared:
            self._shared = hand_over(
                self.welcome.memory_socket, self.welcome.memory_key, self._bodies.descriptor
            )
            assert self._shared

    def ask(self, **fields: Any) -> None:
        """To open a stream, and waits for no answer. ``fields``: of the Open."""
        self.raw(opening(**fields))

    def send(self, *frames: bytes) -> None:
        if self._bodies is not None and self._shared and all(frame[:4] == MAGIC for frame in frames):
            shared = b""
            for frame in frames:
                head = int.from_bytes(frame[6:8], "little")
                shared += frame[:head] + PLACE.pack(self._bodies.put(frame[head:]))
            self._requests.put(log_pb2.AppendRequest(shared=shared).SerializeToString())
        else:
            self._requests.put(frames_message(frames, sum(map(len, frames))))

    def raw(self, message: bytes) -> None:
        self._requests.put(message)

    def read(self, enough: Callable[[], bool]) -> None:
        while not enough():
            reply = next(self._call)
            if reply.HasField("welcome"):
                self.welcome = reply.welcome
            self.credit += reply.credit_bytes
            self.opened.update({opened.stream: opened.next_sequence for opened in reply.opened})
            self.acked.update({acked.stream: acked.durable_sequence for acked in reply.acked})

    def until_acked(self, sequence: int, stream: str = STREAM) -> None:
        self.read(lambda: self.acked.get(stream, 0) >= sequence)

    def refused(self) -> tuple[grpc.StatusCode, str, str]:
        """Code, reason and message that end the call."""
        with pytest.raises(grpc.RpcError) as caught:
            self.read(lambda: False)
        return code_of(caught.value), reason_of(caught.value), message_of(caught.value)

    def raw_end(self) -> None:
        self._requests.put(None)

    def end(self) -> None:
        self.raw_end()
        with pytest.raises(StopIteration):
            self.read(lambda: False)


def append(server: HasChannel, *frames: bytes, generation: int = 1, acked: int = 0) -> Call:
    """A call by which these have become durable."""
    call = Call(server)
    call.open(generation=generation, acked=acked)
    call.send(*frames)
    call.until_acked(decode_header(frames[-1]).sequence + 1)
    return call


@contextmanager
def refusing(reason: Reason, match: str | None = None) -> Iterator[None]:
    """What is called refuses for that reason."""
    with pytest.raises(Refused, match=match) as caught:
        yield
    assert caught.value.refusal.reason is reason


class Replies(list[log_pb2.AppendReply | None]):
    """What a server has put into the outbox of a call."""

    def put(self, item: log_pb2.AppendReply | None, /) -> None:
        self.append(item)

    def acked(self) -> list[int]:
        return [acked.durable_sequence for reply in self if reply is not None for acked in reply.acked]

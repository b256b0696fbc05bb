"""Worker processes of `swift-ft bench log`: writers and readers of the log, and receivers without a log.

Each measured process prints "ready", waits for a line, works, and prints its times as JSON.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from swift_ft._pb import log_pb2
from swift_ft.log.frame import BODY_BYTES_MAX, Assembler
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.protocol import SERVICE, open_channel, server_options, split_frames
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.writer import LogWriter

GENERATION, TIMEOUT_S = 1, 600.0
_DTYPE = "uint8"


def _measured(work: Callable[[], object]) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, began = time.process_time(), time.monotonic()
    work()
    print(
        json.dumps({"began": began, "ended": time.monotonic(), "cpu": time.process_time() - cpu}), flush=True
    )


def append(address: str, name: str, size: int, count: int) -> None:
    """Appends `count` records of `size` bytes and waits until the last is durable."""
    keep_freed_memory()
    job, stream = name.split("/")
    writer = LogWriter([address], job, GENERATION, name=stream)
    body = memoryview(bytes(i * 37 & 255 for i in range(min(size, 1 << 16))) * -(-size // (1 << 16)))[:size]

    def work() -> None:
        for step in range(count):
            writer.append(stream, RecordKey(step, 0, 0), _DTYPE, (size,), body)
        writer.flush(TIMEOUT_S)

    _measured(work)
    writer.close()


def read(address: str, name: str, size: int, count: int) -> None:
    """Reads the records that `append` wrote, in order, with checksums verified."""
    keep_freed_memory()  # as a replaying rank does
    job, stream = name.split("/")
    reader = LogReader([address], job)

    def work() -> None:
        cursor = reader.follow(stream, 0)
        for step in range(count):
            record = cursor.get(RecordKey(step, 0, 0), TIMEOUT_S, lambda: False)
            assert record.body.nbytes == size
        cursor.close()

    _measured(work)
    reader.close()


def receive(_address: str, _stream: str, size: int, count: int) -> None:
    """Receives `count` pieces of `size` bytes over one TCP connection, into memory whose pages are already mapped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    room = memoryview(bytearray(size))
    room[:] = bytes(size)
    with connection:

        def work() -> None:
            for _ in range(count):
                got = 0
                while got < size:
                    got += connection.recv_into(room[got:])
            connection.sendall(b".")

        _measured(work)


Replies = queue.SimpleQueue["log_pb2.AppendReply | None"]


def sink(_address: str, _stream: str, _size: int, _count: int) -> None:
    """Serves the log's protocol: verifies each frame, acknowledges it and drops it. As in the log server, one thread
    takes messages and another replies."""

    def take(requests: Iterator[bytes], replies: Replies) -> None:
        assembler = Assembler(BODY_BYTES_MAX)
        name, durable = "", 0
        try:
            for message in requests:
                frames = split_frames(message)
                if frames is None:
                    (opening,) = log_pb2.AppendRequest.FromString(message).opens
                    name = opening.stream
                    replies.put(log_pb2.AppendReply(opened=[log_pb2.Opened(stream=name, next_sequence=0)]))
                    continue
                durable += sum(1 for _ in assembler.feed(frames))
                acked = log_pb2.Acked(stream=name, durable_sequence=durable)
                replies.put(log_pb2.AppendReply(acked=[acked], credit_bytes=len(frames)))
        except grpc.RpcError:  # the writer has disconnected
            pass
        replies.put(None)

    def append(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[log_pb2.AppendReply]:
        replies: Replies = queue.SimpleQueue()
        threading.Thread(target=take, args=(requests, replies), daemon=True).start()
        yield log_pb2.AppendReply(
            welcome=log_pb2.Welcome(body_bytes_max=BODY_BYTES_MAX), credit_bytes=64 << 20
        )
        yield from iter(replies.get, None)

    _serve(
        grpc.stream_stream_rpc_method_handler(append, None, log_pb2.AppendReply.SerializeToString), "Append"
    )


def drain(_address: str, _stream: str, _size: int, _count: int) -> None:
    """Serves a gRPC call that discards all messages without any processing, not even a checksum."""

    def take(requests: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        for _ in requests:
            pass
        return b""

    _serve(grpc.stream_unary_rpc_method_handler(take, None, None), "Drain")


def pour(address: str, _stream: str, size: int, count: int) -> None:
    """Sends `count` messages of `size` bytes in one gRPC call. A join copies each, as gRPC takes only bytes."""
    keep_freed_memory()
    body = memoryview(bytearray(os.urandom(1 << 20) * -(-size // (1 << 20))))[:size]
    with open_channel(address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{SERVICE}/Drain")
        _measured(lambda: call((b"".join((b"", body)) for _ in range(count)), timeout=TIMEOUT_S))


def _serve(handler: "grpc.RpcMethodHandler[Any, Any]", name: str) -> None:
    """Serves until stdin yields a line or ends."""
    server = grpc.server(futures.ThreadPoolExecutor(2), options=server_options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    keep_freed_memory()
    server.start()
    print(port, flush=True)
    sys.stdin.readline()
    server.stop(None)


if __name__ == "__main__":
    role, where, name, bytes_each, times = sys.argv[1:]
    roles: dict[str, Callable[[str, str, int, int], None]]
    roles = {"append": append, "read": read, "receive": receive, "sink": sink, "drain": drain, "pour": pour}
    roles[role](where, name, int(bytes_each), int(times))

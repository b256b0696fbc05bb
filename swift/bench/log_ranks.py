"""What `swift-ft bench log` runs in processes of their own: writers and a reader of the log, and a raw receiver.

Each says "ready", waits for a line, works, and says what it took as JSON.
"""

import json
import socket
import sys
import time
from collections.abc import Callable

from swift.log.reader import LogReader
from swift.log.record import RecordKey
from swift.log.writer import LogWriter

JOB, GENERATION, TIMEOUT_S = "bench", 1, 600.0
_DTYPE = "uint8"


def _measured(work: Callable[[], None]) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, began = time.process_time(), time.monotonic()
    work()
    print(
        json.dumps({"began": began, "ended": time.monotonic(), "cpu": time.process_time() - cpu}), flush=True
    )


def append(address: str, stream: str, size: int, count: int) -> None:
    """`count` records of `size` bytes; over when the last is durable."""
    writer = LogWriter([address], JOB, GENERATION, name=stream)
    body = memoryview(bytes(i * 37 & 255 for i in range(min(size, 1 << 16))) * -(-size // (1 << 16)))[:size]

    def work() -> None:
        for step in range(count):
            writer.append(stream, RecordKey(step, 0, 0), _DTYPE, (size,), body)
        writer.flush(TIMEOUT_S)

    _measured(work)
    writer.close()


def read(address: str, stream: str, size: int, count: int) -> None:
    """The same records, in order, checksums verified."""
    reader = LogReader([address], JOB)

    def work() -> None:
        cursor = reader.follow(stream, 0)
        for step in range(count):
            record = cursor.get(RecordKey(step, 0, 0), TIMEOUT_S, lambda: False)
            assert record.body.nbytes == size
        cursor.close()

    _measured(work)
    reader.close()


def receive(_address: str, _stream: str, size: int, count: int) -> None:
    """`count` pieces of `size` bytes over one TCP connection, into memory that has been written."""
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


if __name__ == "__main__":
    role, where, name, bytes_each, times = sys.argv[1:]
    {"append": append, "read": read, "receive": receive}[role](where, name, int(bytes_each), int(times))

"""Arrow Flight as a baseline: `swift-ft bench log --flight DIR` runs this file in a separate environment.

It imports nothing from swift. A server reads record batches and drops them; a client puts them. The client prints
"ready", waits for a line, works, and prints its times as JSON, like `swift_ft.lab.bench.log_ranks`.
"""

import json
import sys
import threading
import time

import pyarrow
from pyarrow import flight


class Sink(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server that reads all batches of a put, drops them, and sends one reply at the end."""

    def do_put(self, _context: object, _descriptor: object, reader: object, writer: object) -> None:
        for chunk in reader:  # type: ignore[attr-defined]
            assert chunk.data.nbytes
        writer.write(b"all")  # type: ignore[attr-defined]


def serve() -> None:
    server = Sink("grpc://127.0.0.1:0")
    threading.Thread(target=server.serve, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.readline()
    server.shutdown()


def put(address: str, size: int, count: int) -> None:
    """Sends `count` record batches of `size` bytes each as the client, and prints its times as JSON."""
    client = flight.FlightClient(f"grpc://{address}")
    body = pyarrow.py_buffer(bytes(i * 37 & 255 for i in range(1 << 16)) * (size >> 16))
    array = pyarrow.Array.from_buffers(pyarrow.uint8(), size, [None, body])
    batch = pyarrow.record_batch([array], names=["body"])
    writer, answer = client.do_put(flight.FlightDescriptor.for_path("bench"), batch.schema)
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, began = time.process_time(), time.monotonic()
    for _ in range(count):
        writer.write_batch(batch)
    writer.done_writing()
    answer.read()
    taken = {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - cpu}
    print(json.dumps(taken), flush=True)
    writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        put(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

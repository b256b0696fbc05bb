"""Arrow Flight, as a yardstick: `swift-ft bench log --flight DIR` runs this file in an environment of its own.

It imports nothing of swift. One server that reads record batches and drops them, one client that puts them; each says
"ready", waits for a line, works, and says what it took as JSON, as `swift_ft.lab.bench.log_ranks` does.
"""

import json
import sys
import threading
import time

import pyarrow
from pyarrow import flight


class Sink(flight.FlightServerBase):  # type: ignore[misc]
    """Reads what is put, and answers nothing."""

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
    """The client: sends `count` record batches of `size` bytes each, and prints what it took as JSON."""
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

"""Worker processes of `swift-ft bench log`: writers and readers of the log.

Each measured process prints "ready", waits for a line, works, and prints its times as JSON.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from swift_ft.lab.bench.output import cpu_s as cpu_s_of
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar_client import SidecarWriter

GENERATION, TIMEOUT_S = 1, 600.0
_DTYPE = "uint8"


def _measured(work: Callable[[], object], cpu_s: Callable[[], float] = time.process_time) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    cpu, began = cpu_s(), time.monotonic()
    work()
    print(json.dumps({"began": began, "ended": time.monotonic(), "cpu": cpu_s() - cpu}), flush=True)


def append(address: str, name: str, size: int, count: int) -> None:
    """Appends `count` records of `size` bytes and waits until the last is durable. Measures the sidecar's CPU time
    too."""
    keep_freed_memory()
    job, stream = name.split("/")
    writer = SidecarWriter([address], job, GENERATION, name=stream)
    writer.await_ready()
    body = np.resize(np.arange(min(size, 1 << 16), dtype=np.uint32) * 37, size).astype(np.uint8)

    def work() -> None:
        for step in range(count):
            writer.append_at(stream, RecordKey(step, 0, 0), _DTYPE, (size,), body.ctypes.data, size)
        writer.flush(TIMEOUT_S)

    _measured(work, lambda: time.process_time() + cpu_s_of(writer.pid))
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


if __name__ == "__main__":
    role, where, name, bytes_each, times = sys.argv[1:]
    roles: dict[str, Callable[[str, str, int, int], None]]
    roles = {"append": append, "read": read}
    roles[role](where, name, int(bytes_each), int(times))

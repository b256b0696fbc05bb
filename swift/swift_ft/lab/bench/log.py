"""`swift-ft bench log`: throughput of the log, relative to the disk of this machine.

    O_DIRECT appends with one sync for every 64 MiB, and O_DIRECT reads
    append: writer process(es), each with its sidecar → the log server, which reads records in their memory → segment
            files, until every record is durable
    read: log server → gRPC → a reader process, checksums verified, with the segments evicted from the page cache

Every round measures all cases once, in order. A case's ratio is the median of its ratios within each round.

    python -m swift_ft.lab.bench.log append|read ADDRESS JOB/STREAM SIZE COUNT      a process of a case
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.output import Rounds, Service, Worker
from swift_ft.log import admin
from swift_ft.log.memory import keep_freed_memory, page_aligned
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.text import show, table

GENERATION, TIMEOUT_S = 1, 600.0
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
SMALL_SIZE = "64 KiB"
WRITERS = 4
SHARED_SIZE = "4 MiB"
"""Record size of the goals, and of the records that several writers append together."""
ALONE, TOGETHER = f"append {SHARED_SIZE}", f"append {SHARED_SIZE}, {WRITERS} writers"
DISK_WRITE, DISK_READ = "O_DIRECT append", "O_DIRECT read"
GOALS: dict[str, tuple[str, dict[str, float]]] = {
    "append": (f"durable append of {SHARED_SIZE} over {DISK_WRITE}", {"at_least": 0.85}),
    "small": (f"durable append of {SMALL_SIZE} over {DISK_WRITE}", {"at_least": 0.5}),
    "read": (f"cold read of {SHARED_SIZE} over {DISK_READ}", {"at_least": 0.9}),
    "writers": (f"{WRITERS} writers together over one", {"at_least": 1.0}),
    "cpu": (f"CPU s/GB of an append of {SHARED_SIZE}: writer, sidecar and server", {"at_most": 0.4}),
}
"""Name, words and limit."""
_BLOCK = 8 << 20
_SYNC_BYTES = 64 << 20


# --- limits of the machine ---


def to_disk(path: Path, total: int) -> float:
    """Returns the seconds for aligned O_DIRECT writes of `total` bytes into a growing file, with one fdatasync per
    64 MiB."""
    with page_aligned(_BLOCK) as block:
        block.write(os.urandom(1 << 20) * (_BLOCK >> 20))
        descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            began = time.monotonic()
            for at in range(0, total, _BLOCK):
                os.pwrite(descriptor, block, at)
                if (at + _BLOCK) % _SYNC_BYTES == 0:
                    os.fdatasync(descriptor)
            os.fdatasync(descriptor)
            return time.monotonic() - began
        finally:
            os.close(descriptor)


def from_disk(path: Path, total: int) -> float:
    """Returns the seconds to read `total` bytes of a file with O_DIRECT, which bypasses the page cache."""
    with page_aligned(_BLOCK) as block:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            began = time.monotonic()
            for at in range(0, total, _BLOCK):
                os.preadv(descriptor, [block], at)
            return time.monotonic() - began
        finally:
            os.close(descriptor)


# --- processes of a case: they print "ready", wait for a line, work, and print their times ---


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
            writer.append_at(stream, RecordKey(step, 0, 0), "uint8", (size,), body.ctypes.data, size)
        writer.flush(TIMEOUT_S)

    _measured(work, lambda: time.process_time() + output.cpu_s(writer.pid))
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


# --- the log ---


def cool(log: Path) -> None:
    """Evicts the segments from the page cache."""
    for path in log.rglob("*.seg"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def move(server: Service, role: str, streams: Sequence[str], size: int, total: int) -> dict[str, float]:
    """Moves `total` bytes in records of `size` over all `streams` (JOB/STREAM) concurrently. Returns rates and CPU
    costs."""
    count = max(1, total // len(streams) // size)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(__name__, role, server.address, stream, size, count))
            for stream in streams
        ]
        before = output.cpu_s(server.pid)
        for worker in workers:
            worker.begin()
        results = [worker.result() for worker in workers]
        gigabytes = count * size * len(streams) / 1e9
        seconds = max(f["ended"] for f in results) - min(f["began"] for f in results)
        return {
            "rate": gigabytes * 1e3 / seconds,
            "client_cpu": sum(f["cpu"] for f in results) / gigabytes,
            "server_cpu": (output.cpu_s(server.pid) - before) / gigabytes,
        }


def measure(directory: Path, total: int, rounds: Rounds) -> None:
    """Runs one round of all cases. Rates are in MB/s."""
    probe = directory / "probe"
    rounds.note(DISK_WRITE, total / 1e6 / to_disk(probe, total))
    rounds.note(DISK_READ, total / 1e6 / from_disk(probe, total))
    probe.unlink()

    def case(name: str, role: str, job: str, writers: int, size: int) -> None:
        streams = [f"{job}/s{n}.F" for n in range(writers)]
        rounds.note_all(name, move(server, role, streams, size, total))

    log = directory / "log"
    with output.service("swift_ft_services.logserver", directory, "--directory", str(log)) as server:
        for name, size in SIZES.items():
            job = f"bench-{size}"
            admin.fence(server.address, job, GENERATION, 10.0)
            case(f"append {name}", "append", job, 1, size)
            cool(log)
            case(f"read {name}", "read", job, 1, size)
            admin.drop(server.address, job, force=True, timeout_s=TIMEOUT_S)
        admin.fence(server.address, "bench-writers", GENERATION, 10.0)
        case(TOGETHER, "append", "bench-writers", WRITERS, SIZES[SHARED_SIZE])


# --- what comes out ---


def evaluate(rounds: Rounds, total: int) -> dict[str, Any]:
    """Computes medians over rounds, ratios within rounds, and the goals."""
    names = [name.removesuffix(" rate") for name in rounds.values if name.endswith(" rate")]
    cases = {
        name: {
            **{figure: rounds.median(f"{name} {figure}") for figure in ("rate", "client_cpu", "server_cpu")},
            "of_disk": rounds.ratio(f"{name} rate", DISK_READ if name.startswith("read") else DISK_WRITE),
        }
        for name in names
    }
    values = {
        "append": cases[ALONE]["of_disk"],
        "small": cases[f"append {SMALL_SIZE}"]["of_disk"],
        "read": cases[f"read {SHARED_SIZE}"]["of_disk"],
        "writers": rounds.ratio(f"{TOGETHER} rate", f"{ALONE} rate"),
        "cpu": cases[ALONE]["client_cpu"] + cases[ALONE]["server_cpu"],
    }
    return {
        "bytes": total,
        "rounds": len(rounds.values[DISK_READ]),
        "limits_mb_s": {name: rounds.median(name) for name in (DISK_WRITE, DISK_READ)},
        "cases": cases,
        "goals": {name: output.goal(values[name], **limit) for name, (_, limit) in GOALS.items()},
    }


def text(result: dict[str, Any]) -> list[str]:
    """Formats the result: the machine's limits, a line for each case, and the goals."""
    rows = [["", "MB/s", "of disk", "CPU s/GB client", "server"]]
    for name, case in result["cases"].items():
        ratios = [f"{case[key]:.2f}" for key in ("of_disk", "client_cpu", "server_cpu")]
        rows.append([name, f"{case['rate']:.0f}", *ratios])
    return [
        f"{result['machine']}; {result['bytes'] >> 20} MiB a case, medians of {result['rounds']} rounds",
        "",
        *(f"{name:<28}{rate:8.0f} MB/s" for name, rate in result["limits_mb_s"].items()),
        "",
        *table(rows),
        "",
        *(output.goal_words(goal, GOALS[name][0]) for name, goal in result["goals"].items()),
    ]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--mebibytes", type=int, default=2048, metavar="N", help="of a case (default %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    add("--directory", type=Path, metavar="DIR", help="on the disk to measure (default: temporary)")


def run(arguments: Any) -> dict[str, Any]:
    if arguments.mebibytes < 256 or arguments.mebibytes % 64 or arguments.rounds < 1:
        raise UsageError("--mebibytes takes a multiple of 64 from 256 on, --rounds 1 or more")
    on, total, rounds = output.machine(), arguments.mebibytes << 20, Rounds()
    try:
        for _ in range(arguments.rounds):
            with output.place(arguments.directory) as directory:
                measure(Path(directory), total, rounds)
    except OSError as error:
        raise ServiceError(f"the disk of the benchmark: {error}; give --directory on another") from error
    result = {"machine": on, **evaluate(rounds, total)}
    show(text(result))
    return result


if __name__ == "__main__":
    of_role, where, name, bytes_each, times = sys.argv[1:]
    {"append": append, "read": read}[of_role](where, name, int(bytes_each), int(times))

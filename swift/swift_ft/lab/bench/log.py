"""`swift-ft bench log`: throughput of the log, relative to memory, network and disk of this machine.

    memcpy · one TCP connection over loopback · O_DIRECT appends with one sync for every 64 MiB, and O_DIRECT reads
    ring: from the trainer's push until a native thread has copied the record into shared memory
    append: writer process(es), each with its sidecar → gRPC → log server → segment files, until every record is durable
    read: log server → gRPC → a reader process, checksums verified, with the segments evicted from the page cache

Every round measures all cases once, in order. A case's ratio is the median of its ratios within each round.
"""

import ctypes
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.log_ranks import GENERATION, TIMEOUT_S
from swift_ft.lab.bench.output import Worker
from swift_ft.log import admin
from swift_ft.log.memory import page_aligned
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import Consumer, Memory, header_of, producer
from swift_ft.text import show, table


def start(role: str, address: str, stream: str, size: int, count: int) -> Worker:
    """Starts a process that handles `count` records, or pieces, of `size` bytes."""
    return Worker("swift_ft.lab.bench.log_ranks", role, address, stream, size, count)


SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
WRITERS = 4
SHARED_SIZE = "4 MiB"
"""Record size of the goals, and of the records that several writers append together."""
WIRE, DISK_WRITE, DISK_READ = "TCP loopback", "O_DIRECT append", "O_DIRECT read"
RING = "trainer's ring"
GOALS = {"ring": 0.5, "append": 0.65, "read": 0.85, "writers": 1.0}
CPU_GOALS = {"client_cpu": 0.45, "server_cpu": 0.60}
"""Upper limits in CPU seconds per GB of an append of SHARED_SIZE. The client is the writer and its sidecar."""
WORDS = {
    "ring": f"{RING} over memcpy",
    "append": f"durable append of {SHARED_SIZE} over {DISK_WRITE}",
    "read": f"cold read of {SHARED_SIZE} over {DISK_READ}",
    "writers": f"{WRITERS} writers together over one",
    "client_cpu": f"CPU s/GB of who appends {SHARED_SIZE}",
    "server_cpu": f"CPU s/GB of the server that takes {SHARED_SIZE}",
}
_BLOCK = 8 << 20
_SYNC_BYTES = 64 << 20


# --- limits of the machine ---


def memcpy(total: int) -> float:
    """Returns the seconds for a copy of `total` bytes between buffers whose pages are already mapped."""
    source, target = memoryview(bytearray(os.urandom(1 << 20) * 64)), memoryview(bytearray(64 << 20))
    target[:] = source
    began = time.monotonic()
    for _ in range(max(1, total // len(source))):
        target[:] = source
    return (time.monotonic() - began) * total / (max(1, total // len(source)) * len(source))


def over_tcp(total: int) -> float:
    """Returns the seconds to send `total` bytes over one TCP connection on loopback, in pieces of 4 MiB."""
    count = total // (4 << 20)
    receiver = start("receive", "-", "-", 4 << 20, count)
    with receiver, socket.create_connection(("127.0.0.1", int(receiver.line()))) as connection:
        body = memoryview(bytearray(4 << 20))
        receiver.begin()
        began = time.monotonic()
        for _ in range(count):
            connection.sendall(body)
        connection.recv(1)
        took = time.monotonic() - began
        receiver.result()
    return took


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


# --- the log ---


def into_ring(total: int) -> float:
    """Returns the seconds until the ring has taken `total` bytes in records of SHARED_SIZE; it is drained when full."""
    size, wake = SIZES[SHARED_SIZE], os.eventfd(0, os.EFD_CLOEXEC)
    memory = Memory.create(256 << 20)
    taker, consumer = producer(memory, wake), Consumer(memory, wake)
    source = bytearray(os.urandom(1 << 20) * 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    header = header_of(0, RecordKey(0, 0, 0), "uint8", (size,), size)

    def put(count: int) -> None:
        for number in range(count):
            while taker.push(header, address + number * size % len(source), size, False) < 0:
                taker.wait(taker.reserved)
                while consumer.next() is not None:
                    pass
                consumer.release(consumer.position)
        taker.wait(taker.reserved)

    put(memory.capacity // size)  # warm-up: touches every page of the ring
    began = time.monotonic()
    put(total // size)
    took = time.monotonic() - began
    taker.close()
    memory.close()
    os.close(wake)
    return took


class Server:
    """A log server process on its own directory."""

    def __init__(self, pid: int, address: str, log: Path) -> None:
        self._pid, self.address, self._log = pid, address, log
        self.job = ""
        self._jobs = 0
        self.next_job()

    def next_job(self) -> None:
        """Drops the records of the current job, if any, and begins a new, empty job."""
        if self.job:
            admin.drop(self.address, self.job, force=True, timeout_s=TIMEOUT_S)
        self._jobs += 1
        self.job = f"bench-{self._jobs}"
        admin.fence(self.address, self.job, GENERATION, 10.0)

    def cpu_s(self) -> float:
        return output.cpu_s(self._pid)

    def cool(self) -> None:
        """Evicts the segments from the page cache."""
        for path in self._log.rglob("*.seg"):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def served(directory: Path) -> Iterator[Server]:
    """(context manager) Runs a log server on this directory."""
    log = directory / "log"
    with output.service("swift_ft_services.logserver", directory, "--directory", str(log)) as (pid, address):
        yield Server(pid, address, log)


def move(server: Server, role: str, streams: Sequence[str], size: int, total: int) -> dict[str, float]:
    """Moves `total` bytes in records of `size` over all `streams` concurrently. Returns rates and CPU costs."""
    count = max(1, total // len(streams) // size)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start(role, server.address, f"{server.job}/{stream}", size, count))
            for stream in streams
        ]
        before = server.cpu_s()
        for worker in workers:
            worker.begin()
        results = [worker.result() for worker in workers]
        gigabytes = count * size * len(streams) / 1e9
        seconds = max(f["ended"] for f in results) - min(f["began"] for f in results)
        rates = [count * size / 1e6 / (f["ended"] - f["began"]) for f in results]
        return {
            "rate": gigabytes * 1e3 / seconds,
            "client_cpu": sum(f["cpu"] for f in results) / gigabytes,
            "server_cpu": (server.cpu_s() - before) / gigabytes,
            "slowest_over_fastest": min(rates) / max(rates),
        }


def measure(directory: Path, total: int) -> dict[str, Any]:
    """Runs one round of all cases. Rates are in MB/s."""
    probe = directory / "probe"
    limits = {
        "memcpy": total / 1e6 / memcpy(total),
        WIRE: total / 1e6 / over_tcp(total),
        RING: total / 1e6 / into_ring(total),
        DISK_WRITE: total / 1e6 / to_disk(probe, total),
        DISK_READ: total / 1e6 / from_disk(probe, total),
    }
    probe.unlink()
    cases: dict[str, dict[str, float]] = {}
    with served(directory) as server:
        for name, size in SIZES.items():
            cases[f"append {name}"] = move(server, "append", ["s0.F"], size, total)
            server.cool()
            cases[f"read {name}"] = move(server, "read", ["s0.F"], size, total)
            server.next_job()
        streams = [f"s{n}.F" for n in range(WRITERS)]
        cases[f"append {SHARED_SIZE}, {WRITERS} writers"] = move(
            server, "append", streams, SIZES[SHARED_SIZE], total
        )
    return {"limits": limits, "cases": cases}


# --- what comes out ---


def evaluate(rounds: Sequence[dict[str, Any]], total: int) -> dict[str, Any]:
    """Computes medians over rounds, ratios within rounds, and the goals."""
    result: dict[str, Any] = {"bytes": total, "rounds": len(rounds), "limits_mb_s": {}, "cases": {}}
    for name in rounds[0]["limits"]:
        result["limits_mb_s"][name] = statistics.median(r["limits"][name] for r in rounds)
    for name, first in rounds[0]["cases"].items():
        case = {key: statistics.median(r["cases"][name][key] for r in rounds) for key in first}
        limit = DISK_READ if name.startswith("read") else DISK_WRITE
        for key, against in (("of_disk", limit), ("of_wire", WIRE)):
            case[key] = statistics.median(r["cases"][name]["rate"] / r["limits"][against] for r in rounds)
        result["cases"][name] = case
    alone, together = f"append {SHARED_SIZE}", f"append {SHARED_SIZE}, {WRITERS} writers"
    values = {
        "append": result["cases"][alone]["of_disk"],
        "read": result["cases"][f"read {SHARED_SIZE}"]["of_disk"],
        "writers": statistics.median(
            r["cases"][together]["rate"] / r["cases"][alone]["rate"] for r in rounds
        ),
    }
    values["ring"] = statistics.median(r["limits"][RING] / r["limits"]["memcpy"] for r in rounds)
    result["goals"] = {
        **{name: output.goal(value, at_least=GOALS[name]) for name, value in values.items()},
        **{name: output.goal(result["cases"][alone][name], at_most=most) for name, most in CPU_GOALS.items()},
    }
    return result


def text(result: dict[str, Any]) -> list[str]:
    """Formats the result: the machine's limits, a line for each case, and the goals."""
    rows = [["", "MB/s", "of disk", "of wire", "CPU s/GB client", "server"]]
    for name, case in result["cases"].items():
        ratios = [f"{case[key]:.2f}" for key in ("of_disk", "of_wire", "client_cpu", "server_cpu")]
        rows.append([name, f"{case['rate']:.0f}", *ratios])
    return [
        f"{result['machine']}; {result['bytes'] >> 20} MiB a case, medians of {result['rounds']} rounds",
        "",
        *(f"{name:<28}{rate:8.0f} MB/s" for name, rate in result["limits_mb_s"].items()),
        "",
        *table(rows),
        "",
        *(output.goal_words(goal, WORDS[name]) for name, goal in result["goals"].items()),
    ]


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--mebibytes", type=int, default=512, metavar="N", help="of a case (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="on the disk to measure (default: temporary)"
    )


def run(arguments: Any) -> dict[str, Any]:
    if arguments.mebibytes < 256 or arguments.mebibytes % 64 or arguments.rounds < 1:
        raise UsageError("--mebibytes takes a multiple of 64 from 256 on, --rounds 1 or more")
    on, total = output.machine(), arguments.mebibytes << 20
    rounds = []
    try:
        for _ in range(arguments.rounds):
            with output.place(arguments.directory) as directory:
                rounds.append(measure(Path(directory), total))
    except OSError as error:
        raise ServiceError(f"the disk of the benchmark: {error}; give --directory on another") from error
    result = {"machine": on, **evaluate(rounds, total)}
    show(text(result))
    return result

"""A real log server with what a fault needs: a shim in its process, a file system or a network of its own."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft import events
from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.log import admin
from swift_ft.log.protocol import SERVICE, open_channel
from swift_ft.log.record import RecordKey
from tests.faults.shim import Faults
from tests.integration.logserver_world import JOB, REPOSITORY, TIMEOUT_S, LogServer
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.clients import following, reading

STREAM = "s0.F"
SIZE = 20_000


def key(step: int) -> RecordKey:
    return RecordKey(step, 0, 0)


def body_of(step: int, size: int = SIZE) -> bytes:
    return random.Random(step).randbytes(size)


def put(writer: LogWriter, step: int, stream: str = STREAM, size: int = SIZE) -> None:
    writer.append(stream, key(step), "uint8", (size,), body_of(step, size))


FAILED = re.compile("ERROR storage_failed reason=")
"""What a log server says on stderr when its disk has failed."""


class Server(LogServer):
    """`LogServer`, with a channel to it, and a shim in it if `faults` are given."""

    def __init__(self, directory: Path, *flags: str, faults: Faults | None = None) -> None:
        super().__init__(directory, *flags)
        self.channel: grpc.Channel = open_channel(self.address)
        self.stub: log_pb2_grpc.LogStub = log_pb2_grpc.LogStub(self.channel)
        if faults is not None:
            self.env = faults.env
            self.may_say = FAILED

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def writer(self, generation: int = 1, **named: Any) -> LogWriter:
        return LogWriter([self.address], JOB, generation, **named)

    def serving(self) -> bool:
        """What its health says, for the server as a whole and for the service alike."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        status = {
            stub.Check(
                health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S, wait_for_ready=True
            ).status
            for name in ("", SERVICE)
        }
        (only,) = status
        return bool(only == health_pb2.HealthCheckResponse.SERVING)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [found for found in events.read(self.events) if found["event"] == event]

    def inventory(self, stream: str = STREAM) -> log_pb2.StreamInventory:
        found = admin.inventory(self.address, JOB, TIMEOUT_S)
        (one,) = [inventory for inventory in found if inventory.stream == stream]
        return one

    def wait_stopped(self) -> None:
        """Until it has stopped itself (SIGSTOP)."""
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the server stops")

    def peak_memory_bytes(self) -> int:
        return memory_bytes(self.pid, "VmHWM")

    def check(self, begin: int, end: int, stream: str = STREAM, size: int = SIZE) -> None:
        """Every record of these steps is there once, bit for bit, in order; the stream is sound."""
        found = self.inventory(stream)
        assert not found.corrupt, found.reason
        assert (found.records, found.next_sequence, found.durable_sequence) == (end - begin, end, end)
        with reading(self.address) as reader, following(reader, stream, begin) as cursor:
            for step in range(begin, end):
                record = cursor.get(key(step), TIMEOUT_S, lambda: False)
                assert record.body == body_of(step, size), step
                assert record.sequence == step

    def __exit__(self, *of: object) -> None:
        self.channel.close()
        super().__exit__(*of)


def memory_bytes(pid: int, what: str) -> int:
    """VmHWM: the most that was resident at once. VmRSS: now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def fill(server: Server, count: int, stream: str = STREAM) -> None:
    """Steps 0 to count - 1, durable."""
    server.fence(1)
    writer = server.writer()
    for step in range(count):
        put(writer, step, stream)
    writer.close()


# -- bytes of a record in a file, wherever the format puts them ---------------------------------------------


def body_offset(path: Path, step: int, size: int = SIZE) -> int:
    at = path.read_bytes().find(body_of(step, size))
    assert at > 0, f"step {step} is not in {path}"
    return at


def frame_offset(path: Path, step: int) -> int:
    """Where the record begins: at the magic before its body."""
    return path.read_bytes().rindex(b"SWFR", 0, body_offset(path, step))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    """One bit."""
    overwrite(path, offset, bytes((path.read_bytes()[offset] ^ 1,)))


# -- a file system of one's own -------------------------------------------------------------------------------


class Disk:
    """An ext4 image that the server mounts where nobody else sees it. Skips where that is not allowed."""

    def __init__(self, image: Path, size: int) -> None:
        self.image = image
        for program in ("mkfs.ext4", "unshare", "mount", "losetup"):
            if shutil.which(program) is None:
                pytest.skip(f"no {program}: a file system of its own cannot be made")
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        tried = subprocess.run(
            [*self.prefix(image.parent), "true"], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            pytest.skip(f"a file system cannot be mounted here: {tried.stderr.strip()}")
        self.wait_released()

    def prefix(self, mounted: Path) -> list[str]:
        """Words that mount it there for the command behind them alone; gone with the process."""
        script = 'mount -o loop "$0" "$1" && shift && exec "$@"'
        return [
            *["unshare", "--mount", "--propagation", "private"],
            *["sh", "-c", script, str(self.image), str(mounted)],
        ]

    def wait_released(self) -> None:
        """Until the kernel has let go of it, after its process has ended."""

        def free() -> bool:
            done = subprocess.run(["losetup", "-j", str(self.image)], capture_output=True, check=True)
            return not done.stdout

        eventually(free, "the image is released")

    def copy(self, to: Path) -> "Disk":
        """What a power cut would leave now: what has reached the device, nothing that only the kernel holds."""
        shutil.copyfile(self.image, to)
        taken = object.__new__(Disk)
        taken.image = to
        return taken


class DiskServer(Server):
    """A server whose directory is a `Disk`."""

    def __init__(self, directory: Path, disk: Disk, *flags: str, faults: Faults | None = None) -> None:
        directory.mkdir()
        super().__init__(directory, *flags, faults=faults)
        self.disk = disk
        self.prefix = disk.prefix(directory)

    def start(self) -> Self:
        self.disk.wait_released()
        return super().start()

    def power_is_back(self, disk: Disk) -> None:
        """(killed) It starts on what is left."""
        self.disk.wait_released()
        self.disk = disk
        self.prefix = disk.prefix(self.directory)
        self.start()


# -- processes on the other side -----------------------------------------------------------------------------


class Helper:
    """A Python program of the test's: gets lines, answers lines (JSON)."""

    def __init__(self, source: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", source, *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(TIMEOUT_S)}"
        return json.loads(line)

    def __enter__(self) -> "Helper":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

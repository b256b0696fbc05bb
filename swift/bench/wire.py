"""The log's wire without its disk: a writer, gRPC, and a process that verifies every frame and drops it; and the
same bytes through Arrow Flight, which moves them over gRPC in C++."""

import subprocess
import venv
from pathlib import Path

from swift.bench.workers import Worker
from swift.errors import ServiceError
from swift.log.assembly import MESSAGE_BYTES

SIZE = 4 << 20
PYARROW = "pyarrow>=18"


def over_log(total: int) -> float:
    """Seconds for `total` bytes from a LogWriter to a server that acknowledges what it has verified."""
    return _between("sink", "append", total)


def over_grpc(total: int) -> float:
    """Seconds for `total` bytes in one call of gRPC for Python, of messages as large as the log's: no checksum,
    nothing done with them. What the log adds cannot make it quicker."""
    return _between("drain", "pour", total, MESSAGE_BYTES)


def _between(server_role: str, client_role: str, total: int, size: int = SIZE) -> float:
    count = total // size
    with Worker.of_log(server_role, "-", "-", size, count) as server:
        address = f"127.0.0.1:{server.line()}"
        with Worker.of_log(client_role, address, "bench/s0.F", size, count) as client:
            client.begin()
            timed = client.result()
    return timed["ended"] - timed["began"]


def over_flight(python: Path, total: int) -> float:
    """Seconds for `total` bytes in one Arrow Flight DoPut."""
    count = total // SIZE
    script = str(Path(__file__).with_name("flight.py"))
    with Worker([str(python), script, "serve"]) as server:
        address = f"127.0.0.1:{server.line()}"
        with Worker([str(python), script, "put", address, str(SIZE), str(count)]) as client:
            client.begin()
            timed = client.result()
    return timed["ended"] - timed["began"]


def flight_environment(directory: Path) -> Path:
    """The interpreter of an environment that has Arrow Flight. ServiceError if it cannot be made."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    have = subprocess.run([python, "-c", "import pyarrow.flight"], capture_output=True, check=False)
    if have.returncode:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", PYARROW], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
            raise ServiceError(f"--flight {directory}: {PYARROW} cannot be installed: {last[0]}")
    return python

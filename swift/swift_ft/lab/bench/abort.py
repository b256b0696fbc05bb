"""`swift-ft bench abort`: how long an abort takes to free a rank, for everything that it may wait in.

Three ranks are connected. The third does nothing; the first two wait, and are aborted one after the other. Measured is
the time from a rank's abort until its operation has raised, and from the start of `connect` until all are connected. A
rank needs nothing of its peers for it: the first one is freed while the second one has not been told yet.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError
from swift_ft.lab.bench import output
from swift_ft.text import show, table

# Sends commands to members (`abort_ranks`), one line for each.

START_S = 120.0


class Told:
    """A connection to a member. `ask` returns its answer."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lines = line.makefile("rw")

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return json.loads(self._lines.readline())

    def tell(self, do: str, **arguments: Any) -> None:
        self._lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        self._line.close()


class Listener:
    """Accepts the members' connections. A context manager."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="swift-members-")
        self.path = str(Path(self._place.name, "line"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(START_S)
        self._listening.bind(self.path)
        self._listening.listen()
        self._told: list[Told] = []

    def start(self, begin: Callable[[str], Any]) -> Told:
        """Returns the member that ``begin(path)`` starts. Raises TimeoutError if it does not connect."""
        begin(self.path)
        line, _ = self._listening.accept()
        self._told.append(Told(line))
        return self._told[-1]

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for told in self._told:
            told.close()
        self._listening.close()
        self._place.cleanup()


LIMIT_S = 0.2
"""Upper limit that a backend guarantees on an otherwise idle machine."""
PATIENCE_S = 60.0
_LARGE = 1 << 20
_WAITING: dict[str, dict[str, Any]] = {
    "connect": {"operation": "connect"},
    "recv": {"operation": "recv", "source": 2, "tag": 1, "numel": 10},
    "send": {"operation": "send", "to": 2, "tag": 1, "seed": 1, "numel": _LARGE},
    "all_reduce, 40 B": {"operation": "all_reduce", "seed": 1, "numel": 10},
    "all_reduce, 4 MiB": {"operation": "all_reduce", "seed": 1, "numel": _LARGE},
    "all_gather": {"operation": "all_gather", "seed": 1, "numel": _LARGE},
    "reduce_scatter": {"operation": "reduce_scatter", "seed": 1, "numel": _LARGE},
    "all_to_all": {"operation": "all_to_all", "seed": 1, "numel": _LARGE},
    "broadcast": {"operation": "broadcast", "seed": 1, "numel": 10, "root": 2},
    "barrier": {"operation": "barrier"},
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="per operation (%(default)s)")


def run(arguments: Any) -> dict[str, Any]:
    result = measure(max(1, arguments.rounds))
    show(text(result))
    return result


def measure(rounds: int) -> dict[str, Any]:
    """Returns ``freed_ms`` by operation (median, max) and ``connect_ms``, over `rounds` rounds."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes: list[subprocess.Popen[bytes]] = []

    def begin(path: str) -> None:
        command = [sys.executable, "-P", "-m", "swift_ft.lab.bench.abort_ranks", path, str(store.port)]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", **LOOPBACK},
            )
        )

    freed: dict[str, list[float]] = {name: [] for name in _WAITING}
    connected: list[float] = []
    try:
        with Listener() as listener:
            members = [listener.start(begin) for _ in range(3)]
            for number in range(rounds):
                for name, operation in _WAITING.items():
                    group = f"{number}-{name}"
                    if name != "connect":
                        connected.append(_connect(members, group))
                    freed[name] += _free(members[:2], group, operation)
                    if name != "connect":
                        members[2].ask("close", group=group)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    slowest_s = max(max(times) for times in freed.values())
    return {
        "machine": output.machine(),
        "rounds": rounds,
        "freed_ms": {name: _summary(times) for name, times in freed.items()},
        "connect_ms": _summary(connected),
        "limit_ms": LIMIT_S * 1000,
        "verdict": "PASS" if slowest_s <= LIMIT_S else "FAIL",
    }


def _connect(members: Sequence[Told], group: str) -> float:
    for member in members:
        member.ask("open", group=group)
    began = time.monotonic()
    for place, member in enumerate(members):
        member.ask("start", group=group, operation="connect", own=place, size=len(members))
    for member in members:
        outcome = member.ask("outcome", patience_s=PATIENCE_S)
        if "gave" not in outcome:
            raise ServiceError(f"a rank of the benchmark is not connected: {outcome}")
    return time.monotonic() - began


def _free(members: Sequence[Told], group: str, operation: dict[str, Any]) -> list[float]:
    """Aborts the members, one after the other, and returns the seconds until each one's operation raised."""
    for place, member in enumerate(members):
        given = dict(operation)
        if operation["operation"] == "connect":
            member.ask("open", group=group)
            given |= {"own": place, "size": len(members) + 1}
        member.ask("start", group=group, **given)
    time.sleep(0.02)  # so that they wait in the operation
    freed_s = []
    for member in members:
        if member.ask("outcome", patience_s=0.0) == {
            "waits": True
        }:  # the first one's abort may free the second one
            member.ask("abort", group=group)
            outcome = member.ask("outcome", patience_s=PATIENCE_S)
            if not outcome.get("lost_peer"):
                raise ServiceError(
                    f"a rank of the benchmark is not freed from {operation['operation']}: {outcome}"
                )
            freed_s.append(float(outcome["freed_s"]))
        member.ask("close", group=group)
    return freed_s


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds) * 1000, 2), "max": round(max(seconds) * 1000, 2)}


def text(result: dict[str, Any]) -> list[str]:
    """Formats the result: a line for each operation, and the verdict."""
    found = {**result["freed_ms"], "three ranks are connected": result["connect_ms"]}
    rows = [[name, f"{row['median']:.2f}", f"{row['max']:.2f}"] for name, row in found.items()]
    verdict = f"limit {result['limit_ms']:.0f} ms: {result['verdict']}"
    return [*table([["freed from", "median ms", "max ms"], *rows]), verdict, result["machine"]]

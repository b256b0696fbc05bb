"""The lease of a trainer that cannot speak for itself, kept by the process beside it.

A C extension that does not give the GIL up, or one long operation of Python, keeps all threads of a trainer quiet,
the one that renews its lease among them. Nothing has failed then. So the sidecar tells the coordinator as well, for as
long as the trainer's process is there and is not stopped. The coordinator believes that for a while only
(`Timing.kept_s`), and whether steps get on is seen elsewhere.
"""

import select
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import grpc

from swift._pb import coordinator_pb2 as pb
from swift._pb import coordinator_pb2_grpc as pb_grpc
from swift.security.channel import open_channel

_CALL_S = 2.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_NOT_RUNNING = "TtZX"  # as /proc/PID/stat has it: stopped, traced, dead


def is_running(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether that process may do something: it waits, or computes. One that was stopped does neither."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0].decode() not in _NOT_RUNNING


class LeaseKeeper:
    """(sidecar) A thread that says every `interval_s` that the trainer lives; it ends with the trainer, or when the
    trainer does not hold its rank any more."""

    def __init__(self, job: str, lease: Mapping[str, Any], trainer: int) -> None:
        """`lease`: coordinator, rank, incarnation, pid, interval_s. `trainer`: its pidfd."""
        self._trainer = trainer
        self._pid: int = lease["pid"]
        self._interval_s: float = lease["interval_s"]
        self._beat = pb.HeartbeatRequest(
            job=job, rank=lease["rank"], incarnation=lease["incarnation"], kept=True
        )
        self._channel = open_channel(lease["coordinator"], _OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def _run(self) -> None:
        gone = select.poll()
        gone.register(self._trainer, select.POLLIN)
        while not gone.poll(self._interval_s * 1000):
            if is_running(self._pid) and self._is_over():
                break
        self._channel.close()

    def _is_over(self) -> bool:
        try:
            self._stub.Heartbeat(self._beat, timeout=_CALL_S)
        except grpc.RpcError as error:
            # Whatever else it is: the trainer says so itself, and the next beat tries again.
            return cast("grpc.Call", error).code() == grpc.StatusCode.FAILED_PRECONDITION
        return False

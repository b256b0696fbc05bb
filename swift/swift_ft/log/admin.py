"""Calls of the coordinator (and of an operator) to a log server. Each call is idempotent."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.log.protocol import as_error, open_channel
from swift_ft.log.record import Steps


@dataclass(frozen=True, slots=True)
class StreamInventory:
    """Records of one stream on one server. `next_sequence` and `durable_sequence` are exclusive bounds."""

    stream: str
    records: int
    bytes: int
    trimmed_below_step: int
    first_step: int | None
    last_step: int | None
    """`first_step` and `last_step` are None if there is no record."""
    next_sequence: int
    durable_sequence: int
    corrupt: bool
    reason: str
    first_sequence: int = 0
    holes: tuple[str, ...] = ()
    quarantined: str = ""
    unlogged: Steps | None = None
    """Range from the first to the last step that the stream's writer has declared incomplete."""
    marks: int = 0
    """Number of records that are such declarations; the others are tensors."""


@dataclass(frozen=True, slots=True)
class JobSpace:
    trimmed_below_step: int
    wants_checkpoint: str
    """Reason why a checkpoint is needed before the regular interval; empty: none is needed."""
    unknown: bool = False
    """True if the server does not know the job."""
    apart: str = ""
    """Reason why the job is quarantined on the server; empty: the server serves it."""


@contextmanager
def _stub(address: str) -> Iterator["log_pb2_grpc.LogStub"]:
    channel = open_channel(address)
    try:
        yield log_pb2_grpc.LogStub(channel)
    except grpc.RpcError as error:
        raise as_error(address, error) from None
    finally:
        channel.close()


def fence(address: str, job: str, generation: int, timeout_s: float, *, held: bool = False) -> None:
    """Grants ``generation``: from now on the server accepts appends of no other one. When this returns, the grant and
    all appends of older generations are durable. Raises StaleGeneration if a newer one is already granted. ``held``:
    the server was granted a generation of the job before; raises UnknownJob if it was restarted without the job."""
    with _stub(address) as stub:
        request = log_pb2.FenceRequest(job=job, generation=generation, held=held)
        stub.Fence(request, timeout=timeout_s, wait_for_ready=True)


def trim(address: str, job: str, below_step: int, timeout_s: float) -> int:
    """Drops the steps below ``below_step``. Returns the step below which everything is dropped now. It is lower than
    requested while a reader uses older steps; the server continues once those readers are done."""
    with _stub(address) as stub:
        request = log_pb2.TrimRequest(job=job, below_step=below_step)
        reply = stub.Trim(request, timeout=timeout_s, wait_for_ready=True)
        return int(reply.trimmed_below_step)


def reset(address: str, job: str, generation: int, timeout_s: float, *, number: int = 0) -> None:
    """(all ranks restore a checkpoint, because the log cannot be trusted) Drops every record of the job, and all
    knowledge of damage. ``generation`` must be the granted one. Each reset is done once, however late or often it is
    requested. ``number`` distinguishes the resets of one generation, and increases."""
    with _stub(address) as stub:
        request = log_pb2.ResetRequest(job=job, generation=generation, number=number)
        stub.Reset(request, timeout=timeout_s, wait_for_ready=True)


def inventory(address: str, job: str, timeout_s: float) -> list[StreamInventory]:
    """Returns the job's streams on the server; empty for an unknown job."""
    with _stub(address) as stub:
        request = log_pb2.InventoryRequest(job=job)
        reply = stub.Inventory(request, timeout=timeout_s, wait_for_ready=True)
    return [
        StreamInventory(
            stream=stream.stream,
            records=stream.records,
            bytes=stream.bytes,
            trimmed_below_step=reply.trimmed_below_step,
            first_step=stream.first_step if stream.has_records else None,
            last_step=stream.last_step if stream.has_records else None,
            next_sequence=stream.next_sequence,
            durable_sequence=stream.durable_sequence,
            corrupt=stream.corrupt,
            reason=stream.reason,
            first_sequence=stream.first_sequence,
            holes=tuple(stream.holes),
            quarantined=stream.quarantined,
            unlogged=Steps(stream.unlogged_from_step, stream.unlogged_to_step)
            if stream.HasField("unlogged_from_step")
            else None,
            marks=stream.marks,
        )
        for stream in reply.streams
    ]


def status(
    address: str, timeout_s: float, job: str = "", generation: int = 0, *, at_once: bool = False
) -> log_pb2.StatusReply:
    """Returns the server's used and total space, for all jobs or one. ``generation``: given by the coordinator of the
    job, which tells the server that the job lives. ``at_once``: raises LogUnavailable if the first attempt to connect
    fails; otherwise this is tried again until the timeout."""
    with _stub(address) as stub:
        request = log_pb2.StatusRequest(job=job, generation=generation)
        return stub.Status(request, timeout=timeout_s, wait_for_ready=not at_once)


def space(address: str, job: str, generation: int, timeout_s: float) -> JobSpace:
    """(coordinator, periodically) Returns the job's trim and its need of a checkpoint on the server."""
    for job_status in status(address, timeout_s, job, generation).jobs:
        return JobSpace(job_status.trimmed_below_step, job_status.wants_checkpoint, apart=job_status.apart)
    return JobSpace(0, "", unknown=True)


def drop(address: str, job: str, timeout_s: float, *, force: bool = False) -> tuple[int, int]:
    """(operator) Deletes a job: records, generation, trim. Returns (records, bytes). Raises ServiceError if the job
    lives and ``force`` is False, and UsageError if there is no such job."""
    with _stub(address) as stub:
        reply = stub.Drop(log_pb2.DropRequest(job=job, force=force), timeout=timeout_s)
        return int(reply.records), int(reply.bytes)

"""What the coordinator (and an operator) does with a log server. Each call is idempotent."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.log.protocol import as_error, open_channel
from swift_ft.log.record import Steps


@dataclass(frozen=True, slots=True)
class StreamInventory:
    """What one server holds of one stream. The sequences are exclusive bounds."""

    stream: str
    records: int
    bytes: int
    trimmed_below_step: int
    first_step: int | None
    last_step: int | None
    """None: no record is there."""
    next_sequence: int
    durable_sequence: int
    corrupt: bool
    reason: str
    first_sequence: int = 0
    holes: tuple[str, ...] = ()
    quarantined: str = ""
    unlogged: Steps | None = None
    """From the first to the last step that the stream's writer has declared not to be whole."""
    marks: int = 0
    """How many of the records say so; the others are tensors."""


@dataclass(frozen=True, slots=True)
class JobSpace:
    """What the coordinator wants to know of one server while its job runs."""

    trimmed_below_step: int
    wants_checkpoint: str
    """Why a checkpoint is needed before the interval brings one; empty: it is not."""
    unknown: bool = False
    """It knows no such job."""
    apart: str = ""
    """Why it does nothing for the job; empty: it serves it."""


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
    """Grants ``generation``: from now on the server takes appends of no other one. Durable when it returns,
    and so is everything that older generations appended. StaleGeneration: a newer one is granted already.
    ``held``: the server has held one of the job before. UnknownJob: it has come back without it."""
    with _stub(address) as stub:
        request = log_pb2.FenceRequest(job=job, generation=generation, held=held)
        stub.Fence(request, timeout=timeout_s, wait_for_ready=True)


def trim(address: str, job: str, below_step: int, timeout_s: float) -> int:
    """Drops the steps below. Gives the step below which everything is dropped now: lower than asked for
    while somebody reads older steps; the server goes on with it once they are done."""
    with _stub(address) as stub:
        request = log_pb2.TrimRequest(job=job, below_step=below_step)
        reply = stub.Trim(request, timeout=timeout_s, wait_for_ready=True)
        return int(reply.trimmed_below_step)


def reset(address: str, job: str, generation: int, timeout_s: float, *, number: int = 0) -> None:
    """(everybody restores a checkpoint, because the log cannot be trusted) Drops every record of the job, and
    what is known of damage. ``generation`` must be the granted one. Each reset is done once, however late or often
    it is asked for; ``number`` tells those of one generation apart, and rises."""
    with _stub(address) as stub:
        request = log_pb2.ResetRequest(job=job, generation=generation, number=number)
        stub.Reset(request, timeout=timeout_s, wait_for_ready=True)


def inventory(address: str, job: str, timeout_s: float) -> list[StreamInventory]:
    """What the server holds of a job; empty for a job that it does not know."""
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


def status(address: str, timeout_s: float, job: str = "", generation: int = 0) -> log_pb2.StatusReply:
    """How much the server keeps, of how much: of all jobs, or of one. ``generation``: of the coordinator whose
    job it is, which therefore lives."""
    with _stub(address) as stub:
        request = log_pb2.StatusRequest(job=job, generation=generation)
        return stub.Status(request, timeout=timeout_s, wait_for_ready=True)


def space(address: str, job: str, generation: int, timeout_s: float) -> JobSpace:
    """(coordinator, every so often) Whether the job should be trimmed."""
    for job_status in status(address, timeout_s, job, generation).jobs:
        return JobSpace(job_status.trimmed_below_step, job_status.wants_checkpoint, apart=job_status.apart)
    return JobSpace(0, "", unknown=True)


def drop(address: str, job: str, timeout_s: float, *, force: bool = False) -> tuple[int, int]:
    """(operator) Forgets a job: records, generation, trim. Gives (records, bytes). ServiceError: it lives, and
    ``force`` was not said; UsageError: there is no such job."""
    with _stub(address) as stub:
        reply = stub.Drop(log_pb2.DropRequest(job=job, force=force), timeout=timeout_s, wait_for_ready=True)
        return int(reply.records), int(reply.bytes)

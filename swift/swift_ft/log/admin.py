"""Calls of the coordinator (and of an operator) to a log server. Each call is idempotent."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.log.protocol import as_error, open_channel
from swift_ft.log.record import Steps


@contextmanager
def _stub(address: str) -> Iterator["log_pb2_grpc.LogStub"]:
    channel = open_channel(address)
    try:
        yield log_pb2_grpc.LogStub(channel)
    except grpc.RpcError as error:
        raise as_error(address, error) from None
    finally:
        channel.close()


def fence(address: str, job: str, generation: int, timeout_s: float, *, held: bool = False) -> str:
    """Grants ``generation``: from now on the server accepts appends of no other one. When this returns, the grant and
    all appends of older generations are durable. Raises StaleGeneration if a newer one is already granted. ``held``:
    the server was granted a generation of the job before; raises UnknownJob if it was restarted without the job.

    Returns where the server has what it moves to an object store; empty if it moves nothing."""
    with _stub(address) as stub:
        request = log_pb2.FenceRequest(job=job, generation=generation, held=held)
        return str(stub.Fence(request, timeout=timeout_s, wait_for_ready=True).cold)


def trim(
    address: str, job: str, below_step: int, timeout_s: float, cold: str = "", *, generation: int = 0
) -> int:
    """Drops the steps below ``below_step``. Returns the step below which everything is dropped now. It is lower than
    requested while a reader uses older steps; the server continues once those readers are done. ``cold``: drops instead
    what a lost server has moved there. ``generation``: raises StaleGeneration if a newer one is granted: after a reset
    the same steps may have come again. 0: trims whatever is granted."""
    with _stub(address) as stub:
        request = log_pb2.TrimRequest(job=job, below_step=below_step, cold=cold, generation=generation)
        reply = stub.Trim(request, timeout=timeout_s, wait_for_ready=True)
        return int(reply.trimmed_below_step)


def reset(address: str, job: str, generation: int, timeout_s: float, *, number: int = 0) -> str:
    """(all ranks restore a checkpoint, because the log cannot be trusted) Drops every record of the job, and all
    knowledge of damage. ``generation`` must be the granted one. Each reset is done once, however late or often it is
    requested. ``number`` distinguishes the resets of one generation, and increases. Returns as `fence` does."""
    with _stub(address) as stub:
        request = log_pb2.ResetRequest(job=job, generation=generation, number=number)
        return str(stub.Reset(request, timeout=timeout_s, wait_for_ready=True).cold)


def inventory(address: str, job: str, timeout_s: float, cold: str = "") -> list[log_pb2.StreamInventory]:
    """Returns the job's streams on the server; empty for an unknown job. ``cold``: those that a lost server has moved
    there, in their stead."""
    with _stub(address) as stub:
        request = log_pb2.InventoryRequest(job=job, cold=cold)
        return list(stub.Inventory(request, timeout=timeout_s, wait_for_ready=True).streams)


def unlogged(stream: log_pb2.StreamInventory) -> Steps | None:
    """Returns the range from the first to the last step that the stream's writer has declared incomplete."""
    if not stream.HasField("unlogged_from_step"):
        return None
    return Steps(stream.unlogged_from_step, stream.unlogged_to_step)


def status(
    address: str, timeout_s: float, job: str = "", generation: int = 0, *, at_once: bool = False
) -> log_pb2.StatusReply:
    """Returns the server's used and total space, for all jobs or one. ``generation``: given by the coordinator of the
    job, which tells the server that the job lives. ``at_once``: raises LogUnavailable if the first attempt to connect
    fails; otherwise this is tried again until the timeout."""
    with _stub(address) as stub:
        request = log_pb2.StatusRequest(job=job, generation=generation)
        return stub.Status(request, timeout=timeout_s, wait_for_ready=not at_once)


def space(address: str, job: str, generation: int, timeout_s: float) -> log_pb2.JobStatus | None:
    """(coordinator, periodically) Returns the job's trim and its need of a checkpoint on the server; None if the server
    does not know the job."""
    return next(iter(status(address, timeout_s, job, generation).jobs), None)


def drop(address: str, job: str, timeout_s: float, *, force: bool = False) -> tuple[int, int]:
    """(operator) Deletes a job: records, generation, trim. Returns (records, bytes). Raises ServiceError if the job
    lives and ``force`` is False, and UsageError if there is no such job."""
    with _stub(address) as stub:
        reply = stub.Drop(log_pb2.DropRequest(job=job, force=force), timeout=timeout_s)
        return int(reply.records), int(reply.bytes)

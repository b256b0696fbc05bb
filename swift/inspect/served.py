"""A log as its server tells it."""

from collections.abc import Callable, Iterator

import grpc

from swift._pb import log_pb2, log_pb2_grpc
from swift.errors import UsageError
from swift.inspect.facts import JobFacts, LogFacts, StreamFacts
from swift.log import admin
from swift.log.frame import decode_header, decode_record
from swift.log.record import Record
from swift.log.rpc import as_error, open_channel

_ANY_BODY_BYTES = 1 << 62


class ServedLog:
    """The log of a running server."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def facts(self, job: str = "", stream: str = "") -> LogFacts:
        """Of one job, one stream, or all. UsageError: there is none of that name; LogUnavailable."""
        status = admin.status(self.address, self._timeout_s)
        facts = LogFacts(
            source=self.address,
            used_bytes=status.space.used_bytes,
            limit_bytes=status.space.limit_bytes,
            alarm=status.closed_reason or status.space.reason,
            server_runs=True,
        )
        self._check(job, status)
        for held in status.jobs:
            if job in ("", held.job):
                facts.jobs.append(self._job(held, stream))
        return facts

    def _check(self, job: str, status: log_pb2.StatusReply) -> None:
        known = [held.job for held in status.jobs]
        if job and job not in known:
            raise UsageError(
                f"there is no job {job} on {self.address}; there are: {', '.join(known) or 'none'}"
            )

    def _job(self, status: log_pb2.JobStatus, only: str) -> JobFacts:
        inventory = admin.inventory(self.address, status.job, self._timeout_s)
        return JobFacts(
            job=status.job,
            generation=status.generation,
            trimmed_below_step=status.trimmed_below_step,
            records=status.records,
            bytes=status.space.used_bytes,
            limit_bytes=status.space.limit_bytes,
            alarm=status.space.reason,
            idle_seconds=status.idle_seconds,
            writers=status.writers,
            streams=[_stream(stream) for stream in inventory if only in ("", stream.stream)],
        )

    def records(self, job: str, stream: str, wanted: Callable[[int], bool]) -> Iterator[tuple[str, Record]]:
        """(stream, record) of the steps that are wanted. RecordCorrupt: one of them is damaged."""
        facts = self.facts(job, stream).jobs[0]
        channel = open_channel(self.address)
        stub = log_pb2_grpc.LogStub(channel)
        try:
            for stream_facts in facts.streams:
                request = log_pb2.ReadRequest(
                    job=job, stream=stream_facts.stream, from_step=facts.trimmed_below_step, follow=False
                )
                for reply in stub.Read(request):
                    for record in _records_of(reply.frames):
                        if wanted(record.key.step):
                            yield stream_facts.stream, record
        except grpc.RpcError as error:
            raise as_error(self.address, error) from None
        finally:
            channel.close()


def _records_of(frames: bytes) -> Iterator[Record]:
    at = 0
    while at < len(frames):
        header = decode_header(frames, at, _ANY_BODY_BYTES)
        end = at + header.frame_bytes
        yield decode_record(header, memoryview(frames)[at + header.header_bytes : end])
        at = end


def _stream(inventory: admin.StreamInventory) -> StreamFacts:
    quarantined = [f"quarantined: {inventory.quarantined}"] if inventory.quarantined else []
    return StreamFacts(
        stream=inventory.stream,
        first_sequence=inventory.first_sequence,
        durable_sequence=inventory.durable_sequence,
        appended_sequence=inventory.next_sequence,
        records=inventory.records,
        bytes=inventory.bytes,
        first_step=inventory.first_step,
        last_step=inventory.last_step,
        unlogged=inventory.unlogged,
        problems=[*quarantined, *inventory.holes],
    )

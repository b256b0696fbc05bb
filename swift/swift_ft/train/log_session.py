"""The log that this rank writes: the servers that store it, and whether it is complete.

    (FORMING, RECOVERING) ``open``, before the generation's groups are built
    (PLANNING)            ``enter``: switches to the new generation and its servers, and flushes
    (notice thread)       ``interrupt`` ends the waits in it

Until ``open``, no record is written.
"""

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogError, ReplayRefused, ServiceError, SwiftError
from swift_ft.log.sidecar_client import SidecarWriter, WriterStats
from swift_ft.train.boundary_log import Captures
from swift_ft.train.coordinator_session import own_servers
from swift_ft.train.participants import Site

FLUSH_TIMEOUT_S = 60.0


def log_totals(writer: SidecarWriter) -> dict[str, int]:
    """Returns the totals logged so far: records, bytes, and records found equal to those already in the log."""
    stats = writer.stats
    return {"records": stats.records, "bytes": stats.bytes, "verified": stats.verified}


class OwnLog:
    """Log of one rank. Used by the trainer's thread, except `interrupt`, `stats` and `queued_bytes`."""

    def __init__(self, site: Site) -> None:
        # Not the site: the groups hold the log, and must not keep the engine alive.
        self._rank, self._config = site.rank, site.config
        self._member, self._channel = site.member, site.channel
        self._writer: SidecarWriter | None = None
        self._servers: dict[str, int] = {}  # address -> number
        self._refusal: SwiftError | None = None
        self.servers_of_job: list[str] = []
        """All log servers named by the last View."""

    @property
    def opened(self) -> bool:
        return self._writer is not None

    @property
    def writer(self) -> SidecarWriter:
        assert self._writer is not None, "the log is opened with the first generation's groups"
        return self._writer

    @property
    def servers(self) -> list[str]:
        return list(self._servers)

    @property
    def stats(self) -> WriterStats:
        """(any thread) Returns the writer's statistics; zeros before the log is opened."""
        writer = self._writer
        return WriterStats() if writer is None else writer.stats

    @property
    def queued_bytes(self) -> int:
        """(any thread) Returns the bytes that the log has not acknowledged yet."""
        writer = self._writer
        return 0 if writer is None else writer.queued_bytes

    def open(self, view: pb.View) -> None:
        self.servers_of_job = list(view.log_servers)
        if self._writer is None:
            self._place(view)
            self._writer = SidecarWriter(
                self.servers,
                view.job,
                view.generation,
                codec=self._config.codec,
                fsync=self._config.log_fsync,
                queue_bytes=self._config.log_queue_bytes,
                when_full=self._config.log_when_full,
                name=f"rank{self._rank}",
                lease=self._member.lease,
            )
            self._member.on_renewed = self._writer.renewed
            self._channel.capture = Captures(self._writer, self._channel.readings.wholeness)
        elif view.state == pb.FORMING:
            # A rank was lost before the first step: the log is still empty.
            emptied = self._place(view)
            self._writer.set_generation(view.generation, self.servers, emptied)

    def enter(self, view: pb.View) -> SwiftError | None:
        """Waits until all records are acknowledged under the new generation. Returns the reason if they are not.

        The coordinator queries the log for its contents and plans without the missing records. If the log is still
        incomplete when training resumes, this rank refuses then (`why_incomplete`); it keeps its state.
        """
        emptied = self._place(view)
        trouble: SwiftError | None = None
        try:
            self.writer.set_generation(view.generation, self.servers, emptied)
            self.writer.flush(FLUSH_TIMEOUT_S)
        except (ServiceError, LogError, ReplayRefused) as error:
            trouble = error
        incomplete = self.why_incomplete()  # called in any case, since the writer reports it only once
        trouble = trouble or incomplete
        if trouble is not None:
            events.emit("log_incomplete", rank=self._rank, generation=view.generation, reason=str(trouble))
        return trouble

    def why_incomplete(self) -> SwiftError | None:
        """Returns the error if the log lacks, or contradicts, records of this rank; otherwise None."""
        self._refusal = self._refusal or self.writer.unlogged.refusal()
        return self._refusal

    def done_again(self) -> None:
        """Clears the refusal, because the affected steps were discarded and are logged again."""
        self.writer.unlogged.refusal()
        self._refusal = None

    def _place(self, view: pb.View) -> list[str]:
        """Takes this rank's log servers from the View. Returns those that were emptied since (new number)."""
        before = self._servers
        self._servers = own_servers(view, self._rank)
        if self._servers != before:
            events.emit(
                "log_placed",
                rank=self._rank,
                generation=view.generation,
                servers=self.servers,
                instead_of=list(before),
            )
        return [server for server, number in self._servers.items() if before.get(server, number) != number]

    def interrupt(self) -> None:
        """(notice thread) Interrupts the trainer's thread if it waits for the log."""
        if self._writer is not None:
            self._writer.interrupt()

    def close(self) -> None:
        """Closes the log at once and discards records that are not acknowledged."""
        if self._writer is not None:
            self._writer.close(0.0)

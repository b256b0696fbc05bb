"""The log that this rank writes: the servers that keep it, and whether all that the rank has done is in it.

    (FORMING, RECOVERING) ``open``, before the generation's groups are built
    (PLANNING)            ``enter``: under the new generation, on the servers that it names, flushed
    (notice thread)       ``interrupt`` ends the waits in it

Before it is opened, nothing was written.
"""

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogError, ReplayRefused, ServiceError, SwiftError
from swift_ft.log.sender import WriterStats
from swift_ft.log.sidecar_client import Writer, open_writer
from swift_ft.train.boundary_log import Channel
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member, own_servers

FLUSH_TIMEOUT_S = 60.0


def log_totals(writer: Writer) -> dict[str, int]:
    """What was logged so far, and what of it was found equal to what the log had."""
    stats = writer.stats
    return {"records": stats.records, "bytes": stats.bytes, "verified": stats.verified}


class OwnLog:
    """One rank's. Trainer's thread, but for `interrupt`, `stats` and `queued_bytes`."""

    def __init__(self, rank: int, config: SessionConfig, member: Member, channel: Channel) -> None:
        self._rank = rank
        self._config = config
        self._member = member
        self._channel = channel
        self._writer: Writer | None = None
        self._servers: dict[str, int] = {}  # with their numbers
        self._refusal: SwiftError | None = None
        self.servers_of_job: list[str] = []
        """All that the View named last."""

    @property
    def opened(self) -> bool:
        return self._writer is not None

    @property
    def writer(self) -> Writer:
        """Of a log that was opened."""
        assert self._writer is not None, "the log is opened with the first generation's groups"
        return self._writer

    @property
    def servers(self) -> list[str]:
        """Those that keep what this rank writes."""
        return list(self._servers)

    @property
    def stats(self) -> WriterStats:
        """(any thread)"""
        writer = self._writer
        return WriterStats() if writer is None else writer.stats

    @property
    def queued_bytes(self) -> int:
        """(any thread) What the log has not acknowledged yet."""
        writer = self._writer
        return 0 if writer is None else writer.queued_bytes

    def open(self, view: pb.View) -> None:
        """Before this generation's first step; a log that is open stays so."""
        self.servers_of_job = list(view.log_servers)
        if self._writer is None:
            self._place(view)
            self._writer = open_writer(
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
            self._channel.open(self._writer)
        elif view.state == pb.FORMING:
            # Somebody was lost before the job has run: nothing is logged yet.
            emptied = self._place(view)
            self._writer.set_generation(view.generation, self.servers, emptied)

    def enter(self, view: pb.View) -> SwiftError | None:
        """All that was written is acknowledged under the new generation; or why it is not.

        The coordinator asks the log itself what it has, and plans without the rest. If it is still so when training
        goes on, this rank refuses then (`why_incomplete`); its state is not lost over it.
        """
        emptied = self._place(view)
        trouble: SwiftError | None = None
        try:
            self.writer.set_generation(view.generation, self.servers, emptied)
            self.writer.flush(FLUSH_TIMEOUT_S)
        except (ServiceError, LogError, ReplayRefused) as error:
            trouble = error
        incomplete = self.why_incomplete()  # also if there is another reason: it is told only once
        trouble = trouble or incomplete
        if trouble is not None:
            events.emit("log_incomplete", rank=self._rank, generation=view.generation, reason=str(trouble))
        return trouble

    def why_incomplete(self) -> SwiftError | None:
        """Why the log lacks, or contradicts, what this rank has done."""
        self._refusal = self._refusal or self.writer.unlogged.refusal()
        return self._refusal

    def done_again(self) -> None:
        """What it lacked or contradicted was given up, and is logged anew."""
        self.writer.unlogged.refusal()
        self._refusal = None

    def _place(self, view: pb.View) -> list[str]:
        """Takes the servers that the View names for what this rank writes. Gives those that were emptied since."""
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
        """(notice thread) Frees the trainer's thread if it waits for the log."""
        if self._writer is not None:
            self._writer.interrupt()

    def close(self) -> None:
        """What is not acknowledged is given up."""
        if self._writer is not None:
            self._writer.close(0.0)

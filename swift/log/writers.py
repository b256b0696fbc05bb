"""What a session writes its log with: one protocol, the two writers behind it, and the choice between them."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from swift.log import ring
from swift.log.lending import Lending
from swift.log.record import RecordKey
from swift.log.sidecar_client import SidecarWriter
from swift.log.sidecar_supervisor import ENV_OFF
from swift.log.stats import WriterStats
from swift.log.unlogged import Unlogged
from swift.log.writer import LogWriter


class Writer(Protocol):
    """All streams that one rank writes, to each of the servers that keep a copy.

    (channel)   ``append``, or ``lending.append_at``, for every tensor
    (restorer)  ``expect`` → … ``unlogged.lacks`` → ``declare``; ``restart`` where the log begins anew
    (engine)    ``interrupt`` (a notice) → ``set_generation`` → ``flush`` (the report) …; ``forget_below`` after a step

    A record that the log has is compared and not sent; what goes wrong in the background is raised by the next
    ``append`` or ``flush``. `swift.log.writer.LogWriter` says it in full; both do the same.
    """

    drops: bool
    """When the queue is full, records are dropped, and their steps declared unlogged."""
    unlogged: Unlogged
    """What was not logged: asked, and added to, by the engine and the restorer."""

    @property
    def lending(self) -> Lending | None:
        """None: bodies are copied by the caller, for ``append``."""

    @property
    def pid(self) -> int | None:
        """Of the process that does the work; None: this one does."""

    @property
    def stats(self) -> WriterStats:
        """What it has done so far. (any thread)"""

    @property
    def queued_bytes(self) -> int:
        """What waits, and what no server has acknowledged. (any thread)"""

    def append(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        body: memoryview | bytes | bytearray,
        *,
        keep: bool = False,
    ) -> bool:
        """Takes a tensor into the log; waits while the queue is full. False: it was dropped; never with ``keep``."""

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes], server: str = "") -> None:
        """What one server, or every one, holds: these keys are compared, and not sent there. RecordCorrupt."""

    def declare(self) -> None:
        """Puts the marks that are due into the queue, and does not wait for the log."""

    def flush(self, timeout_s: float) -> None:
        """Returns when all that was appended is durable. ServiceError in time."""

    def await_ready(self) -> None:
        """Returns once what was appended goes out by itself. Nobody has to wait for it."""

    def interrupt(self) -> None:
        """(any thread) Blocked and later calls of append and flush raise LogInterrupted, until set_generation."""

    def set_generation(
        self, generation: int, servers: Sequence[str] = (), emptied: Collection[str] = ()
    ) -> None:
        """Goes on under it, with these servers; errors are forgotten, what was not acknowledged comes again."""

    def restart(self, generation: int) -> None:
        """As set_generation, with a log that is empty: nothing comes again, and nothing is known."""

    def forget_below(self, step: int) -> None:
        """Keys of older steps will not come again."""

    def close(self, flush_timeout_s: float = 10.0) -> None:
        """Flushes, unless it is given no time, and ends."""


def open_writer(
    servers: Sequence[str],
    job: str,
    generation: int,
    *,
    lease: Mapping[str, Any] | None = None,
    **options: Any,
) -> Writer:
    """A SidecarWriter, unless it is switched off or the machine cannot have one. `options`: those of `LogWriter`.

    `lease`: which one the sidecar keeps besides (`swift.log.lease`); without a sidecar, nobody does.
    """
    if os.environ.get(ENV_OFF) == "1" or not ring.available():
        return LogWriter(servers, job, generation, **options)
    return SidecarWriter(servers, job, generation, lease=lease, **options)

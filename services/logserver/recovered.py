"""What the storage finds at the start."""

from dataclasses import dataclass, field

from services.logserver.streams import Hole, IndexEntry
from swift.log.manifest import JobMeta


@dataclass(slots=True)
class RecoveredStream:
    name: str
    first: int
    next_sequence: int
    entries: list[IndexEntry]
    holes: list[Hole]
    quarantined: str = ""
    torn_bytes: int = 0


@dataclass(slots=True)
class RecoveredJob:
    name: str
    meta: JobMeta = field(default_factory=JobMeta)
    streams: list[RecoveredStream] = field(default_factory=list)
    apart: str = ""
    """Why nothing is done for it; then nothing else is known."""

"""What the storage finds at the start."""

from dataclasses import dataclass

from services.logserver.core import Entry, Hole
from swift.log.manifest import JobMeta


@dataclass(slots=True)
class RecoveredStream:
    name: str
    first: int
    next_sequence: int
    entries: list[Entry]
    holes: list[Hole]
    quarantined: str = ""
    torn_bytes: int = 0


@dataclass(slots=True)
class RecoveredJob:
    name: str
    meta: JobMeta
    streams: list[RecoveredStream]

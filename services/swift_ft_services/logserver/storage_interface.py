"""The seam between the log server and where its records rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from swift_ft.log.frame import Bytes
from swift_ft.log.manifest import JobMeta
from swift_ft_services.logserver.core import Hole, IndexEntry

# What the storage finds at the start.


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


@dataclass(frozen=True, slots=True)
class Write:
    """One accepted frame on its way to the disk."""

    job: str
    stream: str
    sequence: int
    frame: Sequence[Bytes]
    """Its bytes, in one or more pieces."""
    mends: bool = False
    """It goes where the same record is, damaged."""

    @property
    def size(self) -> int:
        return sum(map(len, self.frame))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame begins."""

    path: Path
    offset: int
    end_sequence: int
    """Frames of the sequences up to here follow each other in this file."""

    def behind(self, size: int) -> "Place":
        return replace(self, offset=self.offset + size)


class Storage(Protocol):
    """Keeps frames and manifests. Raises StorageError. One caller writes; one makes files beside it; any may read."""

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        """Writes frames, in order; with ``sync`` all that was ever committed is durable after it. What mends is so at
        once; gives what does not fit its place."""

    def has_file(self, job: str, stream: str, sequence: int) -> bool:
        """Whether this record goes into a file that is there, with room in it. No I/O."""

    def make_file(self, job: str, stream: str, sequence: int) -> None:
        """Makes the file that this record will begin, durably, beside commits of other jobs."""

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        """Where a record is. FileNotFoundError if it was removed."""

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        """So many bytes from there on, in ``buffer``: page-aligned, and two blocks larger. OSError."""

    def save(self, job: str, meta: JobMeta) -> None:
        """Makes this the job's manifest, durably."""

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Gives back space of sequences below; the manifest says already that they are dropped."""

    def drop(self, job: str) -> Callable[[], None]:
        """Forgets a job, durably. What it gives removes the files, whenever that suits. The job is not written
        meanwhile."""

    def give_back(self, job: str) -> None:
        """Space that was taken ahead, for what nobody writes now. OSError."""

    def close(self) -> None:
        """Seals and closes everything."""

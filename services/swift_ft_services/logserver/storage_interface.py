"""Interface between the log server and its storage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from swift_ft.log.manifest import JobMeta
from swift_ft_services.logserver.core import JobState, StreamState
from swift_ft_services.logserver.shared_memory import Part


@dataclass(slots=True)
class RecoveredJob:
    """State of a job that the storage has recovered at the start."""

    state: JobState
    """Its streams; all else is in ``meta``."""
    meta: JobMeta = field(default_factory=JobMeta)
    torn_bytes: Counter[str] = field(default_factory=Counter)
    """Stream -> bytes of its torn tail, which was cut."""
    apart: str = ""
    """Reason why the job is quarantined; all other fields are empty then."""

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def streams(self) -> list[StreamState]:
        return list(self.state.streams.values())


@dataclass(frozen=True, slots=True)
class Write:
    job: str
    stream: str
    sequence: int
    frame: Sequence[Part]
    """Bytes of the frame, in one or more pieces."""
    mends: bool = False
    """The frame replaces a damaged copy of the same record in place."""

    @property
    def size(self) -> int:
        return sum(map(len, self.frame))


@dataclass(frozen=True, slots=True)
class Place:
    path: Path
    offset: int
    end_sequence: int
    """Exclusive end of the sequences whose frames follow each other in this file."""
    key: str = ""
    """The object that has the file's content, if it was moved to the cold tier."""

    def behind(self, size: int) -> "Place":
        return replace(self, offset=self.offset + size)


class Storage(Protocol):
    """Store of frames and manifests. Raises StorageError. One thread writes, one creates files concurrently, any may
    read."""

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        """Writes frames, in order. With ``sync``, everything ever committed is durable afterwards. Frames that mend are
        always synced. Returns the mending frames that do not fit their place. Raises BodyChanged as well, with no
        new record written."""

    def has_file(self, job: str, stream: str, sequence: int) -> bool:
        """Returns whether an existing file with room takes this record. No I/O."""

    def make_file(self, job: str, stream: str, sequence: int) -> None:
        """Durably creates the file that this record will begin, concurrently with commits of other jobs."""

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        """Returns the place of a record. Raises FileNotFoundError if it was removed."""

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        """Reads ``size`` bytes into ``buffer``, page-aligned and two blocks larger. Raises OSError."""

    def descriptor(self, place: Place) -> int:
        """Returns a read-only descriptor of its file. Raises OSError if there is none."""

    def save(self, job: str, meta: JobMeta) -> None: ...

    def cold_folder(self, job: str) -> str:
        """Returns where the job's moved segments are; empty if none are moved."""

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        """Frees the space of sequences below, which the manifest records as dropped. Returns the freed bytes."""

    def drop(self, job: str) -> Callable[[], None]:
        """Durably forgets a job, which is not written meanwhile. Returns a function that removes its files."""

    def give_back(self, job: str) -> None:
        """Frees space that was reserved for the job's open files. Raises OSError."""

    def close(self) -> None: ...

"""A Storage in memory that fails when it is told to."""

from collections.abc import Callable, Sequence
from pathlib import Path

from swift_ft.log.manifest import JobMeta
from swift_ft_services.logserver.segments import StorageFailed, StorageFull
from swift_ft_services.logserver.storage_interface import Place, Write


class MemoryStorage:
    """Keeps frames in dictionaries. ``space`` bytes are left; ``failing`` breaks every write."""

    def __init__(self, space: int = 1 << 40) -> None:
        self.space = space
        self.failing = ""
        self.frames: dict[tuple[str, str], dict[int, bytes]] = {}
        self.metas: dict[str, JobMeta] = {}
        self.unsynced = 0
        self.commits: list[tuple[int, bool]] = []
        self.closed = False
        self.given_back: list[str] = []
        self.made: set[tuple[str, str, int]] = set()
        """Files that were made ahead, and no record is in them."""

    def commit(self, writes: Sequence[Write], sync: bool) -> list[Write]:
        self._check()
        size = sum(write.size for write in writes)
        if size > self.space:
            raise StorageFull("no space left: made up; free some, or trim the log")
        self.space -= size
        for write in writes:
            stream = self.frames.setdefault((write.job, write.stream), {})
            assert write.mends or write.sequence not in stream, "a record is written once"
            stream[write.sequence] = b"".join(map(bytes, write.frame))
            self.made.discard((write.job, write.stream, write.sequence))
        self.unsynced = 0 if sync else self.unsynced + len(writes)
        self.commits.append((len(writes), sync))
        return []

    def has_file(self, job: str, stream: str, sequence: int) -> bool:
        return (job, stream, sequence) in self.made or sequence - 1 in self.frames.get((job, stream), {})

    def make_file(self, job: str, stream: str, sequence: int) -> None:
        self._check()
        self.made.add((job, stream, sequence))

    def locate(self, job: str, stream: str, sequence: int) -> Place:
        if sequence not in self.frames.get((job, stream), {}):
            raise FileNotFoundError(f"record {sequence}")
        return Place(Path(job, stream, str(sequence)), 0, sequence + 1)

    def cold_folder(self, job: str) -> str:
        return ""

    def descriptor(self, place: Place) -> int:
        raise OSError("there is no file")

    def read(self, place: Place, size: int, buffer: memoryview) -> memoryview:
        job, stream, sequence = place.path.parts
        frame = self.frames.get((job, stream), {}).get(int(sequence))
        if frame is None:
            raise FileNotFoundError(str(place.path))
        found = frame[place.offset : place.offset + size]
        buffer[: len(found)] = found
        return buffer[: len(found)]

    def save(self, job: str, meta: JobMeta) -> None:
        self._check()
        self.metas[job] = meta

    def remove(self, job: str, stream: str, below_sequence: int) -> int:
        frames = self.frames.get((job, stream), {})
        dead = [sequence for sequence in frames if sequence < below_sequence]
        freed = sum(len(frames.pop(sequence)) for sequence in dead)
        self.space += freed
        return freed

    def drop(self, job: str) -> Callable[[], None]:
        self._check()
        gone = [self.frames.pop(stream) for stream in list(self.frames) if stream[0] == job]
        self.metas.pop(job, None)

        def remove_files() -> None:
            self.space += sum(len(frame) for frames in gone for frame in frames.values())

        return remove_files

    def give_back(self, job: str) -> None:
        self.given_back.append(job)

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.failing:
            raise StorageFailed(self.failing)

"""A server's storage in a directory, as its process begins there, works and ends; and the records of one stream."""

import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from swift_ft.log.manifest import JobMeta
from swift_ft.log.segment import BLOCK_BYTES, SEGMENT_HEADER_BYTES
from swift_ft_services.logserver.core import StreamState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import RecoveredJob, Storage, Write
from tests.unit.log.frames import JOB, STREAM, frame_of

FRAME = len(frame_of(0)[1])
FIVE_A_SEGMENT = SEGMENT_HEADER_BYTES + 5 * FRAME

_there: list[DirectoryStorage] = []


class OnDisk(DirectoryStorage):
    """It is gone at the end of the test, as after `crash`."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 20, **options: Any) -> None:
        super().__init__(directory, segment_bytes, **options)
        _there.append(self)

    def close(self) -> None:
        _there.remove(self)
        super().close()


def on_disk(
    directory: Path, segment_bytes: int = 1 << 20, *, generation: int = 1, records: int = 0, **options: Any
) -> OnDisk:
    """`records`: so many are committed, one after the other."""
    storage = OnDisk(directory, segment_bytes, **options)
    if not storage.recover():
        storage.save(JOB, JobMeta(generation=generation))
    for sequence in range(records):
        storage.commit([write(sequence)], sequence == records - 1)
    return storage


def left_by_a_kill(directory: Path, records: int, generation: int = 1) -> Path:
    """The file of a server that was killed behind that many records."""
    crash(on_disk(directory, records=records, generation=generation))
    (path,) = files(directory)
    return path


def reopened(directory: Path, segment_bytes: int = 1 << 20, **options: Any) -> tuple[OnDisk, StreamState]:
    """One that begins on what is left of a job with one stream, and what it finds of it."""
    storage = OnDisk(directory, segment_bytes, **options)
    (job,) = storage.recover()
    (stream,) = job.streams
    return storage, stream


def crash(storage: DirectoryStorage) -> None:
    """The process is gone: no footer, no manifest; only the lock is free again."""
    _there.remove(storage)
    for segments in storage._streams.values():
        for segment in segments:
            if segment.file is not None:
                segment.file.close()
    storage._acked.close()
    storage._disk.close()


def crash_all() -> None:
    for storage in list(_there):
        crash(storage)


def recovered_job(directory: Path) -> RecoveredJob:
    """What a server finds that starts on a copy of the directory."""
    copy = directory.with_name(directory.name + "-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy, symlinks=True)
    storage = OnDisk(copy)
    jobs = storage.recover()
    crash(storage)
    assert not jobs[0].apart, jobs[0].apart
    return jobs[0]


def recovered(directory: Path, stream: str = STREAM) -> StreamState:
    return recovered_job(directory).state.streams[stream]


def spans(stream: StreamState) -> list[tuple[int, int]]:
    """Of its holes."""
    return [(hole.sequence, hole.end_sequence) for hole in stream.holes]


def sequences(found: StreamState) -> list[int]:
    return list(found.by_sequence)


def files(directory: Path, stream: str = STREAM) -> list[Path]:
    return sorted((directory / JOB / stream).glob("*.seg"))


def firsts(directory: Path) -> list[int]:
    """The records that its files begin with."""
    return [int(path.stem) for path in files(directory)]


def write(sequence: int, stream: str = STREAM) -> Write:
    return Write(JOB, stream, sequence, [frame_of(sequence, stream=stream)[1]])


def fill(storage: Storage, begin: int, end: int, stream: str = STREAM) -> None:
    for sequence in range(begin, end):
        storage.commit([write(sequence, stream)], True)


def frame_in(storage: Storage, stream: str, sequence: int, job: str = JOB) -> bytes:
    place = storage.locate(job, stream, sequence)
    with mmap.mmap(-1, 3 * BLOCK_BYTES) as memory, memoryview(memory) as buffer:
        return bytes(storage.read(place, FRAME, buffer))


def check_frames(storage: Storage, begin: int, end: int, stream: str = STREAM) -> None:
    for sequence in range(begin, end):
        assert frame_in(storage, stream, sequence) == frame_of(sequence, stream=stream)[1], sequence


def failing(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def failing_calls(**numbers: int) -> AbstractContextManager[object]:
    """Of `os`: each fails with this error."""
    return mock.patch.multiple(os, **{name: failing(number) for name, number in numbers.items()})

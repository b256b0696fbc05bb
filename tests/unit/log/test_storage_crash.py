"""A crash at every system call of a storage's life: nothing that was acknowledged is ever lost.

The workload commits, rolls segments, makes some ahead, trims and removes. Before each system call that changes the
disk the directory is copied, twice: as a killed process leaves it (all that was written), and as a power cut may
leave it (what was synced, and of the rest a part that a seed draws). A storage that starts on the copy must find
every acknowledged record, no hole, and the newest manifest that was acknowledged.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swift_ft.log.manifest import JobMeta, StreamMeta
from swift_ft.log.segment import SEGMENT_HEADER_BYTES
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.test_storage import frame_in

FRAME = len(frame_of(0)[1])
THREE_A_SEGMENT = SEGMENT_HEADER_BYTES + 3 * FRAME
CHANGES = ("pwritev", "fdatasync", "fsync", "rename", "unlink", "mkdir", "ftruncate")


class Recorder:
    """Copies the directory before each system call that changes it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.acknowledged = -1  # the last durable sequence
        self.generation = 0
        self.first = 0  # what the manifest that is being written may drop
        self.crashes: list[tuple[str, dict[str, bytes], int, int, int]] = []
        self.synced: dict[str, bytes] = {}  # path -> content that a sync has made safe
        self.entries: set[str] = set()  # paths whose directory was synced since they were made

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and not path.is_symlink()
        }

    def power_cut(self) -> dict[str, bytes]:
        left = {}
        for name, content in self.files().items():
            if name not in self.entries and self.random.random() < 0.5:
                continue  # its directory entry never reached the disk
            safe = self.synced.get(name, b"")
            if content.startswith(safe):
                left[name] = content[: self.random.randint(len(safe), len(content))]
            else:  # it was written anew, or cut, since
                left[name] = self.random.choice([safe, content])
        return left

    def note(self, call: str) -> None:
        for kind, state in [("kill", self.files()), ("power", self.power_cut())]:
            self.crashes.append(
                (f"{kind} before {call}", state, self.acknowledged, self.generation, self.first)
            )

    def did(self, call: str, path: Path) -> None:
        name = str(path.relative_to(self.root)) if path.is_relative_to(self.root) else ""
        if call in ("fdatasync", "fsync") and path.is_file():
            self.synced[name] = path.read_bytes()
        elif call == "fsync":
            self.entries |= {str(child.relative_to(self.root)) for child in path.iterdir()}
        elif call == "rename":
            # Journalling file systems keep the order of a rename and the sync of what it renames.
            target = path.with_name(path.name.removesuffix(".new"))
            self.synced[str(target.relative_to(self.root))] = target.read_bytes()
        elif call == "unlink":
            self.synced.pop(name, None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            real: Callable[..., Any] = getattr(os, name)

            def spy(*args: Any, name: str = name, real: Callable[..., Any] = real, **more: Any) -> Any:
                by_descriptor = isinstance(args[0], int)
                path = Path(os.readlink(f"/proc/self/fd/{args[0]}") if by_descriptor else args[0])
                recorder.note(f"{name} {path.name}")
                out = real(*args, **more)
                recorder.did(name, path)
                return out

            patch.setattr(os, name, spy)
        yield


def workload(storage: DirectoryStorage, recorder: Recorder) -> None:
    meta = JobMeta(1)
    storage.save(JOB, meta)
    recorder.generation = 1
    sequence = 0
    for generation in (2, 3):
        for size in (1, 2, 3, 1):
            batch = [
                Write(JOB, STREAM, sequence + index, [frame_of(sequence + index)[1]]) for index in range(size)
            ]
            if size > 1:
                storage.make_file(JOB, STREAM, sequence)
            storage.commit(batch, True)
            sequence += size
            recorder.acknowledged = sequence - 1
        recorder.first = sequence - 2
        meta = JobMeta(generation, sequence - 2, {STREAM: StreamMeta(sequence - 2, sequence, "")})
        storage.save(JOB, meta)
        recorder.generation = generation
        storage.remove(JOB, STREAM, sequence - 2)
    recorder.first = sequence
    storage.save(JOB, JobMeta(4, sequence, {STREAM: StreamMeta(sequence, sequence, "")}))
    recorder.generation = 4
    storage.remove(JOB, STREAM, sequence)
    storage.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fault_25_a_crash_at_every_system_call(tmp_path: Path, seed: int) -> None:
    recorder = Recorder(tmp_path / "data", seed)
    storage = DirectoryStorage(tmp_path / "data", THREE_A_SEGMENT)
    storage.recover()
    # The reserve is left out: its megabyte is copied at each call otherwise.
    (tmp_path / "data" / ".reserve").unlink()
    recorder.entries |= set(recorder.files())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectoryStorage, "_reserve", lambda self: None)
        with recording(recorder):
            workload(storage, recorder)
        assert len(recorder.crashes) > 60
        for name in ("fsync", "fdatasync"):  # the copies are not worth it
            patch.setattr(os, name, lambda fd: None)
        for what, state, acknowledged, generation, first in recorder.crashes:
            check(tmp_path / "copy", what, state, acknowledged, generation, first)


def check(
    root: Path, what: str, state: dict[str, bytes], acknowledged: int, generation: int, first: int
) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, content in state.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    again = DirectoryStorage(root, THREE_A_SEGMENT)
    jobs = again.recover()
    if not jobs:
        assert generation == 0, what
        again.close()
        return
    (job,) = jobs
    assert job.meta.generation >= generation, what
    if not job.streams:
        assert acknowledged < 0, what
    for stream in job.streams:
        assert not stream.holes, (what, stream.holes)
        assert stream.appended > acknowledged, what
        assert stream.first <= first, what
        found = list(stream.by_sequence)
        assert found == list(range(stream.first, stream.appended)), what
        for entry in stream.by_sequence.values():
            frame = frame_in(again, STREAM, entry.sequence)
            assert frame == frame_of(entry.sequence)[1], what
        # And it goes on from there.
        again.commit([Write(JOB, STREAM, stream.appended, [frame_of(stream.appended)[1]])], True)
    again.close()

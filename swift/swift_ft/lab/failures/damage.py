"""Bit flips in files that are in use: the live log (``corrupt=log``) and a checkpoint (``corrupt=checkpoint``).

So that they come in time, victims wait where they are to die (`HeldVictims`).
"""

import os
import random
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swift_ft.fault_grammar import BEFORE_A_LOSS, Fault, fault_id, held_together
from swift_ft.files import open_regular
from swift_ft.log import segment
from swift_ft.log.directory import SEGMENTS
from swift_ft.text import generation_of, version_folder

BOUNDARIES, EXTERNAL = "s*.[FB]", "s*.[XT]"
"""Glob patterns of streams: between stages; and external inputs, the only streams of a one-stage pipeline."""


def segment_files(log_directories: Iterable[Path], stream: str = BOUNDARIES) -> Iterator[Path]:
    """Yields the segments of all jobs that hold more than a header, the smallest first, so that a copy is cheap."""
    sized = []
    for path in (p for place in log_directories for p in place.glob(f"*/{stream}/{SEGMENTS}")):
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue  # trimmed meanwhile
        if stat.S_ISREG(facts.st_mode) and facts.st_size > segment.SEGMENT_HEADER_BYTES:
            sized.append((facts.st_size, path))
    return (path for _, path in sorted(sized))


def corrupt_checkpoint(directory: Path, rank: int, version: int, seed: int) -> dict[str, Any] | None:
    """Flips a bit in the newest tensors file that this rank saved at this version. Returns None if there is none."""
    files = directory.glob(f"{version_folder(version)}/rank{rank}/g*/*.safetensors")
    shards = {
        path: generation for path in files if (generation := generation_of(path.parent.name)) is not None
    }
    newest = max(shards, key=lambda path: (shards[path], path), default=None)
    if newest is None or not newest.stat().st_size:
        return None
    bit = random.Random(seed).randrange(newest.stat().st_size * 8)
    flip(newest, bit)
    return {"rank": rank, "version": version, "file": str(newest.relative_to(directory)), "bit": bit}


def flip(path: Path, bit: int) -> None:
    """Flips one bit of a file in place."""
    fd = open_regular(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, bit // 8)
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(fd)


def corrupt_stream(
    log_directories: Sequence[Path], stream: str, step: int, seed: int
) -> dict[str, Any] | None:
    """Flips a bit in the body of a live record of the newest step below `step`: the replay needs that record.

    Avoids the file's last block: the server holds it in memory and would overwrite the damage.
    Returns None if the log has no record of step - 1 in that stream yet.
    """
    for path in segment_files(log_directories, stream):
        records = segment.walk(path, verify_bodies=False).records
        settled = (path.stat().st_size - 1) // segment.BLOCK_BYTES * segment.BLOCK_BYTES
        bodies = []
        for record in records:
            begin = record.offset + record.header.header_bytes
            body = range(begin, min(begin + record.header.stored_bytes, settled))
            if record.header.key.step == step - 1 and body:
                bodies.append((record, body))
        if not bodies:
            continue
        generator = random.Random(seed)
        record, body = generator.choice(bodies)
        bit = generator.choice(body) * 8 + generator.randrange(8)
        flip(path, bit)
        return {"stream": stream, "file": path.name, "bit": bit, "record": str(record.header.key)}
    return None


class HeldVictims:
    """Ranks that wait where they are to die: each writes ``<id>.reached`` and waits for ``<id>.go``."""

    def __init__(self, directory: Path, faults: Sequence[Fault]) -> None:
        self.groups = held_together(faults)
        """Indices of faults that are released together, of those not released yet."""
        self._directory = directory
        self._faults = faults
        self._since: dict[int, float] = {}

    def reached(self, index: int) -> bool:
        if not (self._directory / f"{fault_id(index)}.reached").exists():
            return False
        self._since.setdefault(index, time.monotonic())
        return True

    def waited_s(self, index: int) -> float:
        """Returns for how long it has been seen to wait."""
        return time.monotonic() - self._since.get(index, time.monotonic())

    def release(self, index: int) -> None:
        (self._directory / f"{fault_id(index)}.go").touch(0o600)

    def turn(self, done: Collection[int], patience_s: Callable[[list[int], list[int]], float]) -> None:
        """(called periodically) Releases the victims of one step together, once everything injected before their death
        is done. `done`: indices of what was injected. `patience_s`: (a step's victims, those that wait) -> how long
        these wait for the others."""
        self.groups = [group for group in self.groups if not self._released(group, done, patience_s)]

    def _released(
        self, group: list[int], done: Collection[int], patience_s: Callable[[list[int], list[int]], float]
    ) -> bool:
        there = [index for index in group if self.reached(index)]
        step = getattr(self._faults[group[0]], "step", None)
        before = [n for n, f in enumerate(self._faults) if isinstance(f, BEFORE_A_LOSS) and f.step == step]
        if not there or not set(before) <= set(done):
            return False
        if len(there) < len(group) and max(map(self.waited_s, there)) < patience_s(group, there):
            return False
        for index in group:  # victims that arrive later do not wait any more
            self.release(index)
        return True

"""Negative controls: a flipped bit in a log must be noticed, or a PASS says nothing.

Every drill copies a segment file of its run, flips one bit of the copy and reads it back (`snapshot`,
`flip_and_read`). A drill with ``corrupt=log`` flips one in the live log under a replay (`corrupt_stream`), one with
``corrupt=checkpoint`` in the newest checkpoint of a rank (`corrupt_checkpoint`).
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swift.errors import LogError
from swift.log import segment

FILES_TRIED_MAX = 32

BOUNDARIES, EXTERNAL = "s*.[FB]", "s*.[XT]"
"""Streams between stages; and, all there is in a pipeline of one stage, what comes from outside."""


def segment_files(log_directories: Iterable[Path], stream: str = BOUNDARIES) -> Iterator[Path]:
    """Of every job, those with anything behind their header, the smallest first: a copy should cost little."""
    sized = []
    for path in (p for place in log_directories for p in place.glob(f"*/{stream}/*{segment.SUFFIX}")):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue  # trimmed meanwhile
        if size > segment.SEGMENT_HEADER_BYTES:
            sized.append((size, path))
    return (path for _, path in sorted(sized))


def snapshot(log_directories: Sequence[Path], into: Path) -> Path | None:
    """A copy of a segment file with at least one record. None: there is none yet."""
    into.mkdir(parents=True, exist_ok=True)
    files = (*segment_files(log_directories), *segment_files(log_directories, EXTERNAL))
    for path in files[:FILES_TRIED_MAX]:
        # The file's name is part of its format: it is the first sequence.
        copy = into / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(path, copy)
            if segment.scan(copy).records:
                return copy
        except (FileNotFoundError, LogError):
            # Trimmed while it was copied; or corrupt already, which is for the run itself to notice.
            pass
        copy.unlink(missing_ok=True)
    return None


def logged_bytes(log_directories: Iterable[Path]) -> dict[str, dict[int, int]]:
    """(the services have ended) stream -> step -> raw bytes of its records; of each the most that one server has."""
    bytes_of: dict[str, dict[int, int]] = {}
    for directory in log_directories:
        here: dict[str, Counter[int]] = {}
        for path in segment_files([directory], "*"):
            steps = here.setdefault(path.parent.name, Counter())
            for record in segment.walk(path, verify_bodies=False).records:
                steps[record.header.key.step] += record.header.raw_bytes
        for stream, steps in here.items():
            most = bytes_of.setdefault(stream, {})
            for step, size in steps.items():
                most[step] = max(size, most.get(step, 0))
    return bytes_of


def checkpoint_bytes(directory: Path) -> dict[int, int]:
    """rank -> bytes of its newest checkpoint."""
    bytes_of: dict[int, int] = {}
    for shard in sorted(directory.glob("v*/rank*")):  # ascending versions
        bytes_of[int(shard.name[4:])] = sum(p.stat().st_size for p in shard.rglob("*") if p.is_file())
    return bytes_of


def corrupt_checkpoint(directory: Path, rank: int, version: int, seed: int) -> dict[str, Any] | None:
    """Flips a bit of the tensors that this rank has saved at this version. None: they are not there."""
    files = sorted(directory.glob(f"v{version:08d}/rank{rank}/g*/*.safetensors"))
    if not files or not files[-1].stat().st_size:
        return None
    bit = random.Random(seed).randrange(files[-1].stat().st_size * 8)
    flip(files[-1], bit)
    return {"rank": rank, "version": version, "file": str(files[-1].relative_to(directory)), "bit": bit}


def flip_and_read(copy: Path | None, seed: int) -> dict[str, Any]:
    """`negative_control` of the report: is a flipped bit refused where the unflipped file is read?"""
    if copy is None:
        return {"caught": None, "reason": "the run left no segment file to try it on"}
    whole = segment.scan(copy)
    bit = random.Random(seed).randrange(whole.end * 8)
    shown = {"file": f"{copy.parent.name}/{copy.name}", "bit": bit, "records": len(whole.records)}
    flip(copy, bit)
    try:
        segment.scan(copy)
    except LogError as error:
        # Without the directory: what a report says does not depend on where the run lay.
        return {"caught": True, **shown, "refused": str(error).replace(f"{copy.parent}/", "")}
    finally:
        flip(copy, bit)
    return {"caught": False, **shown}


def flip(path: Path, bit: int) -> None:
    """Turns one bit of a file over, in place."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(fd, 1, bit // 8)
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(fd)


def corrupt_stream(
    log_directories: Sequence[Path], stream: str, step: int, seed: int
) -> dict[str, Any] | None:
    """Flips a bit in the body of a live record of the newest step below `step`: the replay needs that record.

    Not in the file's last block: the server holds that one in memory, and would write it again as it was.
    None: the log has no record of step - 1 in that stream yet.
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

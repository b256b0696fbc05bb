"""Bits that are flipped in what is in use: the live log (``corrupt=log``), a checkpoint (``corrupt=checkpoint``)."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swift.log import segment

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


def corrupt_checkpoint(directory: Path, rank: int, version: int, seed: int) -> dict[str, Any] | None:
    """Flips a bit of the tensors that this rank has saved at this version. None: they are not there."""
    files = sorted(directory.glob(f"v{version:08d}/rank{rank}/g*/*.safetensors"))
    if not files or not files[-1].stat().st_size:
        return None
    bit = random.Random(seed).randrange(files[-1].stat().st_size * 8)
    flip(files[-1], bit)
    return {"rank": rank, "version": version, "file": str(files[-1].relative_to(directory)), "bit": bit}


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

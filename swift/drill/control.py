"""Negative controls: a flipped bit in a log must be noticed, or a PASS says nothing.

Every drill copies a segment file of its run, flips one bit of the copy and reads it back (`snapshot`,
`flip_and_read`). `swift.failures.damage` flips bits of what is in use.
"""

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swift.errors import LogError
from swift.failures.damage import EXTERNAL, flip, segment_files
from swift.log import segment

FILES_TRIED_MAX = 32


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

"""The bytes of the standard library's sources: a fixed choice of the running Python's files, split by file."""

import sysconfig
from pathlib import Path

FILES_MAX, BYTES_MAX = 240, 16_384
"""Files, and bytes of each: about 2 MB."""
HELD_OUT_EVERY = 8
"""Every eighth file is only tested on."""


def sources() -> list[Path]:
    """Of the library's top folder and of its packages, in the order of their names; no tests."""
    top = Path(sysconfig.get_paths()["stdlib"])
    found = [*top.glob("*.py"), *top.glob("[a-z]*/*.py")]
    return sorted(
        path
        for path in found
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.relative_to(top).parts)
    )[:FILES_MAX]


def split() -> tuple[bytes, bytes]:
    """To train on, and held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(sources()):
        parts[number % HELD_OUT_EVERY == 0].append(path.read_bytes()[:BYTES_MAX])
    return b"".join(parts[0]), b"".join(parts[1])

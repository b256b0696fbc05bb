"""How far each stream was acknowledged: the bytes of `.acked` (docs/format.md). The server writes them, others read.

One place of 64 bytes a stream::

     0 16  uid of the job       24  8  records of lower sequences were acknowledged
    16  8  stream tag           32  4  crc32c of 0..32            36 28  zero
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import crc32c

from swift.log.manifest import UID_BYTES
from swift.log.regular import open_regular
from swift.log.segment import SEQUENCE_MAX

NAME = ".acked"
_PLACE = struct.Struct("<16sQQI28s")
_HEAD = struct.Struct("<16sQQ")
PLACE_BYTES = _PLACE.size
_BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 20
FREE = bytes(PLACE_BYTES)
NOTHING: Mapping["Of", int] = MappingProxyType({})

assert _HEAD.size == UID_BYTES + 16

Of = tuple[bytes, int]
"""A job's uid and a stream's tag."""


def encode_place(of: Of, sequence: int) -> bytes:
    head = _HEAD.pack(*of, sequence)
    return (head + struct.pack("<I", crc32c.crc32c(head))).ljust(PLACE_BYTES, b"\0")


def places(size: int, read: Callable[[int, int], bytes]) -> Iterator[tuple[int, Of, int]]:
    """(number, of, sequence) of the places that are sound; ``read(offset, size)`` as of a file of that size."""
    size = min(size, _BYTES_MAX) // PLACE_BYTES * PLACE_BYTES
    for offset in range(0, size, _CHUNK_BYTES):
        chunk = read(offset, min(_CHUNK_BYTES, size - offset))
        if chunk.count(0) == len(chunk):
            continue  # a file may be large and have nothing in it
        for at in range(0, len(chunk) - PLACE_BYTES + 1, PLACE_BYTES):
            place = chunk[at : at + PLACE_BYTES]
            if place == FREE:
                continue
            uid, tag, sequence, crc, _ = _PLACE.unpack(place)
            if crc32c.crc32c(place[: _HEAD.size]) == crc and sequence <= SEQUENCE_MAX:
                yield (offset + at) // PLACE_BYTES, (uid, tag), sequence


def read_acked(directory: Path) -> Mapping[Of, int]:
    """Of a server's directory; empty if it has no such file. OSError: something else is in its place."""
    try:
        fd = open_regular(directory / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return NOTHING
    try:
        size = os.fstat(fd).st_size
        return {of: sequence for _, of, sequence in places(size, lambda at, count: os.pread(fd, count, at))}
    finally:
        os.close(fd)

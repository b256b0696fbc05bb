"""How far each stream was acknowledged, in a file that nobody waits for.

The log's own files cannot tell that their last records are missing: cut on a boundary, they look as if nobody had
written more. So the numbers are noted once more in `.acked`, after each commit and without a sync: whatever ends the
process, the kernel has them; after a power cut they may be behind, and say less than was acknowledged, never more.

One place of 64 bytes a stream::

     0 16  uid of the job       24  8  records of lower sequences were acknowledged
    16  8  stream tag           32  4  crc32c of 0..32            36 28  zero
"""

import errno
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import crc32c

from services.logserver.disk import Disk, File
from swift.log.manifest import UID_BYTES

NAME = ".acked"
_PLACE = struct.Struct("<16sQQI28s")
_HEAD = struct.Struct("<16sQQ")
_BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 20
_FREE = bytes(_PLACE.size)

assert _HEAD.size == UID_BYTES + 16

Of = tuple[bytes, int]
"""A job's uid and a stream's tag."""


class Acked:
    """(one caller at a time) All streams of a server."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._path = directory / NAME
        self._file: File | None = None
        self._places: dict[Of, int] = {}
        self._free: list[int] = []
        self._next_place = 0
        self.sequences: dict[Of, int] = {}
        """As noted; each is exclusive."""

    def open(self) -> None:
        """Reads what was noted. Something else in the file's place is done without, and so is a full disk."""
        try:
            self._file = self._disk.open(self._path)
        except FileNotFoundError:
            with suppress(OSError):
                self._file = self._disk.create(self._path)
            return
        except OSError:
            return
        for at, place in enumerate(self._read(self._file)):
            uid, tag, sequence, crc, _ = _PLACE.unpack(place)
            self._next_place = at + 1
            if place != _FREE and crc32c.crc32c(place[: _HEAD.size]) == crc:
                self._places[uid, tag] = at
                self.sequences[uid, tag] = sequence
            else:
                self._free.append(at)

    @staticmethod
    def _read(file: File) -> Iterator[bytes]:
        size = min(file.size, _BYTES_MAX) // _PLACE.size * _PLACE.size
        for offset in range(0, size, _CHUNK_BYTES):
            chunk = file.read(offset, min(_CHUNK_BYTES, size - offset))
            for at in range(0, len(chunk) - _PLACE.size + 1, _PLACE.size):
                yield chunk[at : at + _PLACE.size]

    def note(self, of: Of, sequence: int) -> None:
        """Everything below was acknowledged, or is about to be."""
        if self._file is None:
            return
        place = self._places.get(of)
        if place is None:
            place = self._free.pop() if self._free else self._next_place
            self._next_place = max(self._next_place, place + 1)
            self._places[of] = place
        self.sequences[of] = sequence
        head = _HEAD.pack(*of, sequence)
        self._put(place, head + struct.pack("<I", crc32c.crc32c(head)))

    def forget(self, uid: bytes) -> None:
        """The job is dropped."""
        for of in [of for of in self._places if of[0] == uid]:
            place = self._places.pop(of)
            self.sequences.pop(of, None)
            self._put(place, _FREE)
            self._free.append(place)

    def _put(self, place: int, data: bytes) -> None:
        assert self._file is not None
        try:
            self._file.note(place * _PLACE.size, data.ljust(_PLACE.size, b"\0"))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._close()  # nobody waits for it, and nobody fails for it

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        self._close()

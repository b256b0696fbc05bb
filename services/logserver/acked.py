"""How far each stream was acknowledged, in a file that nobody waits for.

The log's own files cannot tell that their last records are missing: cut on a boundary, they look as if nobody had
written more. So the numbers are noted once more in `.acked`, after each commit and without a sync: whatever ends the
process, the kernel has them; after a power cut they may be behind, and say less than was acknowledged, never more.
The bytes are those of `swift.log.acked`.
"""

import errno
from contextlib import suppress
from pathlib import Path

from services.logserver.disk import Disk, File
from swift.log.acked import FREE, NAME, PLACE_BYTES, Of, encode_place, places

_FREE_MAX = 1 << 16
"""Free places in a row that are remembered."""


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
        for at, of, sequence in places(self._file.size, self._file.read):
            self._free.extend(range(self._next_place, min(at, self._next_place + _FREE_MAX)))
            self._places[of] = at
            self.sequences[of] = sequence
            self._next_place = at + 1

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
        self._put(place, encode_place(of, sequence))

    def forget(self, uid: bytes) -> None:
        """The job is dropped."""
        for of in [of for of in self._places if of[0] == uid]:
            place = self._places.pop(of)
            self.sequences.pop(of, None)
            self._put(place, FREE)
            self._free.append(place)

    def _put(self, place: int, data: bytes) -> None:
        assert self._file is not None
        try:
            self._file.note(place * PLACE_BYTES, data)
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

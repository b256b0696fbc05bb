"""Files that readers on this machine read themselves. See `swift_ft.log.shared_memory`.

A record that is lent is not read here. Its reader verifies it; if it finds damage, it asks again for records that are
sent, and the server finds the damage then.
"""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swift_ft._pb import log_pb2
from swift_ft.log.shared_memory import FILE, KEY_BYTES, KNOWN, TAKEN
from swift_ft_services.logserver.core import IndexEntry, StreamState
from swift_ft_services.logserver.storage_interface import Place, Storage

_LENT_BYTES = 2 << 20
"""Most bytes of several frames that are read at once."""


@dataclass(slots=True)
class Run:
    """Frames that follow each other in a file."""

    place: Place
    entries: list[IndexEntry]
    size: int


def runs(
    storage: Storage, stream: StreamState, entries: Sequence[IndexEntry], bytes_max: int
) -> Iterator[Run]:
    """Yields where these records are; several together have at most ``bytes_max``. Raises OSError for the first one
    that is in no file."""
    run: Run | None = None
    for entry in entries:
        sequence, size = entry.sequence, entry.frame_bytes
        if run is not None:
            follows = sequence == run.entries[-1].sequence + 1 < run.place.end_sequence
            if follows and run.size + size <= bytes_max:
                run.entries.append(entry)
                run.size += size
                continue
            yield run
        run = Run(storage.locate(stream.job, stream.name, sequence), [entry], size)
    if run is not None:
        yield run


class Lender:
    """The files that one Read call lends. (call's thread) all but ``take``."""

    def __init__(self, storage: Storage) -> None:
        self.key = os.urandom(KEY_BYTES)
        self._storage = storage
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._closed = False
        self._number = 0
        self._lent: tuple[Path, int, int] | None = None
        """The file lent last: its path, device and inode."""

    def take(self, line: socket.socket) -> bool:
        """(any thread) Takes the reader's connection. Returns False if there is one, or the call is over."""
        with self._lock:
            if self._line is not None or self._closed:
                return False
            with suppress(OSError):  # its reader is gone: the next file is not taken either
                line.send(TAKEN)
            self._line = line
            return True

    @property
    def is_ready(self) -> bool:
        return self._line is not None

    def lend(self, stream: StreamState, entries: Sequence[IndexEntry]) -> tuple[list[log_pb2.Lent], int]:
        """Returns where the first of these records are, consecutive ones together, and how many can be lent."""
        lent: list[log_pb2.Lent] = []
        count = 0
        path: Path | None = None
        try:
            for run in runs(self._storage, stream, entries, _LENT_BYTES):
                if run.place.path != path:
                    path = run.place.path
                    self._hand_over(path, self._storage.descriptor(run.place))
                known = b"".join(_known(entry) for entry in run.entries)
                lent.append(
                    log_pb2.Lent(file=self._number, offset=run.place.offset, size=run.size, known=known)
                )
                count += len(run.entries)
        except OSError:
            pass
        return lent, count

    def _hand_over(self, path: Path, descriptor: int) -> None:
        """Sends the descriptor, which is closed here, unless it is of the file lent last."""
        try:
            found = os.fstat(descriptor)
            this = (path, found.st_dev, found.st_ino)  # another file may have this name by now
            if this != self._lent:
                assert self._line is not None
                socket.send_fds(self._line, [FILE.pack(self._number + 1)], [descriptor])
                self._number += 1
                self._lent = this
        except OSError:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            line.close()


def _known(entry: IndexEntry) -> bytes:
    key = entry.key
    return KNOWN.pack(entry.sequence, entry.generation, key.step, key.microbatch, key.slot, entry.digest)

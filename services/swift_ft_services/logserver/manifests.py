"""Small files of a log server: a job's manifest, the registry of jobs, and acknowledgements.

Acknowledged sequences are kept in the file `.acked`, which no writer waits for. The log's own files cannot show that
their last records are missing: truncated at a record boundary, they look complete. So the sequences are noted in
`.acked` after each commit, without a sync. If the process dies, the kernel has them; after a power cut they may be
lower than what was acknowledged, never higher. Byte layout: `swift_ft.log.directory`.
"""

import errno
from contextlib import suppress
from pathlib import Path

from swift_ft.log.directory import FREE, NAME, PLACE_BYTES, Of, encode_place, places
from swift_ft.log.manifest import (
    GRANTED,
    GRANTED_BYTES_MAX,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Granted,
    JobMeta,
    ManifestDamaged,
    decode_granted,
    decode_manifest,
    encode_granted,
    encode_manifest,
)
from swift_ft.log.segment import padding
from swift_ft_services.logserver.disk import Disk, File

# Small files that are replaced atomically, so that either the old or the new one exists: a job's manifest.


def load_manifest(disk: Disk, folder: Path) -> JobMeta | None:
    data = read_small_file(disk, folder / MANIFEST, MANIFEST_BYTES_MAX)
    return None if data is None else decode_manifest(data)


def read_small_file(disk: Disk, path: Path, size_max: int) -> bytes | None:
    """Returns the file's bytes, None if it does not exist. Raises OSError; ManifestDamaged if it is too large."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        if file.size > size_max:
            raise ManifestDamaged(f"it has {file.size} bytes, and none has more than {size_max}")
        return file.read(0, file.size)
    finally:
        file.close()


def replace_small_file(disk: Disk, path: Path, data: bytes) -> None:
    """Durably and atomically replaces a file. Raises OSError."""
    aside = path.with_name(f"{path.name}.new")
    disk.remove(aside)  # left by a kill
    file = disk.create(aside)
    try:
        file.write(0, [data, padding(len(data))])
        file.resize(len(data))
        file.sync()
    finally:
        file.close()
    disk.rename(aside, path)
    disk.sync_names(path.parent)


# Registry of jobs outside their directories: the uid of each job, and its last generation.
#
# A job's directory can be replaced as a whole by an older copy, which its manifest cannot show. So the registry keeps
# one line per job in `.granted-<job>`, outside the job's directory. It is written when the job is created (before its
# manifest), and after each manifest with a newer generation. So a manifest may be newer than its line, never older.


class Book:
    """(one caller at a time) Registry lines of all jobs, and their manifests."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self.lines: dict[str, Granted] = {}

    def path(self, job: str) -> Path:
        return self._directory / f"{GRANTED}{job}"

    def read(self, job: str) -> Granted | None:
        """Returns the job's line, or None if there is none. Raises ManifestDamaged or OSError."""
        data = read_small_file(self._disk, self.path(job), GRANTED_BYTES_MAX)
        return None if data is None else decode_granted(data)

    def load(self, job: str, meta: JobMeta, granted: Granted) -> None:
        """(at the start) Takes over a job whose line and manifest match. Updates the line if a kill left it older."""
        if granted.generation < meta.generation:
            self._write(Granted(job, meta.uid, meta.generation))
        self.lines[job] = Granted(job, meta.uid, meta.generation)

    def save(self, job: str, meta: JobMeta, new_uid: str) -> None:
        """Durably saves the manifest and the job's line. Sets the job's name and uid in ``meta``. Raises OSError."""
        line = self.lines.get(job)
        if line is None:
            line = Granted(job, new_uid, 0)
            self._write(line)
            self.lines[job] = line
        meta.job, meta.uid = job, line.uid
        self._disk.make_directory(self._directory / job)
        replace_small_file(self._disk, self._directory / job / MANIFEST, encode_manifest(meta))
        if line.generation != meta.generation:
            line = Granted(job, line.uid, meta.generation)
            self._write(line)
            self.lines[job] = line

    def forget(self, job: str) -> None:
        """Removes the job's line. A leftover line has no directory, and a new job of this name replaces it first."""
        self.lines.pop(job, None)
        try:
            self._disk.remove(self.path(job))
        except IsADirectoryError:
            self._disk.remove_tree(self.path(job))

    def _write(self, line: Granted) -> None:
        replace_small_file(self._disk, self.path(line.job), encode_granted(line))


_FREE_MAX = 1 << 16
"""Consecutive free places that are remembered."""


class Acked:
    """(one caller at a time) Acknowledged sequences of all streams of a server."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._path = directory / NAME
        self._file: File | None = None
        self._places: dict[Of, int] = {}
        self._free: list[int] = []
        self._next_place = 0
        self.sequences: dict[Of, int] = {}
        """Stream -> noted sequence, exclusive."""

    def open(self) -> None:
        """Reads the noted sequences. Works without the file if it cannot be opened or created."""
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
        """Records that everything below ``sequence`` was acknowledged, or is about to be."""
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
        """Frees the places of a dropped job's streams."""
        for of in [of for of in self._places if of[0] == uid]:
            place = self._places.pop(of)
            self.sequences.pop(of, None)
            self._put(place, FREE)
            self._free.append(place)

    def _put(self, place: int, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.note(place * PLACE_BYTES, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._close()  # this file is optional: an error only disables it

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        self._close()

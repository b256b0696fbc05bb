"""What a server knows of each job outside of its directory: which job of that name it is, and its last generation.

A manifest is inside of what can be swapped as a whole, and says nothing of being older than the one before. One line a
job is kept beside the jobs, in `.granted-<job>`: written when the job comes (before its manifest), and after each
manifest with a newer generation. So a manifest may be newer than its line, and never older.
"""

from pathlib import Path

from services.logserver import manifests
from services.logserver.disk import Disk
from swift.log.manifest import (
    GRANTED,
    GRANTED_BYTES_MAX,
    Granted,
    JobMeta,
    decode_granted,
    encode_granted,
    encode_manifest,
)


class Book:
    """(one caller at a time) The lines of all jobs, and the manifests that go with them."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self.lines: dict[str, Granted] = {}

    def path(self, job: str) -> Path:
        return self._directory / f"{GRANTED}{job}"

    def read(self, job: str) -> Granted | None:
        """None: there is no line. ManifestDamaged; OSError."""
        data = manifests.read(self._disk, self.path(job), GRANTED_BYTES_MAX)
        return None if data is None else decode_granted(data)

    def take(self, job: str, meta: JobMeta, granted: Granted) -> None:
        """(at the start) The two fit. A kill may have come before the line had the manifest's generation."""
        if granted.generation < meta.generation:
            self._write(Granted(job, meta.uid, meta.generation))
        self.lines[job] = Granted(job, meta.uid, meta.generation)

    def save(self, job: str, meta: JobMeta, new_uid: str) -> None:
        """The manifest, durably, and its line. ``meta`` gets the job's name and uid. OSError."""
        line = self.lines.get(job)
        if line is None:
            line = Granted(job, new_uid, 0)
            self._write(line)
            self.lines[job] = line
        meta.job, meta.uid = job, line.uid
        manifests.replace(self._disk, self._directory / job, encode_manifest(meta))
        if line.generation != meta.generation:
            line = Granted(job, line.uid, meta.generation)
            self._write(line)
            self.lines[job] = line

    def forget(self, job: str) -> None:
        """A line that is left has no directory, and is the first thing that a new job of this name replaces."""
        self.lines.pop(job, None)
        try:
            self._disk.remove(self.path(job))
        except IsADirectoryError:
            self._disk.remove_tree(self.path(job))

    def _write(self, line: Granted) -> None:
        manifests.put(self._disk, self.path(line.job), encode_granted(line))

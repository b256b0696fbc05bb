"""The cold tier: sealed segments in an object store, so that a disk near its quota does not stop a job.

::

    DIRECTORY/.cold                         URL of the store
    DIRECTORY/<job>/<stream>/<first>.cold   stub of a moved segment: its header, its frames' headers, its footer
    URL/<uid>/<reset>/<stream>/<first>.seg  the segment, byte for byte; the uid is of one job on one server
    URL/<uid>/<reset>/<stream>/<first>.cold its stub once more

Order of effects: all checksums of a segment are compared; it is uploaded; its stub is durable; its file is removed. So
each segment is here or there at any moment. A restart reads stubs as if they were the files, and asks the store for
nothing. A trim removes the object before the stub. What a kill leaves without a stub is removed by the next start.

If the server is lost with its disk, another one that has the same store reads the objects by their stubs there. A reset
drops records, and then no object of them may be found: what is moved later is in another folder, and no segment has
records from before and after it. The coordinator alone knows which folder counts (`FenceReply.cold`).
"""

import errno
import re
from pathlib import Path

from swift_ft.errors import UsageError
from swift_ft.log.manifest import JobMeta, ManifestDamaged
from swift_ft.log.segment import COLD_SUFFIX, STUB_BYTES_MAX, SUFFIX, URL_BYTES_MAX, Stub
from swift_ft.objects import PART_BYTES, Objects
from swift_ft_services.logserver.disk import Disk, File
from swift_ft_services.logserver.manifests import read_small_file, replace_small_file

PATIENCE_S = 5.0
"""Seconds for which a read is tried again. Then its reader is told that the record cannot be read now."""


def read_stub(disk: Disk, path: Path) -> Stub:
    """Raises OSError, ManifestDamaged."""
    data = read_small_file(disk, path, STUB_BYTES_MAX)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "it is gone", str(path))
    return Stub.decode(data)


def known_url(disk: Disk, directory: Path) -> str:
    """Returns the URL of the directory's store; empty if it never had one. Raises OSError, UsageError."""
    try:
        found = read_small_file(disk, directory / COLD_SUFFIX, URL_BYTES_MAX)
    except ManifestDamaged as error:
        raise UsageError(
            f"{directory / COLD_SUFFIX}: {error}: write the URL of the object store of these segments there"
        ) from None
    return "" if found is None else found.decode(errors="replace").strip()


class ColdTier:
    """The object store of one server. Raises OSError: FileNotFoundError if an object is not there, else ETIMEDOUT, as
    the store may answer later."""

    def __init__(self, objects: Objects, url: str) -> None:
        self.url = url
        self._objects = objects

    @classmethod
    def at(cls, url: str) -> "ColdTier":
        """Raises UsageError."""
        return cls(Objects.at(url, PATIENCE_S), url)

    def claim(self, disk: Disk, directory: Path) -> None:
        """(at the start) Records that segments of this directory are in this store, which must answer the first time.
        Raises UsageError if it does not, or if they are in another one."""
        known = known_url(disk, directory)
        if known == self.url:
            return
        if known:
            raise UsageError(f"--cold {self.url}: segments of {directory} are in {known}: give that one")
        try:
            self._objects.put("probe", b"")
            self._objects.remove(["probe"])
        except OSError as error:
            raise UsageError(
                f"--cold {self.url}: {error.strerror}; give a store that can be written"
            ) from None
        replace_small_file(disk, directory / COLD_SUFFIX, f"{self.url}\n".encode())

    def move(self, key: str, source: File, stub: bytes) -> None:
        """Uploads a file's content, and its stub."""
        with self._objects.upload(key) as write:
            for offset in range(0, source.size, PART_BYTES):
                write(source.read(offset, PART_BYTES))
        self._objects.put(_stub_key(key), stub)

    def read(self, key: str, offset: int, size: int) -> memoryview:
        try:
            return self._objects.read(key, offset, size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OSError(errno.ETIMEDOUT, f"the object store: {error.strerror}", key) from None

    def remove(self, key: str) -> None:
        """Removes a segment's objects."""
        self._objects.remove([_stub_key(key), key])

    def keys(self, folder: str) -> list[str]:
        """Returns the segments below a folder, also those of which only the stub is there."""
        found = (Path(entry.path).with_suffix(SUFFIX) for entry in self._objects.entries(folder))
        return sorted(set(map(str, found)))

    def stubs(self, folder: str) -> dict[str, dict[int, Stub]]:
        """Returns stream -> first sequence -> stub of what a lost server has moved. Raises ManifestDamaged, too."""
        there = {entry.path: entry for entry in self._objects.entries(folder)}
        moved = [
            there[_stub_key(path)] for path in there if path.endswith(SUFFIX) and _stub_key(path) in there
        ]
        if any(not 0 < entry.size <= STUB_BYTES_MAX for entry in moved):
            raise ManifestDamaged("its size is none that a stub can have")
        found: dict[str, dict[int, Stub]] = {}
        for entry, data in self._objects.read_each(moved):
            path = Path(entry.path)
            if path.stem.isdecimal():
                found.setdefault(path.parent.name, {})[int(path.stem)] = Stub.decode(bytes(data))
        return found


_FOLDER = re.compile(r"[0-9a-f]{32}/[0-9]+\.[0-9]+")


def folder_of(meta: JobMeta) -> str:
    """Returns where a server's segments of a job are, since the job's last reset."""
    return f"{meta.uid}/{meta.reset_generation}.{meta.reset_number}"


def reset_of(folder: str) -> int:
    """Returns the generation of the reset since which a folder is used."""
    return int(folder.partition("/")[2].partition(".")[0])


def key_of(folder: str, stream: str, segment: Path) -> str:
    return f"{folder}/{stream}/{segment.stem}{SUFFIX}"


def is_folder(text: str) -> bool:
    return _FOLDER.fullmatch(text) is not None


def _stub_key(key: str) -> str:
    return f"{key.removesuffix(SUFFIX)}{COLD_SUFFIX}"

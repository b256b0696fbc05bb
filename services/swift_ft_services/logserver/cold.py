"""The cold tier: sealed segments in an object store, so that a disk near its quota does not stop a job.

::

    DIRECTORY/.cold                         URL of the store
    DIRECTORY/<job>/<stream>/<first>.cold   stub of a moved segment: its header, its frames' headers, its footer
    URL/<uid>/<stream>/<first>.seg          the segment, byte for byte; the uid is of one job on one server

Order of effects: all checksums of a segment are compared; it is uploaded; its stub is durable; its file is removed. So
each segment is here or there at any moment. A restart reads stubs as if they were the files, and asks the store for
nothing. A trim removes the object before the stub. What a kill leaves without a stub is removed by the next start.
"""

import errno
import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import crc32c

from swift_ft.errors import UsageError
from swift_ft.log.frame import Bytes
from swift_ft.log.manifest import ManifestDamaged
from swift_ft.log.segment import FOOTER_BYTES, SEGMENT_HEADER_BYTES, SUFFIX, SegmentScan
from swift_ft.objects import PART_BYTES, Objects
from swift_ft_services.logserver.disk import Disk, File
from swift_ft_services.logserver.manifests import read_small_file, replace_small_file

COLD_SUFFIX = ".cold"
PATIENCE_S = 5.0
"""Seconds for which a read is tried again. Then its reader is told that the record cannot be read now."""
_URL_BYTES_MAX = 4096
_STUB_BYTES_MAX = 1 << 30

# A stub, little endian: magic, version, crc32c of all that follows; the segment's bytes, the number of pieces; of each
# piece its offset in the segment and its length; the pieces' bytes, one after another.
_MAGIC, _VERSION = b"SWCD", 1
_HEAD = struct.Struct("<4sII")
_FACTS = struct.Struct("<QQ")
_PIECE = struct.Struct("<QI")


class Stub:
    """A segment of which only some pieces are known, as a file (`File`) that is read to recover it."""

    def __init__(self, size: int, pieces: Sequence[tuple[int, Bytes]]) -> None:
        self.size = size
        self._offsets = [offset for offset, _ in pieces]
        self._pieces = [bytes(piece) for _, piece in pieces]

    @classmethod
    def of(cls, scanned: SegmentScan, source: File) -> "Stub":
        """Makes the stub of a sealed segment without damage."""
        footer_at = scanned.size - FOOTER_BYTES
        places = [(0, SEGMENT_HEADER_BYTES)]
        places += [(record.offset, record.header.header_bytes) for record in scanned.records]
        places.append((footer_at, FOOTER_BYTES))
        return cls(scanned.size, [(offset, source.read(offset, length)) for offset, length in places])

    @classmethod
    def decode(cls, data: bytes) -> "Stub":
        """Raises ManifestDamaged."""
        try:
            magic, version, crc = _HEAD.unpack_from(data)
            size, count = _FACTS.unpack_from(data, _HEAD.size)
            table = _HEAD.size + _FACTS.size
            at = table + count * _PIECE.size
            if (magic, version) != (_MAGIC, _VERSION) or at > len(data):
                raise ManifestDamaged("it does not begin as it should")
            if crc32c.crc32c(data[_HEAD.size :]) != crc:
                raise ManifestDamaged("its checksum does not match")
        except struct.error:
            raise ManifestDamaged("it is cut short") from None
        pieces = []
        for offset, length in _PIECE.iter_unpack(data[table:at]):
            pieces.append((offset, data[at : at + length]))
            at += length
        return cls(size, pieces)

    def encode(self) -> bytes:
        body = bytearray(_FACTS.pack(self.size, len(self._pieces)))
        for offset, piece in zip(self._offsets, self._pieces, strict=True):
            body += _PIECE.pack(offset, len(piece))
        for piece in self._pieces:
            body += piece
        return _HEAD.pack(_MAGIC, _VERSION, crc32c.crc32c(body)) + body

    def read(self, offset: int, size: int) -> bytes:
        """Returns what is known from this offset on, at most `size` bytes."""
        at = bisect_right(self._offsets, offset) - 1
        return self._pieces[at][offset - self._offsets[at] :][:size] if at >= 0 else b""

    def close(self) -> None:
        pass


def stub_path(segment: Path) -> Path:
    return segment.with_suffix(COLD_SUFFIX)


def read_stub(disk: Disk, path: Path) -> Stub:
    """Raises OSError, ManifestDamaged."""
    data = read_small_file(disk, path, _STUB_BYTES_MAX)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "it is gone", str(path))
    return Stub.decode(data)


def known_url(disk: Disk, directory: Path) -> str:
    """Returns the URL of the directory's store; empty if it never had one. Raises OSError, UsageError."""
    try:
        found = read_small_file(disk, directory / COLD_SUFFIX, _URL_BYTES_MAX)
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

    def move(self, key: str, source: File) -> None:
        """Uploads a file's content."""
        with self._objects.upload(key) as write:
            for offset in range(0, source.size, PART_BYTES):
                write(source.read(offset, PART_BYTES))

    def read(self, key: str, offset: int, size: int) -> memoryview:
        try:
            return self._objects.read(key, offset, size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OSError(errno.ETIMEDOUT, f"the object store: {error.strerror}", key) from None

    def remove(self, key: str) -> None:
        self._objects.remove([key])

    def keys(self, uid: str) -> list[str]:
        """Returns the objects of one job."""
        return [entry.path for entry in self._objects.entries(uid)]


def key_of(uid: str, stream: str, segment: Path) -> str:
    return f"{uid}/{stream}/{segment.stem}{SUFFIX}"

"""Small files on the disk that are replaced whole, so that there is the old one or the new one: a job's manifest."""

from pathlib import Path

from services.logserver.disk import Disk
from swift.log.manifest import MANIFEST, MANIFEST_BYTES_MAX, JobMeta, ManifestDamaged, decode_manifest
from swift.log.segment import padding


def load(disk: Disk, folder: Path) -> JobMeta | None:
    """None: there is none. ManifestDamaged; OSError."""
    data = read(disk, folder / MANIFEST, MANIFEST_BYTES_MAX)
    return None if data is None else decode_manifest(data)


def read(disk: Disk, path: Path, size_max: int) -> bytes | None:
    """None: it is not there. OSError; ManifestDamaged if it is larger than that."""
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


def replace(disk: Disk, folder: Path, data: bytes) -> None:
    """Durably. OSError."""
    disk.make_directory(folder)
    put(disk, folder / MANIFEST, data)


def put(disk: Disk, path: Path, data: bytes) -> None:
    """Durably. OSError."""
    aside = path.with_name(f"{path.name}.new")
    disk.remove(aside)  # a kill may have left it
    file = disk.create(aside)
    try:
        file.write(0, [data, padding(len(data))])
        file.resize(len(data))
        file.sync()
    finally:
        file.close()
    disk.rename(aside, path)
    disk.sync_names(path.parent)

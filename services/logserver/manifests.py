"""A job's manifest on the disk: replaced whole, so that there is the old one or the new one."""

from pathlib import Path

from services.logserver.disk import Disk
from swift.errors import ServiceError
from swift.log.manifest import MANIFEST, JobMeta, ManifestDamaged, decode_manifest
from swift.log.segment import padding


def load(disk: Disk, folder: Path) -> JobMeta | None:
    """None: there is none. ServiceError: it is damaged."""
    path = folder / MANIFEST
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return decode_manifest(file.read(0, file.size))
    except ManifestDamaged as error:
        raise ServiceError(
            f"{path} is damaged ({error}); restore it, or move the job's directory away"
        ) from None
    finally:
        file.close()


def missing(folder: Path) -> ServiceError:
    """There are segments, and it is not there."""
    return ServiceError(
        f"{folder / MANIFEST} is missing: the granted generation of job {folder.name} is unknown; "
        "restore it, or move the job's directory away"
    )


def replace(disk: Disk, folder: Path, data: bytes) -> None:
    """Durably. OSError."""
    disk.make_directory(folder)
    aside = folder / f"{MANIFEST}.new"
    disk.remove(aside)  # a kill may have left it
    file = disk.create(aside)
    try:
        file.write(0, [data, padding(len(data))])
        file.resize(len(data))
        file.sync()
    finally:
        file.close()
    disk.rename(aside, folder / MANIFEST)
    disk.sync_names(folder)

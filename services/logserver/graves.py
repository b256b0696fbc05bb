"""Where the files of dropped jobs wait until there is time to unlink them: under names that no job can have."""

from contextlib import suppress
from pathlib import Path

from services.logserver.disk import Disk
from services.logserver.failures import StorageFailed
from swift.log.directory import DROPPED, grave_of


def bury(disk: Disk, directory: Path, job: str) -> bool:
    """Durably; False: nothing of it was ever written. OSError; StorageFailed: a sync failed. Either way it is where
    it was."""
    folder, grave = directory / job, grave_of(directory, job)
    try:
        disk.rename(folder, grave)
    except FileNotFoundError:
        return False
    try:
        disk.sync_names(directory)
    except OSError as error:
        with suppress(OSError):
            disk.rename(grave, folder)
        raise StorageFailed(f"a sync failed: {error.strerror}; replace the disk, then start again") from None
    return True


def empty(disk: Disk, directory: Path) -> None:
    """Removes what is buried. OSError."""
    for name, is_dir in disk.names(directory):
        if name.startswith(DROPPED):
            remove = disk.remove_tree if is_dir else disk.remove
            remove(directory / name)

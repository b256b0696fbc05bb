"""How a storage fails: what the system said, and what follows from it."""

import errno

from services.logserver.disk import NO_SPACE
from services.logserver.segments import Unsound
from swift.errors import ServiceError

BUSY = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
IN_THE_WAY = {
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.ENXIO,
}
"""Something else is where a job's file or directory should be: that is this job's trouble, and no disk's."""
UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""What a file that was to be read may say: nobody else's files need be the same."""


class StorageError(ServiceError):
    """One of those below."""


class StorageFull(StorageError):
    """No space. Everything is back on the last record boundary; reads and trims still work."""


class StorageBusy(StorageError):
    """The process has no descriptor or no memory to spare. Everything is back on the last record boundary."""


class StorageFailed(StorageError):
    """A write or a sync failed for another reason. It is not tried again: what was written is unknown."""


class JobDamaged(StorageError):
    """A job's files make no sense, or something else is in their place. Nothing is done for it; others are served."""

    def __init__(self, job: str, what: str) -> None:
        super().__init__(
            f"job {job} is set apart, others are served: {what}; drop it (swift-ft inspect --drop-job {job}), "
            "or put its files right and start the server again"
        )
        self.job = job


class SegmentGone(StorageError):
    """A file that is written was removed, or replaced, by somebody else. Everything else is back on the last record
    boundary; the stream goes on in another file."""

    def __init__(self, job: str, stream: str, first: int, what: str) -> None:
        super().__init__(what)
        self.job = job
        self.stream = stream
        self.first = first
        """Its records, and whatever was to follow, are gone."""


def as_storage_error(error: OSError, job: str = "") -> StorageError:
    """``job``: whose file it was about."""
    if isinstance(error, Unsound):
        return StorageFailed(f"a write failed: {error.strerror}; see to the disk, then start again")
    if error.errno in BUSY:
        return StorageBusy(f"cannot write now: {error.strerror}; raise what the process may have (ulimit -n)")
    if error.errno in NO_SPACE:
        return StorageFull(f"no space left: {error.strerror}; free some, or trim the log")
    if job and error.errno in IN_THE_WAY:
        return JobDamaged(job, f"{error.filename}: {error.strerror}")
    return StorageFailed(f"a write failed: {error.strerror}; see to the disk, then start again")

"""How a storage fails: what the system said, and what follows from it."""

import errno

from services.logserver.disk import NO_SPACE
from services.logserver.segments import Unsound
from swift.errors import ServiceError

_BUSY = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class StorageError(ServiceError):
    """One of the three below."""


class StorageFull(StorageError):
    """No space. Everything is back on the last record boundary; reads and trims still work."""


class StorageBusy(StorageError):
    """The process has no descriptor or no memory to spare. Everything is back on the last record boundary."""


class StorageFailed(StorageError):
    """A write or a sync failed for another reason. It is not tried again: what was written is unknown."""


def as_storage_error(error: OSError) -> StorageError:
    if error.errno in _BUSY and not isinstance(error, Unsound):
        return StorageBusy(f"cannot write now: {error.strerror}; raise what the process may have (ulimit -n)")
    if error.errno in NO_SPACE and not isinstance(error, Unsound):
        return StorageFull(f"no space left: {error.strerror}; free some, or trim the log")
    return StorageFailed(f"a write failed: {error.strerror}; see to the disk, then start again")

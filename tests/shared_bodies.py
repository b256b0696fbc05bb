"""The bodies of tests' writers in a memory that a log server of this machine reads, if ``LOG_BODIES=shared``."""

import fcntl
import os

from swift_ft.log.frame import Bytes

SHARED = {"LOG_BODIES": "shared"}
_SIZE = 1 << 32
"""Pages that nobody writes take no memory."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memfd(size: int = _SIZE, seals: int = _SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Bodies:
    """Bodies one after the other. They stay as they are."""

    def __init__(self) -> None:
        self.descriptor = memfd()
        self._end = 0

    def put(self, body: Bytes) -> int:
        """Returns its place."""
        place, self._end = self._end, self._end + len(body)
        os.pwrite(self.descriptor, body, place)
        return place

    def close(self) -> None:
        os.close(self.descriptor)


def is_shared() -> bool:
    return os.environ.items() >= SHARED.items()


def bodies() -> Bodies | None:
    return Bodies() if is_shared() else None

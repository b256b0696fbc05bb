"""Memory at the level of C: huge pages, and malloc settings for messages of megabytes."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # <malloc.h>


def keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of large messages. Otherwise each message is mapped anew, and fresh memory
    copies at a fifth of the speed, because every page faults. For a dedicated process only: all its threads share one
    arena, because otherwise every new thread would keep memory of its own."""
    _set(_M_ARENA_MAX, 1)
    _keep()


def _keep() -> None:
    _set(_M_MMAP_THRESHOLD, 1 << 30)
    _set(_M_TRIM_THRESHOLD, 1 << 30)
    _set(_M_TOP_PAD, 64 << 20)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """As `keep_freed_memory`, within a `with` block, for a process with other work. Afterwards free memory is returned
    to the system, and the thresholds are those that glibc itself would reach in a process with large tensors."""
    _keep()
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, 32 << 20)
        _set(_M_TRIM_THRESHOLD, 64 << 20)
        _set(_M_TOP_PAD, 128 << 10)
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # another C library: slower, still correct
        ctypes.CDLL(None).mallopt(parameter, value)


def page_aligned(size: int) -> mmap.mmap:
    """Returns zeroed memory for O_DIRECT, in huge pages if available. The kernel looks up every page that it writes
    from, which with small pages takes more CPU time than the rest of a direct write."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or no huge pages: slower, still correct
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def available_memory() -> int | None:
    """Returns the bytes that can be allocated without swapping; None if the system does not report them."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None

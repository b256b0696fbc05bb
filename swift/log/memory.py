"""How a process that moves messages of megabytes keeps its memory."""

import ctypes
import mmap
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>


def keep_freed_memory() -> None:
    """Tells glibc to keep what messages of megabytes gave back. Freshly mapped memory copies at a fifth of
    the speed (every page is a fault), and without this each message is mapped anew."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library: slower, not wrong
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)


def page_aligned(size: int) -> mmap.mmap:
    """Memory for O_DIRECT, zeroed; in huge pages where the system gives them. The kernel looks up every page that it
    writes from: with small ones that takes more of a core than all the rest of a direct write."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

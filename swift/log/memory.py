"""Memory as C has it: where an object's is, and how a process that moves messages of megabytes keeps it."""

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


class _Buffer(ctypes.Structure):
    """Py_buffer: where the memory of an object is, writable or not."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Stays right as long as `view` lives."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address

"""Memory as C has it: where an object's is, and how a process that moves messages of megabytes keeps it."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # <malloc.h>


def keep_freed_memory() -> None:
    """Tells glibc to keep what messages of megabytes gave back. Freshly mapped memory copies at a fifth of
    the speed (every page is a fault), and without this each message is mapped anew. For a process that does nothing
    else: all its threads share what is kept, or every new thread would begin to keep its own."""
    _set(_M_ARENA_MAX, 1)
    _keep()


def _keep() -> None:
    _set(_M_MMAP_THRESHOLD, 1 << 30)
    _set(_M_TRIM_THRESHOLD, 1 << 30)
    _set(_M_TOP_PAD, 64 << 20)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """The same for a while, in a process that has other things to do as well. Afterwards what is free goes back, and
    the bounds are those that glibc would have come to by itself in a process with large tensors."""
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
    with suppress(AttributeError, OSError):  # another C library: slower, not wrong
        ctypes.CDLL(None).mallopt(parameter, value)


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

"""Learns of a process's death before the kernel has freed its memory.

A pidfd shows the end of a process only then, and its peers' connections break only then. That takes the longer the more
memory it has, so a rank with large states on the host would be missed late. So a child holds a robust mutex in memory
that it shares with the launcher (pthread_mutexattr_setrobust(3)). The kernel gives it back as the first part of
a thread's end. The exit code is in /proc by then.

    (launcher) life = Life()                                → `life.fd` is passed to the child
    (child)    hold(fd)                                     in the main thread, which lives as long as the process
    (launcher) life.watch(died)                             once the child holds it → `died` is called by a thread

Without robust mutexes nothing is lost but the time: the pidfd shows the end.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PROCESS_SHARED = _ROBUST = 1
_ATTRIBUTE_BYTES = 64
"""Room for a pthread_mutexattr_t."""
_PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 9 - 3, 52 - 3
"""Fields of /proc/PID/stat (proc(5) counts from 1), in the part after the name in brackets."""
_LIBC = ctypes.CDLL(None)


def _mutex(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


class Life:
    """The launcher's end of one child's mutex."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("swift-life", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.fd, mmap.PAGESIZE)
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _LIBC.pthread_mutexattr_init(attributes)
        _LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _LIBC.pthread_mutex_init(_mutex(self._memory), attributes)

    def watch(self, died: Callable[[], None]) -> None:
        """Calls `died` from a thread of its own once the child, which holds the mutex now, ends or calls exec."""

        def wait() -> None:
            if _LIBC.pthread_mutex_lock(_mutex(self._memory)) == errno.EOWNERDEAD:
                _LIBC.pthread_mutex_unlock(_mutex(self._memory))  # no use is left for it
                died()

        with suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=wait, name="life", daemon=True).start()


def hold(fd: int) -> None:
    """(the child's main thread) Holds the mutex until this thread ends."""
    memory = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    _HELD.append(memory)
    _LIBC.pthread_mutex_lock(_mutex(memory))


_HELD: list[mmap.mmap] = []


def exit_code_of(pid: int) -> int | None:
    """Returns the exit code of a process that is ending (negative: a signal's number), or None: it is not, or the
    system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if int(fields[_FLAGS]) & _PF_EXITING:
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    return None

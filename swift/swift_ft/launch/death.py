"""A process's death: learned of before the kernel has freed its memory; and whether memory had run out.

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
import re
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


# Whether the kernel has killed a rank because memory ran out.

_MESSAGE = re.compile(r"[^;]*;.*[Oo]ut of memory.*: Killed process (?P<pid>\d+) ")
_COUNTERS = re.compile(r"^(oom|oom_kill) (\d+)$", re.MULTILINE)
_RECORD_BYTES = 8192


class MemoryKills:
    """The kills of one machine for lack of memory since the launcher's start: by the kernel's messages, and by the
    counters of a cgroup (version 2). `oom_kill` counts processes of the cgroup, whoever had no memory left; `oom` how
    often the cgroup's own limit was the reason."""

    def __init__(
        self,
        cgroups: Path = Path("/sys/fs/cgroup"),
        own: Path = Path("/proc/self/cgroup"),
        kernel: Path = Path("/dev/kmsg"),
    ) -> None:
        """Reads the counters, and leaves out the kernel's messages so far. `own`: names this process's cgroups."""
        self._counters = _counters_of(cgroups, own)
        self._limit_reached, self._killed = self._count()
        self._messages = -1
        self._named = set[int]()
        """Processes that were named since, and not asked for."""
        with suppress(OSError):
            self._messages = os.open(kernel, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._messages, 0, os.SEEK_END)

    def words(self, pid: int) -> str:
        """Returns how a process that got SIGKILL was out of memory; empty if it was not, as far as it is known."""
        self._read_messages()
        named = pid in self._named
        self._named.discard(pid)
        limit_reached, killed = self._count()
        if self._counters is not None and killed > self._killed:
            self._killed += 1
            group, at_limit = self._counters.parent, limit_reached > self._limit_reached
            if self._killed == killed:  # until then others were killed at the same time
                self._limit_reached = limit_reached
            if at_limit:
                return f"out of memory: the cgroup {group} has reached its limit{self._limit()}"
            return f"out of memory: the machine has none left, or a group around the cgroup {group}"
        return "out of memory: the kernel's messages (dmesg) name it" if named else ""

    def _read_messages(self) -> None:
        with suppress(OSError):  # there are no more, or they may not be read
            while record := self._next_message():
                for line in record.splitlines():
                    if found := _MESSAGE.match(line):
                        self._named.add(int(found["pid"]))

    def _next_message(self) -> str:
        while True:
            with suppress(BrokenPipeError):  # the next ones were overwritten before they were read
                return os.read(self._messages, _RECORD_BYTES).decode(errors="replace")

    def _count(self) -> tuple[int, int]:
        """Returns how often the cgroup's limit has left a process without memory, and how many of its processes were
        killed for lack of memory."""
        with suppress(OSError):
            if self._counters is not None:
                found = dict(_COUNTERS.findall(self._counters.read_text()))
                return int(found.get("oom", 0)), int(found.get("oom_kill", 0))
        return 0, 0

    def _limit(self) -> str:
        with suppress(OSError, ValueError):
            assert self._counters is not None
            return f" of {int((self._counters.parent / 'memory.max').read_text()) >> 20} MiB"
        return ""


def _counters_of(cgroups: Path, own: Path) -> Path | None:
    """Returns the file with the counters of this process's cgroup; None if there is none to read."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            counters = cgroups / path.lstrip("/") / "memory.events"
            if not controllers and counters.is_file():
                return counters
    return None

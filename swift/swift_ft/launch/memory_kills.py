"""Whether the kernel has killed a rank because memory ran out, by the kernel's messages and by the counter of a cgroup
(version 2)."""

import contextlib
import os
import re
from pathlib import Path

_MESSAGE = re.compile(r"[^;]*;.*[Oo]ut of memory.*: Killed process (?P<pid>\d+) ")
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_RECORD_BYTES = 8192


class MemoryKills:
    """The kills of one machine for lack of memory, since the launcher's start."""

    def __init__(
        self,
        cgroups: Path = Path("/sys/fs/cgroup"),
        own: Path = Path("/proc/self/cgroup"),
        kernel: Path = Path("/dev/kmsg"),
    ) -> None:
        """Reads the counter, and leaves out the kernel's messages so far. `own`: names this process's cgroups."""
        self._counter = _counter_of(cgroups, own)
        self._seen = self._count()
        self._messages = -1
        self._named = set[int]()
        """Processes that were named since, and not asked for."""
        with contextlib.suppress(OSError):
            self._messages = os.open(kernel, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._messages, 0, os.SEEK_END)

    def words(self, pid: int) -> str:
        """Returns how a process that got SIGKILL was out of memory; empty if it was not, as far as it is known."""
        self._read_messages()
        named = pid in self._named
        self._named.discard(pid)
        if self._counter is not None and self._count() > self._seen:  # a limit of the ranks' common cgroup
            self._seen += 1
            return f"out of memory: the cgroup {self._counter.parent} has reached its limit{self._limit()}"
        return "out of memory: the kernel's messages (dmesg) name it" if named else ""

    def _read_messages(self) -> None:
        with contextlib.suppress(OSError):  # there are no more, or they may not be read
            while record := self._next_message():
                for line in record.splitlines():
                    if found := _MESSAGE.match(line):
                        self._named.add(int(found["pid"]))

    def _next_message(self) -> str:
        while True:
            with contextlib.suppress(BrokenPipeError):  # the next ones were overwritten before they were read
                return os.read(self._messages, _RECORD_BYTES).decode(errors="replace")

    def _count(self) -> int:
        with contextlib.suppress(OSError):
            if self._counter is not None and (found := _COUNTER.search(self._counter.read_text())):
                return int(found[1])
        return 0

    def _limit(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            assert self._counter is not None
            return f" of {int((self._counter.parent / 'memory.max').read_text()) >> 20} MiB"
        return ""


def _counter_of(cgroups: Path, own: Path) -> Path | None:
    """Returns the file with the number of memory kills in this process's cgroup; None if there is none to read."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            counter = cgroups / path.lstrip("/") / "memory.events"
            if not controllers and counter.is_file():
                return counter
    return None

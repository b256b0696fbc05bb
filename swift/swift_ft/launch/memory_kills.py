"""Whether the kernel has killed a rank because memory ran out, by the kernel's messages and by counters of cgroups."""

import contextlib
import os
import re
from pathlib import Path

_MESSAGE = re.compile(r"\d+,\d+,(?P<at_us>\d+),[^;]*;.*[Oo]ut of memory.*: Killed process (?P<pid>\d+) ")
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_RECORD_BYTES = 8192
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of cgroups, version 2 and 1."""


class MemoryKills:
    """The kills of one machine for lack of memory, since the launcher's start."""

    def __init__(
        self, now: float, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> None:
        """Reads the counter. `now`: monotonic seconds. `own`: names this process's cgroups."""
        self._began = now
        self._counter = _counter_of(cgroups, own)
        self._seen = self._count()

    def words(self, pid: int, kernel: str = "/dev/kmsg") -> str:
        """Returns how a process that got SIGKILL was out of memory; empty if it was not, as far as it is known."""
        if self._counter is not None and self._count() > self._seen:  # a limit of the ranks' common cgroup
            self._seen += 1
            return f"out of memory: the cgroup {self._counter.parent} has reached its limit{self._limit()}"
        if _is_named(pid, self._began, kernel):
            return "out of memory: the kernel's messages (dmesg) name it"
        return ""

    def _count(self) -> int:
        with contextlib.suppress(OSError):
            if self._counter is not None and (found := _COUNTER.search(self._counter.read_text())):
                return int(found[1])
        return 0

    def _limit(self) -> str:
        for name in LIMITS:
            with contextlib.suppress(OSError, ValueError):
                assert self._counter is not None
                return f" of {int((self._counter.parent / name).read_text()) >> 20} MiB"
        return ""


def _counter_of(cgroups: Path, own: Path) -> Path | None:
    """Returns the file with the number of memory kills in this process's cgroup; None if there is none to read."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group, name = cgroups / path.lstrip("/"), "memory.events"
            if "memory" in controllers.split(","):
                group, name = cgroups / "memory" / path.lstrip("/"), "memory.oom_control"
                if not group.is_dir():  # a container sees its own cgroup as the root
                    group = cgroups / "memory"
            if (group / name).is_file():
                return group / name
    return None


def _is_named(pid: int, since: float, kernel: str) -> bool:
    """Returns whether the kernel's messages since then (monotonic seconds) say that it has killed the process."""
    with contextlib.suppress(OSError):
        messages = os.open(kernel, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while record := os.read(messages, _RECORD_BYTES):
                for line in record.decode(errors="replace").splitlines():
                    found = _MESSAGE.match(line)
                    if found and int(found["pid"]) == pid and int(found["at_us"]) >= since * 1e6:
                        return True
        finally:
            os.close(messages)
    return False

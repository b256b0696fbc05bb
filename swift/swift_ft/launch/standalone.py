"""`swift-ft run --standalone`: a coordinator and a log server of the job's own, in a directory named after the job.

(launcher)  locks the directory; starts the log server, then the coordinator, each on a free port of the loopback
            interface → runs the ranks → a service that was killed is started again at its address
            → ends both after the ranks
(kernel)    ends both with the launcher, however that ends
"""

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swift_ft import events
from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import make_directory
from swift_ft.launch.children import Nursery, dying_with_launcher
from swift_ft.launch.decisions import describe_exit
from swift_ft.text import last_line

START_S_MAX = 60.0
END_S_MAX = 5.0
"""Seconds that a service may take to end after SIGTERM."""
LOCK_S = 2.0
"""Seconds that services of a launcher that was killed may take to end."""
_LOOK_S = 0.02
_PORTS_MIN = 1000
"""Ports in which one is looked for."""


@dataclass(frozen=True, slots=True)
class Standalone:
    directory: Path
    lock: int = -1
    """A descriptor of the lock on it, which the services inherit: a later launcher waits for their end."""

    @classmethod
    def of(cls, job: str) -> "Standalone":
        return cls(Path(f"swift-{job}"))

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def locked(self) -> "Standalone":
        """Makes the directory this launcher's. Raises UsageError if another launcher has it."""
        try:
            make_directory(self.directory)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"run: --standalone: ./{self.directory}: {error.strerror}: start it in a directory that can be "
                "written, or give this job another name, with --job NAME"
            ) from error
        deadline = time.monotonic() + LOCK_S
        while not _locks(lock):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if os.path.exists(f"/proc/{holder}") or time.monotonic() > deadline:
                os.close(lock)
                raise UsageError(
                    f"run: --standalone: ./{self.directory} is used by another swift-ft run (process {holder}): give "
                    "this job another name, with --job NAME"
                )
            time.sleep(_LOOK_S)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return replace(self, lock=lock)


def free_port() -> int:
    """Returns a free port of 127.0.0.1 that stays free while its server is away: where there are such, one outside of
    the range from which the system gives ports to whoever asks for any. Raises ServiceError if none is free."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [range(10_000, low), range(high + 1, 1 << 16)]
    ports = next((ports for ports in outside if len(ports) >= _PORTS_MIN), range(10_000, 1 << 16))
    why = ""
    for port in random.SystemRandom().sample(ports, _PORTS_MIN):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                why = str(error.strerror)
    raise ServiceError(f"no port of 127.0.0.1 is free: {why}")


def _locks(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Service:
    """One service. Started by the launcher's main thread, with which it dies."""

    def __init__(self, name: str, directory: Path, flags: list[str], lock: int) -> None:
        self.name = name
        self.said = directory / f"{name}.txt"
        self._flags = ["--directory", str(directory / name), *flags]
        self._address_file = directory / f"{name}.address"
        self._lock = lock
        self.address = f"127.0.0.1:{free_port()}"
        self._start()

    def _start(self) -> None:
        self._address_file.unlink(missing_ok=True)
        program = [sys.executable, "-P", "-m", f"swift_ft_services.{self.name}", *self._flags]
        program += ["--listen", self.address, "--address-file", str(self._address_file)]
        with open(self.said, "ab") as said:
            self.process = subprocess.Popen(
                dying_with_launcher(program),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock],
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        events.emit("service_started", service=self.name, pid=self.process.pid)

    def await_address(self) -> str:
        """Returns where it serves. Raises ServiceError if it ends instead, or takes too long."""
        deadline = time.monotonic() + START_S_MAX
        while not self._address_file.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LOOK_S)
                raise ServiceError(f"run: --standalone: {self.ended_words()}")
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"run: --standalone: the {self.name} does not serve after {START_S_MAX:g} s"
                )
        self.address = self._address_file.read_text().strip()
        return self.address

    def ended_words(self) -> str:
        line = last_line(self.said.read_text(errors="replace")) or "it has said nothing"
        return f"the job's {self.name} has ended ({describe_exit(self.process.wait())}): {line}"

    def start_again(self) -> None:
        """Raises OSError if no process can be started now."""
        self._close_pidfd()
        self._start()

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S_MAX)
        self.process.kill()
        self.process.wait()
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1


class Services:
    def __init__(self, standalone: Standalone, nursery: Nursery, say: Callable[[str], None]) -> None:
        self._nursery = nursery
        self._say = say
        self.lost = ""
        """Why the job cannot go on without a service; empty while it can."""
        self._services: list[_Service] = []
        self._lock = standalone.lock
        self._directory = standalone.directory.absolute()

    def start(self) -> str:
        """Starts both. Returns the coordinator's address. Raises ServiceError. Interruptible."""
        log_server = self._run("logserver", []).address
        return self._run("coordinator", ["--log-servers", log_server]).address

    def _run(self, name: str, flags: list[str]) -> _Service:
        service = _Service(name, self._directory, flags, self._lock)
        self._services.append(service)
        service.await_address()
        self._attend(service)
        return service

    def _attend(self, service: _Service) -> None:
        self._nursery.attend(service.pidfd, lambda: self._on_end(service))

    def _on_end(self, service: _Service) -> None:
        self._nursery.ignore(service.pidfd)
        words = service.ended_words()
        events.emit("service_ended", service=service.name, code=service.process.returncode)
        if service.process.returncode >= 0:  # it says why, and would say it again
            self.lost = words
            return
        try:
            service.start_again()
        except OSError as error:
            self.lost = f"{words}; it cannot be started again: {error.strerror}"
            return
        self._say(f"the job's {service.name} was killed: started again as process {service.process.pid}")
        self._attend(service)

    def close(self) -> None:
        for service in self._services:
            with contextlib.suppress(ProcessLookupError):
                service.process.send_signal(signal.SIGTERM)
        for service in self._services:
            service.end()
        os.close(self._lock)

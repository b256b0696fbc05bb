"""The job's services as processes of this machine: found by listening address, killed by SIGKILL, started again.

Kills only a log server or a coordinator of swift, even if another process listens at the address.
"""

import contextlib
import itertools
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swift_ft.errors import UsageError
from swift_ft.text import port_number

SERVICES = ("swift_ft_services.logserver", "swift_ft_services.coordinator")
_GONE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A listening process, with what is needed to start it again."""

    pid: int
    address: str
    command: tuple[str, ...]
    directory: str
    """Working directory in which it was started."""
    environment: dict[str, str]
    output: tuple[int, int]
    """Descriptors, owned by this process, of the files to which its stdout and stderr go."""

    @property
    def data(self) -> Path:
        """Its data directory: the value of ``--directory``."""
        return Path(self.directory, _option(self.command, "--directory"))

    def kill(self) -> None:
        """Sends SIGKILL and waits up to 10 s for the process to end. Raises OSError if it had already ended."""
        descriptor = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _GONE_S)
        finally:
            os.close(descriptor)

    def start_again(self) -> "subprocess.Popen[bytes]":
        """Starts the same command at the same address, in a session of its own, so that it outlives this process.
        Raises OSError."""
        return subprocess.Popen(
            [
                *self.command,
                "--listen",
                self.address,
            ],  # the last flag wins; port 0 in the command would choose another port
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output[0],
            stderr=self.output[1],
            start_new_session=True,
        )

    def close(self) -> None:
        """Closes the output descriptors; the service can then no longer be started again."""
        for descriptor in self.output:
            os.close(descriptor)


def _option(command: Sequence[str], flag: str) -> str:
    """Returns the flag's value, or an empty string if the command does not have it."""
    for word, following in itertools.pairwise([*command, ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def service_at(address: str, where: str = "") -> Service:
    """Finds the swift service that listens at this HOST:PORT. Raises UsageError, prefixed by `where`, if no process of
    this machine listens there, or none that is a swift service."""
    number = port_number(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr
        if listens and listens.port == number and connection.pid is not None:
            with contextlib.suppress(psutil.Error, OSError):
                if (service := _service(psutil.Process(connection.pid), address)) is not None:
                    return service
    raise UsageError(
        f"{where}no service of swift listens at {address} on this machine, as this user: start it here, or leave the "
        "failure to a launcher of its machine"
    )


def _service(process: psutil.Process, address: str) -> Service | None:
    command = process.cmdline()
    if not set(SERVICES) & set(command) or not _option(command, "--directory"):
        return None
    directory, environment = process.cwd(), process.environ()
    descriptors = Path(f"/proc/{process.pid}/fd")
    return Service(
        pid=process.pid,
        address=address,
        command=tuple(command),
        directory=directory,
        environment=environment,
        output=(_written_to(descriptors / "1"), _written_to(descriptors / "2")),
    )


def _written_to(place: Path) -> int:
    """Opens the file or terminal that a process writes to, for its successor; /dev/null if it cannot be opened."""
    with contextlib.suppress(OSError):
        return os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

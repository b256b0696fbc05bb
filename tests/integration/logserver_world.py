"""A real log server process on one port and directory, so that it can be killed and started again there."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from swift_ft.launch.standalone import free_port
from swift_ft.log import admin
from tests.patience import served_at

REPOSITORY = Path(__file__).parents[2]
JOB = "job"
TIMEOUT_S = 20.0


def python(
    *words: object, timeout_s: float = TIMEOUT_S, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """A program of Python's, at its end. `env`: what it has besides."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run(directory: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """A start that is expected to fail."""
    return python("-m", "swift_ft_services.logserver", "--directory", directory, *flags)


def serve(name: str, directory: Path, *flags: str, **env: str) -> tuple["subprocess.Popen[bytes]", str]:
    """A service on a free port. Its data, its address and what it says are in `directory`. (process, address)"""
    address, output = (directory / f"{name}.{what}" for what in ("address", "txt"))
    address.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"swift_ft_services.{name}", "--listen", "127.0.0.1:0", *flags]
    words += ["--address-file", str(address)]
    if "--store" not in flags:
        words += ["--directory", str(directory / name)]
    with output.open("ab") as said:
        process = subprocess.Popen(
            words, cwd=REPOSITORY, env={**os.environ, **env}, stdout=said, stderr=said, start_new_session=True
        )
    try:
        return process, served_at(process, address, output.read_text)
    except BaseException:
        process.kill()
        raise


EVENT = re.compile(r"WARNING [a-z_]+ [a-z_]+=")


class Service:
    """A service in one directory and on one port, so that it can be started there again. `start`, `kill`, `start`."""

    module = "swift_ft_services.logserver"

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.flags = flags
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None
        self.prefix: Sequence[str] = ()
        """Words before the command, of a program that ends by executing it."""
        self.env: dict[str, str] = {}
        self.events: Path | None = None
        """Where it writes its own; None: where this process does."""
        self.file_bytes_max = 0
        self.may_say = re.compile("(?!)")

    def start(self, *flags: str) -> Self:
        address_file = self.directory.with_suffix(".address")
        address_file.unlink(missing_ok=True)
        command = [*self.prefix, sys.executable, "-m", self.module, "--directory", str(self.directory)]
        command += ["--listen", self.address, "--address-file", str(address_file), *self.flags, *flags]
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **({"SWIFT_EVENTS": str(self.events)} if self.events else {}), **self.env},
            preexec_fn=self._limit if self.file_bytes_max else None,  # noqa: PLW1509
        )
        served_at(self.process, address_file, self.process.communicate)
        assert address_file.read_text() == f"{self.address}\n"
        return self

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes_max, self.file_bytes_max))

    def wait_killed(self) -> None:
        assert self.process is not None
        assert self.process.wait(TIMEOUT_S) == -signal.SIGKILL
        self.process.communicate()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait_killed()

    def stop(self) -> int:
        """SIGTERM; gives the exit code. Nothing may have been said on stderr but events of level WARNING, and what
        `may_say` matches: no traceback, for one."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        stderr = self.process.communicate(timeout=TIMEOUT_S)[1]
        lines = [line for line in stderr.splitlines() if not EVENT.match(line)]
        unexpected = [line for line in lines if not self.may_say.match(line)]
        assert not unexpected, stderr
        return self.process.returncode


class LogServer(Service):
    """As a context manager it stops in the end."""

    def __init__(self, directory: Path, *flags: str, file_bytes_max: int = 0) -> None:
        super().__init__(directory, *flags)
        self.file_bytes_max = file_bytes_max
        self.events: Path = directory.with_name(directory.name + "-events")
        self.events.mkdir(exist_ok=True)

    def fence(self, generation: int) -> None:
        admin.fence(self.address, JOB, generation, TIMEOUT_S)

    def segments(self, stream: str) -> Sequence[Path]:
        return sorted((self.directory / JOB / stream).glob("*.seg"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            assert self.stop() == 0

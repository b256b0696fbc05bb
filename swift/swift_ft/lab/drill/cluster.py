"""The processes of one run of a drill, and the CA, certificates, signing key and tokens of `--secure`.

The tokens expire before the run ends (its ranks pause before the last step for that). They are renewed in their files
meanwhile, as `swift-ft token --renew` does for a run of months.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from swift_ft import events
from swift_ft.credentials import ENV_CREDENTIALS, TOKEN_FILE, Renewal
from swift_ft.errors import ServiceError
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR
from swift_ft.files import make_directory, private
from swift_ft.lab.drill.config import TOKEN_LIFETIME_S
from swift_ft.launch.standalone import free_port
from swift_ft.text import LAUNCHER_SETTINGS
from swift_ft.tokens import EVERY_JOB
from swift_ft.tools import credentials

LOG_SERVER, COORDINATOR, LAUNCHER = "logserver", "coordinator", "launcher"
"""Names of the processes that the drill starts."""


class Security:
    """Credentials in `directory`. Both services listen with mutual TLS and accept only calls with tokens."""

    def __init__(self, directory: Path, job: str) -> None:
        signing = credentials.make(directory, [], job=job, hours=TOKEN_LIFETIME_S / 3600)
        self.environment = {ENV_CREDENTIALS: str(directory)}
        self._tokens = {
            who: Renewal(
                signing, directory / holder / TOKEN_FILE, of, credentials.HOLDERS[holder], TOKEN_LIFETIME_S
            )
            for who, holder, of in ((COORDINATOR, "services", EVERY_JOB), (LAUNCHER, "ranks", job))
        }
        self.renew()

    def renew(self) -> list[str]:
        """(called periodically) Renews tokens that are due; returns the names of their holders."""
        return [who for who, renewal in self._tokens.items() if renewal.turn()]


# The processes of one run: log server, coordinator, launcher with its ranks, all on loopback.
#
# Everything lies in one directory::
#
#     log/ coordinator/ checkpoints/   files of the services and ranks
#     events/                          the trace of every process
#     digests/                         digests of the ranks' state
#     faults/                          <id>.fired, <id>.reached, <id>.go
#     output/                          stdout and stderr of every process
#
# A single thread supervises all of it (`Cluster.poll`): the kernel kills the children of a thread that ends. Ranks
# are children of the launcher. A service killed by a fault is restarted at once, on the same port and directory. A
# service that exits by itself ends the run.

JOB = "drill"
SERVE_TIMEOUT_S = 30.0
STOP_GRACE_S = {"launcher": 8.0}
STOP_GRACE_S_DEFAULT = 3.0
KILL_WAIT_S = 10.0
POLL_S = 0.01
_SIDECAR_END_S = 5.0
TAIL_LINES = 12

_FOREIGN = ("SWIFT_", "TORCHELASTIC_", "PET_", "TORCHFT_")
_FOREIGN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def own_environment() -> dict[str, str]:
    """Returns this process's environment without the variables by which an outer job would configure the ranks."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }


def dying_with_this(last: signal.Signals) -> Callable[[], None]:
    """Returns a `preexec_fn`: the kernel sends the child signal `last` when the calling thread ends, however it ends.
    SIGTERM is for a child that has children of its own to end."""
    parent = os.getpid()

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, last)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class Process:
    """A child process that leads its own session and dies with this process."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: Path,
        cwd: Path | None = None,
        last: signal.Signals = signal.SIGKILL,
        *,
        program: Sequence[str] = (sys.executable, "-P", "-m"),
    ) -> None:
        """Starts the child: `program` with `arguments`. `last`: as in `dying_with_this`."""
        self.name = name
        self.output = output
        with open(output, "ab", opener=private) as file:
            self._popen = subprocess.Popen(
                [*program, *arguments],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=dying_with_this(last),  # noqa: PLW1509  (no threads here)
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """Returns the exit code (negative: killed by that signal), or None while it runs. Reaps."""
        return self._popen.poll()

    def kill(self) -> None:
        self._popen.kill()

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, then SIGKILL to its session. The process is reaped when this returns."""
        if self.poll() is None:
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        if self.poll() is None:
            # It has not been reaped, so its process group id cannot have been reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(KILL_WAIT_S)

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.output.read_text(errors="replace").splitlines()
            return "\n".join(f"  {self.name}: {line}" for line in lines[-TAIL_LINES:])
        return ""


def await_address(process: Process, path: Path, each_turn: Callable[[], None] = lambda: None) -> str:
    """Returns the address that a service writes to `path` once it serves. Raises ServiceError if it does not."""
    deadline = time.monotonic() + SERVE_TIMEOUT_S
    while not path.exists():
        each_turn()
        code = process.poll()
        if code is not None:
            raise ServiceError(f"the {process.name} did not start (exit code {code})\n{process.tail()}")
        if time.monotonic() > deadline:
            raise ServiceError(f"the {process.name} does not serve\n{process.tail()}")
        time.sleep(POLL_S)
    return path.read_text().strip()


class Cluster:
    """One run of the job, as a context manager: on exit all processes are gone, also after an error."""

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int,
        spares: int,
        max_restarts: int | None = None,
        trainer_arguments: Sequence[str],
        trainer: Sequence[str] = ("-m", "swift_ft.lab.drill.trainer"),
        faults: str = "[]",
        die_at: Sequence[tuple[str, str]] = (),
        digests_every: bool = False,
        settings: Mapping[str, str] | None = None,
        security: Security | None = None,
        launcher_flags: Sequence[str] = (),
        checkpoints: str = "",
        log_servers: int = 1,
        copies: int = 1,
        log_lost_s: float | None = None,
    ) -> None:
        self.directory = directory
        """`faults`: ``SWIFT_FAULTS``. `die_at`: (fault id, state) pairs at which the coordinator kills itself, in
        order. `settings`: additional environment. `security`: keys and certificates of this run; None: plain text.
        `checkpoints`: their URL, if they are not in the directory. `log_servers`: their number, each as if on a machine
        of its own.
        """
        self._ranks = ranks
        self._spares = spares
        self._max_restarts = max_restarts
        self._launcher_flags = launcher_flags
        self._trainer = [*trainer, *trainer_arguments]
        self._die_at = list(die_at)
        self._security = security
        self._log_servers = [
            f"{LOG_SERVER}{n}" if log_servers > 1 else LOG_SERVER for n in range(log_servers)
        ]
        self._checkpoints = checkpoints or str(directory / "checkpoints")
        self._copies = copies
        self._log_lost_s = log_lost_s
        self._lost: set[str] = set()
        """Log servers that were killed and are not restarted."""
        self._serving = [*self._log_servers, COORDINATOR]
        """All services but the members of `_lost` that have been reaped."""
        self._processes: dict[str, Process] = {}
        self._addresses: dict[str, str] = {}
        self._to_be_killed: set[str] = set()
        for name in ("log", "coordinator", "checkpoints", "events", "digests", "faults", "output"):
            make_directory(directory / name)
        self.tail = events.Tail(directory / "events")
        self._env = own_environment() | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            events.ENV_EVENTS_DIR: str(directory / "events"),
            "SWIFT_DIGESTS": str(directory / "digests"),
            # Rehearsals would run concurrently with what a run measures, so they are off unless requested.
            LAUNCHER_SETTINGS["rehearse"]: "off",
            ENV_FAULTS: faults,
            ENV_FAULTS_DIR: str(directory / "faults"),
            **(settings or {}),
            **(security.environment if security is not None else {}),
        }
        if digests_every:
            self._env["SWIFT_DIGESTS_EVERY"] = "1"

    @property
    def log_directories(self) -> list[Path]:
        return [self.directory / _directory_of(name) for name in self._log_servers]

    @property
    def log_addresses(self) -> list[str]:
        return [self._addresses[name] for name in self._log_servers]

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def fault_directory(self) -> Path:
        return self.directory / "faults"

    def release(self, fault: str) -> None:
        (self.fault_directory / f"{fault}.go").touch(0o600)

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        for name in self._log_servers:
            self._start_service(name)
        for name in self._log_servers:
            self._await_service(name)
        self._start_service(COORDINATOR)
        self._await_service(COORDINATOR)
        arguments = ["swift_ft.launch", "--nproc-per-node", str(self._ranks), "--spares", str(self._spares)]
        arguments += ["--coordinator", self._addresses[COORDINATOR], "--job", JOB]
        arguments += ["--checkpoint-dir", self._checkpoints]
        if self._max_restarts is not None:
            arguments += ["--max-restarts", str(self._max_restarts)]
        arguments += ["--sigterm-checkpoint-s", "0"]  # no later run resumes from it
        self._spawn(LAUNCHER, [*arguments, *self._launcher_flags, *self._trainer])

    def _start_service(self, name: str) -> None:
        """Starts a service, on its previous address if it had one."""
        service = COORDINATOR if name == COORDINATOR else LOG_SERVER
        arguments = [f"swift_ft_services.{service}", "--directory", str(self.directory / _directory_of(name))]
        arguments += ["--address-file", str(self.directory / f"{name}.address")]
        address = self._addresses.setdefault(name, f"127.0.0.1:{free_port()}")
        arguments += ["--listen", address]
        if name == COORDINATOR:
            named = [f"machine{n}={address}" for n, address in enumerate(self.log_addresses)]
            arguments += ["--log-servers", ",".join(named), "--copies", str(self._copies)]
            if self._log_lost_s is not None:
                arguments += ["--log-lost-s", str(self._log_lost_s)]
            if self._die_at:
                arguments += ["--die-at", self._die_at[0][1]]
                self._to_be_killed.add(name)
        self._spawn(name, arguments)

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        self._processes[name] = Process(
            name,
            arguments,
            self._env,
            self.directory / "output" / f"{name}.txt",
            last=signal.SIGTERM if name == LAUNCHER else signal.SIGKILL,
        )
        self.trace("started", service=name, service_pid=self._processes[name].pid)

    def _await_service(self, name: str) -> None:
        path = self.directory / f"{name}.address"
        self._addresses[name] = await_address(self._processes[name], path, self._renew_tokens)

    def trace(self, event: str, **fields: Any) -> None:
        line = {"t": events.now(), "who": "drill", "pid": os.getpid(), "event": event, **fields}
        with open(self.directory / "events" / f"drill-{os.getpid()}.jsonl", "a", opener=private) as file:
            file.write(json.dumps(line) + "\n")

    def poll(self) -> int | None:
        """Restarts killed services. Returns the launcher's exit code once it has exited, else None. Raises ServiceError
        if a service has exited by itself."""
        self._renew_tokens()
        for name in list(self._serving):
            code = self._processes[name].poll()
            if code is None:
                continue
            if code != -signal.SIGKILL or name not in self._to_be_killed:
                tail = self._processes[name].tail()
                raise ServiceError(f"the {name} ended by itself (exit code {code})\n{tail}")
            self._to_be_killed.discard(name)
            if name in self._lost:
                self._serving.remove(name)
                shutil.rmtree(self.directory / _directory_of(name))  # its disk is gone as well
                continue
            if name == COORDINATOR:
                fault, state = self._die_at.pop(0)
                self.trace("service_killed", service=name, state=state, id=fault)
            self._start_service(name)
        return self._processes[LAUNCHER].poll()

    def _renew_tokens(self) -> None:
        for name in self._security.renew() if self._security is not None else ():
            self.trace("token_renewed", service=name)

    def kill_log_server(self, fault: str, server: int = 0, *, for_good: bool = False) -> None:
        """Sends SIGKILL to a log server. The next `poll` restarts it, unless `for_good`."""
        name = self._log_servers[server]
        self._to_be_killed.add(name)
        if for_good:
            self._lost.add(name)
        self._processes[name].kill()
        self.trace(
            "service_killed",
            service=name,
            id=fault,
            **({"lost": True, "number": server, "address": self._addresses[name]} if for_good else {}),
        )

    def output_tail(self) -> str:
        return "\n".join(filter(None, (process.tail() for process in self._processes.values())))

    def stop(self) -> None:
        """Ends and reaps all processes, first those that would report errors when the others end."""
        ours = (LAUNCHER, COORDINATOR, *self._log_servers)
        for name in (*(self._processes.keys() - ours), *ours):
            if name in self._processes:
                self._processes[name].stop(STOP_GRACE_S.get(name, STOP_GRACE_S_DEFAULT))
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strays(self) -> list[int]:
        """Returns the pids of processes of this run that stay. A sidecar ends by itself, shortly after its trainer."""
        deadline = time.monotonic() + _SIDECAR_END_S
        while left := with_environment(events.ENV_EVENTS_DIR, str(self.directory / "events")):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left


def with_environment(name: str, value: str) -> list[int]:
    """Returns the pids of other running processes on this machine that were started with this variable."""
    others = psutil.process_iter(["environ"])
    pids = [other.pid for other in others if (other.info["environ"] or {}).get(name) == value]
    return [pid for pid in pids if pid != os.getpid()]


def _directory_of(name: str) -> str:
    return name.replace(LOG_SERVER, "log", 1)

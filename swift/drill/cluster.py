"""The processes of one run: log server, coordinator, launcher with its ranks, all on loopback.

Everything lies in one directory::

    log/ coordinator/ checkpoints/   what the services and ranks keep
    events/                          the trace of every process
    digests/                         what ranks wrote of their state
    faults/                          <id>.fired, <id>.reached, <id>.go
    output/                          stdout and stderr of every process

A single thread looks after all of it (`Cluster.poll`): the kernel kills the children of a thread that ends. Ranks
are the launcher's. A service that a fault killed is started again at once, on the same port and directory; one
that ends by itself ends the run.
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

from swift import events
from swift.drill.security import COORDINATOR, LAUNCHER, LOG_SERVER, Security
from swift.errors import ServiceError
from swift.failures.in_ranks import ENV_FAULTS, ENV_FAULTS_DIR

JOB = "drill"
SERVE_TIMEOUT_S = 30.0
STOP_GRACE_S = {"launcher": 8.0}
STOP_GRACE_S_DEFAULT = 3.0
KILL_WAIT_S = 10.0
POLL_S = 0.01
TAIL_LINES = 12

_FOREIGN = ("SWIFT_", "TORCHELASTIC_", "PET_")
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
    """This process's, without what an outer job would say to the ranks of this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }


def dying_with_this(last: signal.Signals) -> Callable[[], None]:
    """What a child of this thread calls before its program begins: the kernel sends it this signal when the thread
    ends, however it ends. SIGTERM for who has children of its own to end."""
    parent = os.getpid()

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, last)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class Process:
    """One child that leads a session of its own, and dies with this process."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: Path,
        cwd: Path | None = None,
        last: signal.Signals = signal.SIGKILL,
    ) -> None:
        """`last`: as in `dying_with_this`."""
        self.name = name
        self.output = output
        with output.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
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
        """The exit code (negative: killed by that signal); None while it runs. Reaps."""
        return self._popen.poll()

    def kill(self) -> None:
        self._popen.kill()

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its session; reaped when this returns."""
        if self.poll() is None:
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        if self.poll() is None:
            # Not reaped, so the number of its group is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(KILL_WAIT_S)

    def tail(self) -> str:
        """The last lines it wrote."""
        with contextlib.suppress(OSError):
            lines = self.output.read_text(errors="replace").splitlines()
            return "\n".join(f"  {self.name}: {line}" for line in lines[-TAIL_LINES:])
        return ""


class Cluster:
    """A run of the job. Use as a context: whatever happens, all processes are gone when it is left."""

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int,
        spares: int,
        max_restarts: int | None = None,
        trainer_arguments: Sequence[str],
        trainer: Sequence[str] = ("-m", "swift.drill.trainer"),
        faults: str = "[]",
        die_at: Sequence[tuple[str, str]] = (),
        digests_every: bool = False,
        settings: Mapping[str, str] | None = None,
        security: Security | None = None,
        launcher_flags: Sequence[str] = (),
        log_servers: int = 1,
        copies: int = 1,
        log_lost_s: float | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        """`faults`: ``SWIFT_FAULTS``. `die_at`: (fault id, state) of the coordinator, one after the other.
        `settings`: more of the environment. `security`: keys and certificates of this run; None: plain. `log_servers`
        of them, each as if on a machine of its own.

        `check_stop` is called while waiting and raises to end the run.
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
        self._copies = copies
        self._log_lost_s = log_lost_s
        self._lost: set[str] = set()
        """Killed for good."""
        self._gone: set[str] = set()
        """And reaped."""
        self._check_stop = check_stop
        self._processes: dict[str, Process] = {}
        self._addresses: dict[str, str] = {}
        self._to_be_killed: set[str] = set()
        for name in ("log", "coordinator", "checkpoints", "events", "digests", "faults", "output"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.tail = events.Tail(directory / "events")
        self._env = own_environment() | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            events.ENV_EVENTS_DIR: str(directory / "events"),
            "SWIFT_DIGESTS": str(directory / "digests"),
            ENV_FAULTS: faults,
            ENV_FAULTS_DIR: str(directory / "faults"),
            **(settings or {}),
        }
        if digests_every:
            self._env["SWIFT_DIGESTS_EVERY"] = "1"

    @property
    def log_directories(self) -> list[Path]:
        """One for each log server."""
        return [self.directory / _directory_of(name) for name in self._log_servers]

    @property
    def log_addresses(self) -> list[str]:
        return [self._addresses[name] for name in self._log_servers]

    @property
    def pids(self) -> dict[str, int]:
        """Of the services and the launcher, by their names."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def fault_directory(self) -> Path:
        return self.directory / "faults"

    def release(self, fault: str) -> None:
        """Who waits there goes on."""
        (self.fault_directory / f"{fault}.go").touch()

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
        arguments = ["swift.launch", "--nproc-per-node", str(self._ranks), "--spares", str(self._spares)]
        arguments += ["--coordinator", self._addresses[COORDINATOR], "--job", JOB]
        arguments += ["--checkpoint-dir", str(self.directory / "checkpoints")]
        if self._max_restarts is not None:
            arguments += ["--max-restarts", str(self._max_restarts)]
        arguments += ["--sigterm-checkpoint-s", "0"]  # nobody goes on with it
        self._spawn(LAUNCHER, [*arguments, *self._launcher_flags, *self._trainer])

    def _start_service(self, name: str) -> None:
        """With the address it had before, if it had one."""
        service = COORDINATOR if name == COORDINATOR else LOG_SERVER
        arguments = [f"services.{service}", "--directory", str(self.directory / _directory_of(name))]
        arguments += ["--address-file", str(self.directory / f"{name}.address")]
        arguments += ["--listen", self._addresses.get(name, "127.0.0.1:0")]
        if name == COORDINATOR:
            named = [f"machine{n}={address}" for n, address in enumerate(self.log_addresses)]
            arguments += ["--log-servers", ",".join(named), "--copies", str(self._copies)]
            if self._log_lost_s is not None:
                arguments += ["--log-lost-s", str(self._log_lost_s)]
            if self._die_at:
                arguments += ["--die-at", self._die_at[0][1]]
                self._to_be_killed.add(name)
        if self._security is not None:
            arguments += self._security.server_flags()
        self._spawn(name, arguments)

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        env = self._env | (self._security.environment(name) if self._security is not None else {})
        self._processes[name] = Process(
            name,
            arguments,
            env,
            self.directory / "output" / f"{name}.txt",
            last=signal.SIGTERM if name == LAUNCHER else signal.SIGKILL,
        )
        self.trace("started", service=name, service_pid=self._processes[name].pid)

    def _await_service(self, name: str) -> None:
        deadline = time.monotonic() + SERVE_TIMEOUT_S
        path = self.directory / f"{name}.address"
        while not path.exists():
            self._look_around()
            code = self._processes[name].poll()
            if code is not None:
                raise ServiceError(
                    f"the {name} did not start (exit code {code})\n{self._processes[name].tail()}"
                )
            if time.monotonic() > deadline:
                raise ServiceError(f"the {name} does not serve\n{self._processes[name].tail()}")
            time.sleep(POLL_S)
        self._addresses[name] = path.read_text().strip()

    def trace(self, event: str, **fields: Any) -> None:
        """An event of the drill itself, in the run's trace."""
        line = {"t": events.now(), "who": "drill", "pid": os.getpid(), "event": event, **fields}
        with (self.directory / "events" / "drill.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def poll(self) -> int | None:
        """Starts killed services again. The launcher's exit code once it has ended. Raises ServiceError if a service
        has ended by itself."""
        self._look_around()
        for name in (*self._log_servers, COORDINATOR):
            if name in self._gone:
                continue
            code = self._processes[name].poll()
            if code is None:
                continue
            if code != -signal.SIGKILL or name not in self._to_be_killed:
                tail = self._processes[name].tail()
                raise ServiceError(f"the {name} ended by itself (exit code {code})\n{tail}")
            self._to_be_killed.discard(name)
            if name in self._lost:
                self._gone.add(name)
                shutil.rmtree(self.directory / _directory_of(name))  # its disk is gone as well
                continue
            if name == COORDINATOR:
                fault, state = self._die_at.pop(0)
                self.trace("service_killed", service=name, state=state, id=fault)
            self._start_service(name)
        return self._processes[LAUNCHER].poll()

    def _look_around(self) -> None:
        self._check_stop()
        for name in self._security.renew() if self._security is not None else ():
            self.trace("token_renewed", service=name)

    def kill_log_server(self, fault: str, server: int = 0, *, for_good: bool = False) -> None:
        """SIGKILL; the next `poll` starts it again, unless it is `for_good`."""
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

    def start_plan(self, name: str, words: Sequence[str]) -> Process:
        """An operator's `swift-ft plan` of the running job; its output is in a file of that name."""
        arguments = ["swift.cli", "plan", "--coordinator", self._addresses[COORDINATOR], "--job", JOB]
        self._spawn(name, [*arguments, *words])
        return self._processes[name]

    def fetch_profile(self, path: Path) -> str:
        """What `swift-ft plan` gets of the job, as if each rank had a machine, into `path`. Why not; empty: it did."""
        env = self._env | (self._security.environment(LAUNCHER) if self._security is not None else {})
        command = [
            sys.executable,
            "-P",
            "-m",
            "swift.cli",
            "plan",
            "--coordinator",
            self._addresses[COORDINATOR],
        ]
        command += ["--job", JOB, "--machine-per-rank", "--save-profile", str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"

    def output_tail(self) -> str:
        """The last lines of every process, for a person who has to find out."""
        return "\n".join(filter(None, (process.tail() for process in self._processes.values())))

    def stop(self) -> None:
        """Ends and reaps all processes: first those that would complain about the others' end."""
        ours = (LAUNCHER, COORDINATOR, *self._log_servers)
        for name in (*(self._processes.keys() - ours), *ours):
            if name in self._processes:
                self._processes[name].stop(STOP_GRACE_S.get(name, STOP_GRACE_S_DEFAULT))
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strays(self) -> list[int]:
        """Processes that carry this run's environment and are still there."""
        return with_environment(events.ENV_EVENTS_DIR, str(self.directory / "events"))


def with_environment(name: str, value: str) -> list[int]:
    """The other processes of this machine that were started with this variable, and are still there."""
    mark = f"{name}={value}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return [pid for pid in pids if pid != os.getpid()]


def _directory_of(name: str) -> str:
    return name.replace(LOG_SERVER, "log", 1)

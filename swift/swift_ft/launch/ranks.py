"""Inputs of a rank, as torchrun gives them: environment, arguments, files for output."""

import enum
import os
import re
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Union

from swift_ft.comm import NCCL_ENVIRONMENT
from swift_ft.errors import UsageError
from swift_ft.files import make_directory
from swift_ft.launch.worker import Program


class Std(enum.IntFlag):
    """Streams of a rank, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_text(cls, text: str) -> Union["Std", dict[int, "Std"]]:
        """Parses --redirects: "3" for all ranks, or "0:3,1:2" by local rank. Raises ValueError."""
        if re.fullmatch("[0-3]", text):
            return cls(int(text))
        if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            raise ValueError(f"--redirects {text}: 0 to 3, or LOCAL_RANK:0 to 3 with commas between")
        return {
            int(rank): cls(int(streams)) for rank, streams in (word.split(":") for word in text.split(","))
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """What torchrun's flags say of this machine's ranks."""

    nproc_per_node: int
    min_nodes: int
    max_nodes: int
    run_id: str
    role: str
    endpoint: tuple[str, int]
    """The first machine's, where machines have numbers."""
    node_rank: int
    timeout_s: float
    """Of the store for trainers."""
    replacements: int
    """How many dead ranks with a session are replaced."""
    max_restarts: int | None
    """How often all ranks of a script without a session are restarted, as in torchrun; None: not given."""
    monitor_interval: float
    local_addr: str | None
    signals: list[signal.Signals]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgram:
    script: str
    module: bool
    args: list[str]
    cwd: str
    coordinator: str
    name: str
    checkpoint_dir: str | None
    run: str = ""
    """A unique id of this launcher."""
    retry_exceptions: int = 0
    """The number of times that a step may be repeated after an exception."""
    from_job: str = ""
    """The job with whose checkpoint this one begins; empty: no checkpoint."""
    from_version: int | None = None
    """The version of that checkpoint; None: the newest."""
    from_checkpoints: str = ""
    """The directory of the job's checkpoints, to go on from if the coordinator does not know the job."""

    def sys_path0(self) -> str:
        """Returns the first entry of sys.path under `python SCRIPT` or `python -m MODULE`."""
        return self.cwd if self.module else os.path.dirname(os.path.realpath(self.script))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePlace:
    number: int
    ranks_of: list[int]
    """The number of ranks of each machine, by place."""
    master_addr: str
    master_port: int

    def rank(self, local_rank: int) -> int:
        """Returns the rank at a place of this machine: ranks are numbered by machine, in order."""
        return sum(self.ranks_of[: self.number]) + local_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    redirects: dict[int, Std] = field(default_factory=dict)
    """By local rank: the streams that go to files."""
    shown: frozenset[int] | None = None
    """Local ranks whose output is shown if it is not redirected; None: all."""
    run_dir: Path | None = None
    """Holds LOCAL_RANK/stdout.log and stderr.log."""

    def file(self, local_rank: int, stream: Std, name: str) -> str | None:
        if self.run_dir is not None and self.redirects.get(local_rank, Std.NONE) & stream:
            return str(self.rank_dir(local_rank) / name)
        if self.shown is not None and local_rank not in self.shown:
            return os.devnull
        return None

    def rank_dir(self, local_rank: int) -> Path:
        assert self.run_dir is not None
        directory = self.run_dir / "attempt_0" / str(local_rank)
        make_directory(directory)
        return directory


def make_run_dir(log_dir: str | None, run_id: str) -> Path:
    """Returns a new directory for this run's output: RUN_ID_xxxx in the log directory, as torchrun names it; a / in the
    id is written ~. Raises UsageError if it cannot be created."""
    try:
        if log_dir is not None:
            make_directory(Path(log_dir))
        base = os.path.abspath(log_dir or tempfile.mkdtemp(prefix="torchelastic_"))
        return Path(tempfile.mkdtemp(prefix=f"{run_id.replace('/', '~')}_", dir=base))
    except OSError as error:
        raise UsageError(
            f"run: --log-dir {log_dir}: {error.strerror}: name a directory that can be written"
        ) from error


def place_env(machine: LaunchSettings, local_rank: int, job: RankProgram) -> dict[str, str]:
    """Returns the variables of a place of this machine, independent of the rank: for a health check, and as a part of a
    rank's own."""
    env = {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(machine.nproc_per_node),
        "SWIFT_COORDINATOR": job.coordinator,
        "SWIFT_JOB": job.name,
    }
    if job.checkpoint_dir is not None:
        env["SWIFT_CHECKPOINT_DIR"] = job.checkpoint_dir
    return env


def rank_env(
    machine: LaunchSettings,
    place: MachinePlace,
    local_rank: int,
    *,
    job: RankProgram,
    incarnation: str,
    device_of: int | None = None,
    restarts: int = 0,
) -> dict[str, str]:
    """Returns the variables of one rank, on top of the launcher's own environment. `device_of`: the local rank on whose
    device it runs, if that is not its own: trainers choose theirs by LOCAL_RANK. `restarts`: of all ranks."""
    rank, world_size = str(place.rank(local_rank)), str(sum(place.ranks_of))
    env = place_env(machine, local_rank if device_of is None else device_of, job) | {
        "RANK": rank,
        "GROUP_RANK": str(place.number),
        "ROLE_RANK": rank,
        "ROLE_NAME": machine.role,
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(len(place.ranks_of)),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(machine.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": machine.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # The session refuses other values where it uses NCCL.
        **{name: os.environ.get(name, value) for name, value in NCCL_ENVIRONMENT.items()},
        # cuBLAS reads it with its first handle; the session refuses values that do not give the same bits each time.
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "SWIFT_INCARNATION": incarnation,
        "SWIFT_RUN": job.run,
        "SWIFT_LOCAL_PLACE": str(local_rank),
        "SWIFT_RETRY_EXCEPTIONS": str(job.retry_exceptions),
    }
    if job.from_job:
        env["SWIFT_FROM_JOB"] = job.from_job
    if job.from_checkpoints:
        env["SWIFT_FROM_CHECKPOINTS"] = job.from_checkpoints
    if job.from_version is not None:
        env["SWIFT_FROM_VERSION"] = str(job.from_version)
    return env


def make_program(job: RankProgram, output: Output, local_rank: int, env: dict[str, str]) -> Program:
    if output.run_dir is not None:
        env = env | {"TORCHELASTIC_ERROR_FILE": str(output.rank_dir(local_rank) / "error.json")}
    return Program(
        env=env,
        script=job.script,
        module=job.module,
        args=[Template(arg).safe_substitute(local_rank=local_rank) for arg in job.args],
        cwd=job.cwd,
        stdout=output.file(local_rank, Std.OUT, "stdout.log"),
        stderr=output.file(local_rank, Std.ERR, "stderr.log"),
    )

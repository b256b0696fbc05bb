"""Starts runs of a script, one after the other, on this machine; its ranks record their steps.

(session)  a cluster like the drill's: log server, coordinator and launcher on loopback; a rank kills itself, and is
           replaced, or the others continue without it
(script)   processes with torchrun's environment; a rank kills itself, the others are ended; then a second start

Each run has a directory: records/ of its ranks, work/ for the script, output/, and the services' data.
"""

import contextlib
import json
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import ServiceError, UsageError
from swift_ft.fault_grammar import RankFault, fault_id, item
from swift_ft.files import make_directory
from swift_ft.lab.determinism.verify import ENV_DIE_IN, ENV_RECORDS, Interrupted, Run, placed, run_of
from swift_ft.lab.drill.cluster import POLL_S, Cluster, Process, own_environment, with_environment
from swift_ft.launch.standalone import free_port
from swift_ft.planner import reroutes, shrinks
from swift_ft.text import LAUNCHER_SETTINGS, tell

RUN = "{run}"
"""Placeholder in the script's arguments for the run's directory."""
THREADS = "OMP_NUM_THREADS"
_STEPS_MIN = 4
RANK_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for a rank whose run is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Checked command line. Only the script's number of steps is unknown until it has run."""

    script: Path
    arguments: Sequence[str]
    ranks: int
    own_checkpoints: bool
    strategy: str | None
    lost_shard: str | None
    snapshot_every: int | None
    kill: RankFault | None
    """None: chosen by `seed`."""
    seed: int
    patience_s: float
    """Seconds without output or records after which a run is given up."""
    json_path: Path | None
    directory: Path | None
    keep: bool

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise UsageError(f"{self.script}: there is no such script")
        if self.ranks < 1:
            raise UsageError(f"--nproc-per-node {self.ranks}: 1 or more")
        if self.patience_s <= 0:
            raise UsageError(f"--patience-s {self.patience_s:g}: seconds, more than 0")
        if self.kill is not None and self.kill.rank >= self.ranks:
            raise UsageError(f"--kill {self.kill}: there are ranks 0 to {self.ranks - 1}")
        for setting in ("strategy", "lost_shard", "snapshot_every") if self.own_checkpoints else ():
            if getattr(self, setting) is not None:
                flag = f"--{setting.replace('_', '-')}"
                raise UsageError(f"{flag} is for scripts with a session; leave it or --own-checkpoints out")

    @property
    def replaces(self) -> bool:
        return self.lost_shard is None and (self.strategy is None or not shrinks(self.strategy))


class _Runs(ABC):
    no_steps = ""
    """Error message for a script whose steps were not seen."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._config = config
        self._directory = directory.resolve()

    def uninterrupted(self, name: str) -> Run:
        """Executes a run without interruption. Raises ServiceError if it fails, UsageError if no step was seen."""
        tell(f"{name} run, uninterrupted")
        directory = self._made(name)
        self._start(directory)
        run = read(directory)
        if not run.num_steps:
            raise UsageError(f"{self._config.script}: {self.no_steps}")
        return run

    def interrupted(self, base: Run) -> Interrupted:
        """Executes a run in which a rank is killed. Raises UsageError if that step was not reached, ServiceError if
        it fails."""
        kill = self._kill(base.num_steps)
        tell(f"interrupted run: rank {kill.rank} is killed in step {kill.step} of {base.num_steps}")
        return self._interrupted(base, kill, self._made("interrupted"))

    @abstractmethod
    def _start(self, directory: Path) -> None: ...

    @abstractmethod
    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted: ...

    def _made(self, name: str) -> Path:
        for part in ("records", "work", "output"):
            make_directory(self._directory / name / part)
        return self._directory / name

    def _arguments(self, directory: Path) -> list[str]:
        return [word.replace(RUN, str(directory / "work")) for word in self._config.arguments]

    def _kill(self, steps: int) -> RankFault:
        """Returns the requested kill. Otherwise draws one in the second half, when any checkpoint has been saved, and
        before the last step. Raises UsageError if the script has too few steps."""
        kill = self._config.kill
        if kill is not None and (kill.step or 0) >= steps:
            raise UsageError(f"--kill {kill}: the script does steps 0 to {steps - 1}")
        if kill is None and steps < _STEPS_MIN:
            raise UsageError(
                f"the script does {steps} step(s): give it arguments with which it does {_STEPS_MIN}"
            )
        chosen = random.Random(self._config.seed)
        rank, step = chosen.randrange(self._config.ranks), chosen.randrange(steps // 2, max(2, steps) - 1)
        return kill or RankFault(rank=rank, step=step, phase="optimizer")

    def _check_heard(self, since: float) -> None:
        if time.monotonic() - since > self._config.patience_s:
            raise ServiceError(f"nothing was heard of the run for {self._config.patience_s:g} s")


class SessionRuns(_Runs):
    no_steps = (
        "no step of a swift_ft.Session was seen; a script with checkpoints of its own needs --own-checkpoints"
    )

    def _start(self, directory: Path) -> None:
        self._follow(directory, "[]", spares=0)

    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted:
        faults = json.dumps([item(kill, fault_id(0))])
        self._follow(directory, faults, spares=1 if self._config.replaces else 0)
        if not (directory / "faults" / f"{fault_id(0)}.fired").exists():
            raise UsageError(f"--kill {kill}: the run never came to that; choose another phase or step")
        run = read(directory)
        started = [process for process in run.processes if process[0].rank == kill.rank][1:]
        shared = reroutes(self._config.strategy or "", self._config.lost_shard or "")
        return Interrupted(run, kill.step or 0, started, session=True, shared=shared)

    def _follow(self, directory: Path, faults: str, *, spares: int) -> None:
        settings = {
            variable: str(value)
            for setting, variable in LAUNCHER_SETTINGS.items()
            if (value := getattr(self._config, setting, None)) is not None
        }
        threads = {THREADS: os.environ[THREADS]} if THREADS in os.environ else {}
        cluster = Cluster(
            directory,
            ranks=self._config.ranks,
            spares=spares,
            max_restarts=None if spares else 0,
            trainer_arguments=self._arguments(directory),
            trainer=[str(self._config.script.resolve())],
            faults=faults,
            settings={**settings, **threads, ENV_RECORDS: str(directory / "records")},
            launcher_flags=["--preload", "swift_ft.lab.determinism.in_session"],
        )
        with cluster:
            heard = time.monotonic()
            while (code := cluster.poll()) is None:
                if cluster.tail.read():
                    heard = time.monotonic()
                self._check_heard(heard)
                time.sleep(POLL_S)
            if code != 0:
                raise ServiceError(f"the run has failed (exit code {code})\n{cluster.output_tail()}")


class ScriptRuns(_Runs):
    no_steps = (
        "no step was seen: it must call step() of a torch.optim.Optimizer, and it must begin anew in an empty "
        f"directory (the working directory, or {RUN} in its arguments)"
    )

    def __init__(
        self,
        config: Config,
        directory: Path,
        start_rank: Callable[..., Process] = Process,
    ) -> None:
        """`start_rank`: creates a `Process`, with its arguments."""
        super().__init__(config, directory)
        self._start_rank = start_rank

    def _start(self, directory: Path) -> None:
        code, output = self._run(directory, 0, {})
        if code != 0:
            raise ServiceError(f"the script has failed (exit code {code})\n{output}")

    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted:
        code, output = self._run(directory, 0, {ENV_DIE_IN: f"{kill.rank}:{kill.step}"})
        if code == 0:
            raise UsageError(f"--kill {kill}: rank {kill.rank} has not come to that step")
        begun = read(directory)
        if sum(record.rank == kill.rank for process in begun.processes for record in process) != kill.step:
            raise ServiceError(f"the script has failed before it was killed (exit code {code})\n{output}")
        tell("the same command again")
        code, output = self._run(directory, 1, {})
        if code != 0:
            raise ServiceError(f"the script, started again, has failed (exit code {code})\n{output}")
        started = placed(base, read(directory, 1)).processes
        return Interrupted(Run((*begun.processes, *started)), kill.step, started, session=False)

    def _run(self, directory: Path, start: int, environment: Mapping[str, str]) -> tuple[int, str]:
        """Executes one start. Returns (exit code, last output lines) of the first failed rank, or (0, ""). Ends all
        processes."""
        records = _records(directory, start)
        make_directory(records)
        shared = {**own_environment(), **_as_torchrun(self._config.ranks), **environment}
        shared |= {ENV_RECORDS: str(records), "PYTHONUNBUFFERED": "1"}
        arguments = ["swift_ft.lab.determinism.in_script", str(self._config.script.resolve())]
        arguments += self._arguments(directory)
        ranks: list[Process] = []
        try:
            for rank in range(self._config.ranks):
                env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                output = directory / "output" / f"start{start}-rank{rank}.txt"
                ranks.append(self._start_rank(f"rank{rank}", arguments, env, output, directory / "work"))
            return self._await(ranks, records)
        finally:
            for process in ranks:
                process.stop(RANK_GRACE_S)
            for pid in with_environment(ENV_RECORDS, str(records)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _await(self, ranks: Sequence[Process], records: Path) -> tuple[int, str]:
        heard, size = time.monotonic(), -1
        while True:
            codes = [process.poll() for process in ranks]
            if failed := [process for process, code in zip(ranks, codes, strict=True) if code]:
                return failed[0].poll() or 0, failed[0].tail()
            if None not in codes:
                return 0, ""
            files = [*records.glob("*.jsonl"), *(process.output for process in ranks)]
            if (now := sum(path.stat().st_size for path in files)) != size:
                heard, size = time.monotonic(), now
            self._check_heard(heard)
            time.sleep(POLL_S)


def _as_torchrun(ranks: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for all of a script's ranks."""
    ours = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "MASTER_PORT": free_port()}
    threads = {THREADS: "1"} if ranks > 1 and THREADS not in os.environ else {}
    return threads | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in ours.items()}


def _records(directory: Path, start: int) -> Path:
    return directory / "records" / f"start{start}" if start else directory / "records"


def read(directory: Path, start: int = 0) -> Run:
    """Reads the records of a run's ranks; without a session, those of start number `start`."""
    return run_of(path.read_text() for path in sorted(_records(directory, start).glob("*.jsonl")))

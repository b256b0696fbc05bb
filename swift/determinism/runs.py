"""Starts runs of a script, one after the other, on this machine: its ranks record their steps.

(session)  a cluster as the drill's: log server, coordinator and launcher on loopback; a rank kills itself, and is
           replaced, or the others go on without it
(script)   processes with what torchrun tells ranks; a rank kills itself, the others are ended; the same once more

A run has a directory: records/ of its ranks, work/ for the script, output/, and what services keep.
"""

import contextlib
import os
import random
import signal
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from swift.determinism.alignment import place
from swift.determinism.config import RUN, Config
from swift.determinism.records import ENV_DIE_IN, ENV_RECORDS, Run, run_of
from swift.determinism.verify import Interrupted
from swift.drill.cluster import (
    POLL_S,
    Cluster,
    Process,
    own_environment,
    with_environment,
)
from swift.drill.fault_environment import to_environment
from swift.errors import ServiceError, UsageError
from swift.failures.grammar import RankFault, fault_id
from swift.names import ENV_ALLOW_INEXACT, LAUNCHER_SETTINGS
from swift.recovery.types import reroutes
from swift.words import tell

THREADS = "OMP_NUM_THREADS"
_STEPS_MIN = 4
LOOPBACK = "127.0.0.1"
RANK_GRACE_S = 1.0
"""A rank of a script whose run is over has so long to end by SIGTERM."""


class _Runs:
    """What both kinds have in common."""

    def __init__(self, config: Config, directory: Path, check_stop: Callable[[], None]) -> None:
        """`check_stop` is called while waiting and raises to end the run."""
        self._config = config
        self._directory = directory
        self._check_stop = check_stop

    def uninterrupted(self, name: str, environment: Mapping[str, str]) -> Run:
        """A run that nobody disturbs. Raises ServiceError: it has failed; UsageError: it has no steps."""
        tell(f"{name} run, uninterrupted")
        directory = self._made(name)
        self._start(directory, environment)
        run = read(directory)
        if not run.num_steps:
            raise UsageError(self._no_steps(directory))
        return run

    def interrupted(self, base: Run) -> Interrupted:
        """A run in which a rank is killed. Raises UsageError: it has no such step; ServiceError: it has failed."""
        kill = self._kill(base)
        tell(f"interrupted run: rank {kill.rank} is killed in step {kill.step} of {base.num_steps}")
        return self._interrupted(base, kill, self._made("interrupted"))

    @abstractmethod
    def _start(self, directory: Path, environment: Mapping[str, str]) -> None: ...

    @abstractmethod
    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted: ...

    @abstractmethod
    def _no_steps(self, directory: Path) -> str: ...

    def _made(self, name: str) -> Path:
        directory = self._directory.resolve() / name
        for part in ("records", "work", "output"):
            (directory / part).mkdir(parents=True)
        return directory

    def _arguments(self, directory: Path) -> list[str]:
        return [word.replace(RUN, str(directory / "work")) for word in self._config.arguments]

    def _kill(self, base: Run) -> RankFault:
        """That which was asked for; or one in the second half, when there is a checkpoint if there is any, and before
        the last step."""
        steps = base.num_steps
        kill = self._config.kill
        if kill is None:
            if steps < _STEPS_MIN:
                raise UsageError(
                    f"the script does {steps} step(s): give it arguments with which it does {_STEPS_MIN}"
                )
            chosen = random.Random(self._config.seed)
            rank, step = chosen.randrange(self._config.ranks), chosen.randrange(steps // 2, steps - 1)
            return RankFault(rank=rank, step=step, phase="optimizer")
        if kill.step is not None and kill.step >= steps:
            raise UsageError(f"--kill {kill}: the script does steps 0 to {steps - 1}")
        return kill


class SessionRuns(_Runs):
    """Of a script with a `swift.Session`."""

    def _start(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._follow(directory, environment, "[]", spares=0)

    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted:
        spares = 1 if self._config.replaces else 0
        self._follow(directory, {}, to_environment([kill]), spares=spares)
        if not (directory / "faults" / f"{fault_id(0)}.fired").exists():
            raise UsageError(f"--kill {kill}: the run never came to that; choose another phase or step")
        run = read(directory)
        first = [process for process in run.processes if process.rank == kill.rank][1:]
        resumed = min((record.step for process in first for record in process.records), default=None)
        return Interrupted(
            run=run,
            step=kill.step or 0,
            resumed_at=resumed,
            session=True,
            inexact=self._config.inexact,
            shared=reroutes(self._config.strategy or "", self._config.lost_shard or ""),
        )

    def _no_steps(self, directory: Path) -> str:
        return (
            f"{self._config.script}: no step of a swift.Session was seen; a script with checkpoints of its own needs "
            "--own-checkpoints"
        )

    def _follow(self, directory: Path, environment: Mapping[str, str], faults: str, *, spares: int) -> None:
        cluster = Cluster(
            directory,
            ranks=self._config.ranks,
            spares=spares,
            max_restarts=None if spares else 0,
            trainer_arguments=self._arguments(directory),
            trainer=[str(self._config.script.resolve())],
            faults=faults,
            settings={**self._settings(directory), **environment},
            launcher_flags=["--preload", "swift.determinism.in_session"],
            check_stop=self._check_stop,
        )
        with cluster:
            heard = time.monotonic()
            while (code := cluster.poll()) is None:
                if cluster.tail.read():
                    heard = time.monotonic()
                if time.monotonic() - heard > self._config.patience_s:
                    raise ServiceError(f"nothing was heard of the run for {self._config.patience_s:g} s")
                time.sleep(POLL_S)
            if code != 0:
                raise ServiceError(f"the run has failed (exit code {code})\n{cluster.output_tail()}")

    def _settings(self, directory: Path) -> dict[str, str]:
        said = {
            variable: str(value)
            for setting, variable in LAUNCHER_SETTINGS.items()
            if (value := getattr(self._config, setting, None)) is not None
        }
        if self._config.allow_inexact:
            said[ENV_ALLOW_INEXACT] = "1"
        if THREADS in os.environ:
            said[THREADS] = os.environ[THREADS]
        return {**said, ENV_RECORDS: str(directory / "records")}


class ScriptRuns(_Runs):
    """Of a script with checkpoints of its own."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        check_stop: Callable[[], None],
        start_rank: Callable[..., Process] = Process,
    ) -> None:
        """`start_rank`: as `Process`, which it gives."""
        super().__init__(config, directory, check_stop)
        self._start_rank = start_rank

    def _start(self, directory: Path, environment: Mapping[str, str]) -> None:
        code, output = self._run(directory, 0, environment)
        if code != 0:
            raise ServiceError(f"the script has failed (exit code {code})\n{output}")

    def _interrupted(self, base: Run, kill: RankFault, directory: Path) -> Interrupted:
        code, output = self._run(directory, 0, {ENV_DIE_IN: f"{kill.rank}:{kill.step}"})
        if code == 0:
            raise UsageError(f"--kill {kill}: rank {kill.rank} has not come to that step")
        before = read(directory)
        at = next((p.steps[-1].step + 1 for p in before.processes if p.rank == kill.rank and p.steps), 0)
        if at != kill.step:
            raise ServiceError(f"the script has failed before it was killed (exit code {code})\n{output}")
        tell("the same command again")
        code, output = self._run(directory, 1, {})
        if code != 0:
            raise ServiceError(f"the script, started again, has failed (exit code {code})\n{output}")
        placed = place(base, read(directory, 1).processes)
        resumed = min((record.step for process in placed for record in process.records), default=None)
        return Interrupted(
            run=Run(processes=(*before.processes, *placed)),
            step=kill.step or 0,
            resumed_at=resumed,
            session=False,
        )

    def _no_steps(self, directory: Path) -> str:
        return (
            f"{self._config.script}: no step was seen: it must call step() of a torch.optim.Optimizer, and it must "
            f"begin anew in an empty directory (the working directory, or {RUN} in its arguments)"
        )

    def _run(self, directory: Path, start: int, environment: Mapping[str, str]) -> tuple[int, str]:
        """(exit code, the last lines) of the first rank that has failed, or 0. Nothing is left when this returns."""
        records = _records(directory, start)
        records.mkdir(parents=True, exist_ok=True)
        shared = {**own_environment(), **_meeting(), **environment}
        shared |= {ENV_RECORDS: str(records), "PYTHONUNBUFFERED": "1"}
        ranks = []
        try:
            for rank in range(self._config.ranks):
                output = directory / "output" / f"start{start}-rank{rank}.txt"
                arguments = ["swift.determinism.in_script", str(self._config.script.resolve())]
                env = {**shared, **_place(rank, self._config.ranks)}
                ranks.append(
                    self._start_rank(
                        f"rank{rank}",
                        [*arguments, *self._arguments(directory)],
                        env,
                        output,
                        directory / "work",
                    )
                )
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
            for process, code in zip(ranks, codes, strict=True):
                if code:
                    return code, process.tail()
            if None not in codes:
                return 0, ""
            self._check_stop()
            if (now := _size([*records.glob("*.jsonl"), *(process.output for process in ranks)])) != size:
                heard, size = time.monotonic(), now
            if time.monotonic() - heard > self._config.patience_s:
                raise ServiceError(f"nothing was heard of the script for {self._config.patience_s:g} s")
            time.sleep(POLL_S)


def _meeting() -> dict[str, str]:
    """Where the ranks of a script meet, as torchrun tells them."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free.getsockname()[1])}


def _place(rank: int, ranks: int) -> dict[str, str]:
    """The rest of what torchrun tells a rank."""
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    threads = {THREADS: "1"} if ranks > 1 and THREADS not in os.environ else {}
    return threads | {name: str(value) for name, value in ours.items()}


def _records(directory: Path, start: int) -> Path:
    return directory / "records" / f"start{start}" if start else directory / "records"


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def read(directory: Path, start: int = 0) -> Run:
    """What the ranks of a run have recorded; of a script, those of that start."""
    files = sorted(_records(directory, start).glob("*.jsonl"))
    return run_of(path.read_text().splitlines(keepends=True) for path in files)

"""Processes that need torch, forked from one that has imported it: by the launcher's own means, as ranks are.

An import takes seconds of a core, a launcher and its fork server two of them. A run in which nothing is going to fail
needs neither; those of other runs are forked as well. Drills start theirs as people do.
"""

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from swift_ft.lab.drill.cluster import COORDINATOR, JOB, KILL_WAIT_S, LAUNCHER, TAIL_LINES, Cluster, Process
from swift_ft.launch.children import Child, Nursery
from swift_ft.launch.command import PRELOAD_DEFAULT
from swift_ft.launch.worker import Program

REPOSITORY = Path(__file__).parents[2]
TRAINERS = Path(__file__).with_name("trainers")
"""They import each other, as scripts that are started by their own path do."""


class Forked:
    """One process, to wait for or to kill as one of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, child: Child) -> None:
        self._nursery = nursery
        self._child = child
        self.pid = child.pid

    def wait(self, timeout_s: float) -> int:
        """Its exit code, negative if a signal killed it."""
        deadline = time.monotonic() + timeout_s
        while self._child.exit_code is None:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"process {self.pid} is still there after {timeout_s:g} s"
            self._nursery.wait(left_s)
        return self._child.exit_code

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        self._nursery.wait(0.0)
        return self._child.exit_code

    def kill(self) -> None:
        self._nursery.kill([self._child])


class Forks:
    """A fork server, and what was forked from it. All of it in the main thread."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(TRAINERS)}
        unfit: list[str] = []
        self._nursery = Nursery(env, str(REPOSITORY), PRELOAD_DEFAULT, on_unfit=unfit.append)
        self._nursery.prepare()
        assert not unfit, unfit

    def run(
        self,
        script: Path | str,
        arguments: Sequence[object],
        env: Mapping[str, str],
        stdout: Path | None = None,
        stderr: Path | None = None,
    ) -> Forked:
        """A file, or the name of a module. `env` is added to what this process has had."""
        child = self._nursery.spawn()
        assert child.forked
        assignment = Program(
            env=dict(env),
            script=str(script),
            module=isinstance(script, str),
            args=[str(argument) for argument in arguments],
            cwd=str(REPOSITORY),
            stdout=None if stdout is None else str(stdout),
            stderr=None if stderr is None else str(stderr),
        )
        child.assign(0, assignment)
        return Forked(self._nursery, child)

    def give_word(self) -> None:
        """Whoever is first of those that are started now may print a mistake that all of them make."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._nursery._word_read, 1)
        os.write(self._nursery._word_write, b"w")

    def close(self) -> None:
        self._nursery.close()


@functools.cache
def shared() -> Forks:
    """One fork server for each process that runs tests; the fixture `forks` closes it."""
    return Forks()


NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""Ranks of a session meet at their coordinator, whatever is on the first machine."""


def meeting(store: TCPStore) -> dict[str, str]:
    """The environment of ranks that meet there."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


class Meeting:
    """Processes that meet in one store. What each of them prints is in a file of `place`."""

    def __init__(self, forks: Forks, place: Path) -> None:
        self.place = place
        self._forks = forks
        self._store = new_store()
        self.started: list[Forked] = []

    def start(self, program: Path | str, *arguments: object) -> Forked:
        environment = meeting(self._store)
        output = self._output(len(self.started))
        self.started.append(self._forks.run(program, arguments, environment, output))
        return self.started[-1]

    def answer(self, process: Forked) -> dict[str, Any]:
        """Its last line, once it has ended."""
        assert process.wait(240) == 0
        lines = self._output(self.started.index(process)).read_text().splitlines()
        return dict(json.loads(lines[-1]))

    def _output(self, number: int) -> Path:
        return self.place / f"{number}.out"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()


class _Ranks:
    """In the place of a launcher: started by somebody who replaces nobody."""

    def __init__(
        self, forks: Forks, trainer: Sequence[str], count: int, env: Mapping[str, str], output: Path
    ) -> None:
        self._output = output
        self._output.touch()
        forks.give_word()
        module = trainer[0] == "-m"
        script, arguments = (trainer[1], trainer[2:]) if module else (Path(trainer[0]), trainer[1:])
        self._ranks = [
            forks.run(
                script,
                arguments,
                {
                    **env,
                    **NOWHERE,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "SWIFT_INCARNATION": f"rank{rank}",
                },
                output,
                output,
            )
            for rank in range(count)
        ]

    def exit_codes(self) -> list[int]:
        """Of those that have ended."""
        return [code for code in (rank.poll() for rank in self._ranks) if code is not None]

    def poll(self) -> int | None:
        """0 once all have ended well; the exit code of one that has not."""
        codes = [rank.poll() for rank in self._ranks]
        failed = next((code for code in codes if code), None)
        return failed if failed is not None or None in codes else 0

    def stop(self, _grace_s: float) -> None:
        for rank in self._ranks:
            rank.kill()

    def tail(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class _Launcher(Process):
    """A launcher with its fork server, forked."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self.name, self.output = LAUNCHER, output
        self._forked = shared().run("tests.integration.forked_launcher", arguments, env, output, output)
        self.pid = self._forked.pid

    def poll(self) -> int | None:
        return self._forked.poll()

    def kill(self) -> None:
        self._forked.kill()

    def stop(self, grace_s: float) -> None:
        if self.poll() is not None:
            return
        os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            self._forked.wait(grace_s)
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._forked.wait(KILL_WAIT_S)


class ForkedCluster(Cluster):
    """A cluster as drills have it, but for what its launcher and that one's fork server are made of."""

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name != LAUNCHER or arguments[0] != "swift_ft.launch":
            super()._spawn(name, arguments)
            return
        output = self.directory / "output" / f"{name}.txt"
        self._processes[name] = _Launcher(arguments[1:], self._env, output)
        self.trace("started", service=name, service_pid=self._processes[name].pid)


class CalmCluster(Cluster):
    """A run in which nothing is going to fail: services as ever, ranks without a launcher."""

    def __init__(self, forks: Forks, directory: Path, *, ranks: int, **named: Any) -> None:
        super().__init__(directory, ranks=ranks, spares=0, **named)
        self._forks = forks

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        if name != LAUNCHER:
            super()._spawn(name, arguments)
            return
        env = {
            **self._env,
            "SWIFT_COORDINATOR": self._addresses[COORDINATOR],
            "SWIFT_JOB": JOB,
            "SWIFT_CHECKPOINT_DIR": str(self.directory / "checkpoints"),
        }
        output = self.directory / "output" / "ranks.txt"
        self._processes[name] = _Ranks(self._forks, self._trainer, self._ranks, env, output)

    def exit_codes(self) -> list[int]:
        """Of the ranks that have ended."""
        found: list[int] = self._processes[LAUNCHER].exit_codes()
        return found

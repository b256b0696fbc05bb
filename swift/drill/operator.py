"""Who gives the drill's job other recovery groups: by the command that a person would use."""

import time
from collections.abc import Sequence

from swift.drill.cluster import Cluster, Process
from swift.drill.regroup import Regroup, id_of
from swift.errors import ServiceError

AGAIN_S = 0.5
"""Ranks tell what they have measured every 2 s: the plan is asked for again until they have."""


class Operator:
    """(drill's loop) ``turn``, until all are carried out, one after the other."""

    def __init__(self, cluster: Cluster, regroups: Sequence[Regroup]) -> None:
        self._cluster = cluster
        self._regroups = regroups
        self._current = 0
        self._process: Process | None = None
        self._tried = 0.0
        self._waiting: set[str] = set()
        """Pauses that end when the groups are in force."""

    def turn(self, step: int, *, settled: bool) -> None:
        """`step`: the highest that has begun. `settled`: the groups in force are those that are wanted."""
        if settled:  # as of before this turn: what `_look` finds is in the trace by the next one
            for pause in self._waiting:
                self._go(pause)
            self._waiting = set()
        if self._process is not None:
            self._look(self._process)
        elif self._current < len(self._regroups) and self._due(step):
            self._tried = time.monotonic()
            words = [*self._regroups[self._current].words(), "--apply"]
            self._process = self._cluster.start_plan(id_of(self._current), words)

    def _due(self, step: int) -> bool:
        if time.monotonic() - self._tried < AGAIN_S:
            return False
        regroup = self._regroups[self._current]
        if regroup.until != regroup.step:
            return step >= regroup.step
        return (self._cluster.fault_directory / f"{id_of(self._current)}.reached").exists()

    def _look(self, process: Process) -> None:
        code = process.poll()
        if code is None:
            return
        self._process, name = None, id_of(self._current)
        if code == ServiceError.exit_code and self._regroups[self._current].groups is None:
            return  # nothing was measured yet
        lines = process.output.read_text(errors="replace").splitlines()
        self._cluster.trace("regroup", id=name, exit_code=code, said=lines[-1] if lines else "")
        self._go(name)
        if self._regroups[self._current].by is not None:
            self._waiting.add(f"{name}.by")
        self._current += 1

    def _go(self, pause: str) -> None:
        self._cluster.release(pause)

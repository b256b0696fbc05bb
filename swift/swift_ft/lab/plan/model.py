"""Cost of contiguous recovery groups: bytes, time in every step, time of a recovery. docs/planning.md derives it.

A group is a range of consecutive machines. Legend: `n` machines; cell [i, j] of a table is the group of machines i to
j - 1; `M` microbatches; `K` steps from checkpoint to checkpoint; `d` copies of a group that replay in parallel.
"""

import functools
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_ft.lab.plan.profile import Profile

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]
"""Machines at which a new group begins, without machine 0; ascending."""


class CostModel:
    """Tables over all groups, and predictions of choices among them.

    ``recovery_s[i, j]``, ``replay_step_s[i, j]``, ``copies[i, j]``, ``probability[i, j]`` for 0 <= i < j <= n.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.n = profile.machines
        machines = np.asarray(profile.machine_of_stage)
        self.starts = np.searchsorted(machines, np.arange(self.n + 1))
        """First stage of each machine, then the number of stages."""
        self._stage_s = np.asarray(profile.forward_s) + np.asarray(profile.backward_s)
        self._update_s = (
            np.zeros(profile.stages) if profile.update_s is None else np.asarray(profile.update_s)
        )
        formula_s = (
            self._stage_s.sum() + (profile.microbatches - 1) * self._stage_s.max() + self._update_s.max()
        )
        self.step_s = float(formula_s) if profile.step_s is None else profile.step_s
        self.rates = 1.0 / np.asarray(profile.machine_mtbf_s)
        """Failure rate of each machine, per second."""
        self.mtbf_s = float(1.0 / self.rates.sum())
        """Mean time between failures of the whole job."""
        edges = [0, *(int(self.starts[m]) - 1 for m in range(1, self.n)), 0]
        forward, backward = (
            np.array([0, *(sizes[b] for b in edges[1:-1]), 0], dtype=np.int64)
            for sizes in (profile.forward_bytes, profile.backward_bytes)
        )
        per_machine = np.add.reduceat(
            np.asarray(profile.checkpoint_bytes, dtype=np.float64), self.starts[:-1]
        )
        self.load_s: Floats = per_machine / profile.checkpoint_bytes_per_s
        """Time to load or save each machine's part of a checkpoint."""
        self.save_s = float(self.load_s.max())
        self.edges = edges
        """edges[m]: boundary before machine m, for 0 < m < n."""
        self.forward_bytes, self.backward_bytes = forward, backward
        """Bytes of that boundary; 0 before the first machine and after the last."""
        self.edge_bytes = forward + backward
        self._tables()

    def _tables(self) -> None:
        """Fills the tables by rows; row i has all groups that begin at machine i."""
        shape = (self.n, self.n + 1)
        self.recovery_s: Floats = np.full(shape, np.inf)
        self.replay_step_s: Floats = np.full(shape, np.inf)
        self.down_s: Floats = np.full(shape, np.inf)
        self.probability: Floats = np.zeros(shape)
        self.copies: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        profile, firsts = self.profile, self.starts[:-1]
        stage_max = np.maximum.reduceat(self._stage_s, firsts)
        stage_sum = np.add.reduceat(self._stage_s, firsts)
        update_max = np.maximum.reduceat(self._update_s, firsts)
        stages = np.diff(self.starts)
        state = np.asarray(profile.checkpoint_bytes, dtype=np.float64)
        state_max = np.maximum.reduceat(state, firsts)
        gradient = profile.gradient_bytes or np.zeros(profile.stages)
        gradient_max = np.maximum.reduceat(np.asarray(gradient, dtype=np.float64), firsts)
        chance = self.rates / self.rates.sum()
        steps, half_step_s = (profile.checkpoint_interval_steps - 1) / 2, self.step_s / 2
        for i in range(self.n):
            row = slice(i + 1, self.n + 1)
            length_s, slowest_s = np.cumsum(stage_sum[i:]), np.maximum.accumulate(stage_max[i:])
            updating_s = np.maximum.accumulate(update_max[i:])
            loading_s = np.maximum.accumulate(self.load_s[i:])
            room = np.where(np.cumsum(stages[i:]) == 1, profile.stages, 1)
            """Only a group of one stage replays in copies: what passes inside a larger one is in no log."""
            read_s = (self.forward_bytes[i] + self.backward_bytes[row]) / profile.log_read_bytes_per_s
            self.probability[i, row] = np.cumsum(chance[i:])
            for d in range(1, profile.copies_max + 1):
                shares = -(-profile.microbatches // d)
                replay_s = length_s + (shares - 1) * slowest_s + updating_s
                down_s = profile.fixed_s + loading_s + half_step_s
                if d > 1:
                    assert profile.network_bytes_per_s is not None
                    exchanged = 2 * (d - 1) / d * np.maximum.accumulate(gradient_max[i:])
                    replay_s = replay_s + exchanged / profile.network_bytes_per_s
                    down_s = down_s + np.maximum.accumulate(state_max[i:]) / profile.network_bytes_per_s
                replay_s = np.maximum(replay_s, read_s)
                total_s = np.where(room >= d, down_s + steps * replay_s, np.inf)
                better = total_s < self.recovery_s[i, row]
                for table, values in (
                    (self.recovery_s, total_s),
                    (self.replay_step_s, replay_s),
                    (self.down_s, down_s),
                    (self.copies, np.full_like(room, d)),
                ):
                    table[i, row] = np.where(better, values, table[i, row])

    @cached_property
    def expected_s(self) -> Floats:
        """Contribution of each group to the expected recovery time; infinite where there is no group."""
        expected_s: Floats = np.full(self.recovery_s.shape, np.inf)
        np.multiply(self.probability, self.recovery_s, out=expected_s, where=np.isfinite(self.recovery_s))
        return expected_s

    def bounds(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        return list(itertools.pairwise([0, *cuts, self.n]))

    def _of(self, table: Floats, cuts: Sequence[int]) -> Floats:
        begins, ends = _groups(tuple(cuts), self.n)
        cells: Floats = table[begins, ends]
        return cells

    def expected_recovery_s(self, cuts: Sequence[int]) -> float:
        """Returns the sum from the first group to the last, in the frontier's order of summation."""
        return float(np.cumsum(self._of(self.expected_s, cuts))[-1])

    def worst_recovery_s(self, cuts: Sequence[int]) -> float:
        return float(self._of(self.recovery_s, cuts).max())

    def parts(self, cuts: Sequence[int]) -> list[tuple[float, float]]:
        """Returns for each group: (time of a recovery without whole steps, time of one replayed step)."""
        return list(
            zip(
                self._of(self.down_s, cuts).tolist(), self._of(self.replay_step_s, cuts).tolist(), strict=True
            )
        )

    def means(self, cuts: Sequence[int], steps: float) -> tuple[float, float]:
        """Returns expectations over all failures: (time of a recovery with `steps` to replay, time of one replayed
        step)."""
        chances = self._of(self.probability, cuts)
        down_s = float(chances @ self._of(self.down_s, cuts))
        replay_s = float(chances @ self._of(self.replay_step_s, cuts))
        return down_s + steps * replay_s, replay_s

    def bytes_per_step(self, cuts: Sequence[int]) -> int:
        """Returns the logged bytes. A single group logs none: all of it recovers from the checkpoint."""
        if not cuts:
            return 0
        return int(self.edge_bytes[list(cuts)].sum()) + self.profile.other_bytes

    def overhead_s(self, cuts: Sequence[int]) -> float:
        """Returns the step time of the slowest machine minus the step time without a log."""
        profile, at = self.profile, np.array(cuts, dtype=np.int64)
        written = np.zeros(self.n)
        written[at - 1] += self.forward_bytes[at]
        written[at] += self.backward_bytes[at]
        most = float(written.max())
        held_s = 0.0 if profile.log_copy_bytes_per_s is None else most / profile.log_copy_bytes_per_s
        return max(self.step_s + held_s, most / profile.log_write_bytes_per_s) - self.step_s

    def costs(self, cuts: Sequence[int]) -> dict[str, Any]:
        """Predicts the costs of the groups between these cuts, as in the document of a plan (docs/planning.md). `cuts`:
        machines before which a boundary is logged, ascending."""
        per_step = self.bytes_per_step(cuts)
        return {
            "logged": [self.edges[cut] for cut in cuts],
            "bytes_per_step": per_step,
            "storage_bytes": self.profile.checkpoint_interval_steps * per_step,
            "overhead_s": self.overhead_s(cuts),
            "recovery_s": self.expected_recovery_s(cuts),
            "worst_recovery_s": self.worst_recovery_s(cuts),
        }

    def groups(self, cuts: Sequence[int]) -> list[dict[str, Any]]:
        """Describes each group. Of machines and stages it has the first one, and the one after the last."""
        return [
            {
                "machines": [i, j],
                "stages": [int(self.starts[i]), int(self.starts[j])],
                "probability": float(self.probability[i, j]),
                "recovery_s": float(self.recovery_s[i, j]),
                "replay_step_s": float(self.replay_step_s[i, j]),
                "copies": int(self.copies[i, j]),
            }
            for i, j in self.bounds(cuts)
        ]


@functools.lru_cache(maxsize=16)  # all tables are queried for the same choice
def _groups(cuts: Cuts, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the first machine of each group, and the one after its last."""
    edges = np.array([0, *cuts, n], dtype=np.int64)
    return edges[:-1], edges[1:]

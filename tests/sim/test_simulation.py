"""Random worlds, by seed: no promise is broken in any of them. `scripts/sim --seed S` repeats one."""

import functools

import pytest

from tests.integration.logserver_world import python
from tests.sim.faults import FAULTS, OPERATIONS
from tests.sim.run import Result, run_seed, run_seeds

SEEDS = 1000
CHUNK = 200
MORE = 2000
"""The long matrix goes on to this seed."""
# What a run of so many seeds must have seen, or it proves little.
REACHED = (
    *(f"fault: {name}" for name, _ in (*FAULTS, *OPERATIONS)),
    "body changed",
    "body overwritten for a while",
    "byte damaged",
    "coordinator killed between two effects",
    "coordinator: checkpoint_asked",
    "coordinator: checkpoint_complete",
    "coordinator: log_server_added",
    "coordinator: log_server_lost",
    "coordinator: lost its store",
    "fenced process told so",
    "hole found at a start",
    "history given up",
    "job FINISHED",
    "killed between two operations of the disk",
    "log server used anew",
    "memory handed over",
    "mended",
    "message doubled",
    "message lost",
    "nothing replayed over declared steps",
    "operator: brings a server back at the end",
    "record dropped",
    "record verified",
    "replies joined",
    "recovery: CATCH_UP",
    "recovery: CHECKPOINT",
    "recovery: KEEP",
    "recovery: REPLAY",
    "segment removed",
    "step replayed",
    "steps declared unlogged",
    "storage failed",
    "streams moved",
    "torn tail cut off",
    "writer refused: conflict",
    "writer refused: disk-full",
    "writer refused: stale-generation",
    "writer refused: stream-not-open",
)
# At least so many times in 1000 seeds: a job of three ranks logs 36 records, and the last third is not trimmed.
OFTEN = {"record acknowledged": 25_000, "record compared": 10_000}


@functools.cache
def ran(first: int) -> Result:
    return run_seeds(range(first, first + CHUNK))


@pytest.mark.parametrize(
    "first",
    [
        *range(0, SEEDS, CHUNK),
        *(pytest.param(first, marks=pytest.mark.matrix) for first in range(SEEDS, MORE, CHUNK)),
    ],
)
def test_no_promise_is_broken(first: int) -> None:
    result = ran(first)
    worst = result.failed[0] if result.failed else None
    assert worst is None, "\n".join([*worst.trace, f"scripts/sim --seed {worst.seed}: {worst.violation}"])


@pytest.mark.timeout(600)  # if it runs alone
def test_what_matters_has_happened() -> None:
    result = Result()
    for first in range(0, SEEDS, CHUNK):
        result.add(ran(first))
    missing = [what for what in REACHED if not result.counts[what]]
    assert not missing, f"never reached: {missing}"
    seldom = {
        what: result.counts[what]
        for what, least in OFTEN.items()
        if result.counts[what] * 1000 < least * SEEDS
    }
    assert not seldom, f"too seldom in {SEEDS} seeds: {seldom}"
    # Nearly all jobs get to their end, most of them in spite of something.
    assert result.counts["job FINISHED"] > 0.9 * SEEDS


def test_a_seed_is_the_same_again_in_any_process() -> None:
    """Its events included, whatever the order of sets."""
    code = "from tests.sim.run import run_seed\nfor seed in (*range(10), 87, 114): print(run_seed(seed))"
    first, second = (
        python("-c", code, env={"PYTHONHASHSEED": number}, timeout_s=60) for number in ("1", "2")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert str(run_seed(3)) in first.stdout

"""Where a process that was started again goes on, told by its state and not by its script. Pure.

A script with checkpoints of its own does not say which step its first one is. But it begins with a state: the step of
the uninterrupted run that begins with the same parameters is the one. If none does (they were not saved, or not with
all bits), the rest of the state decides; and where that says nothing, how many steps were left to do.
"""

from collections.abc import Sequence

from swift.determinism.records import BUFFERS, HYPERPARAMETERS, OPTIMIZER, PARAMETERS, Process, Record, Run

_BESIDE = (OPTIMIZER, BUFFERS, HYPERPARAMETERS)


def place(base: Run, started: Sequence[Process]) -> list[Process]:
    """The processes of one start, with the step numbers of `base`."""
    first = first_step(base, started)
    return [process.moved(first) for process in started]


def first_step(base: Run, started: Sequence[Process]) -> int:
    """The step that the processes of one start have begun with."""
    done = max((len(process.steps) for process in started), default=0)
    by_count = max(0, base.num_steps - done)
    found = [
        (_parameters(base, started, step), _beside(base, started, step), -abs(step - by_count), step)
        for step in range(base.num_steps + 1)
    ]
    # What is equal at every step (frozen weights, a constant rate) tells nothing.
    best, least = max(found), min(found)
    return best[3] if best[:2] > (least[0], min(each[1] for each in found)) else by_count


def _parameters(base: Run, started: Sequence[Process], step: int) -> int:
    return sum(_equal(base, process, step, PARAMETERS) for process in started)


def _beside(base: Run, started: Sequence[Process], step: int) -> int:
    return sum(_equal(base, process, step, kind) for process in started for kind in _BESIDE)


def _equal(base: Run, process: Process, step: int, kind: str) -> int:
    """How many values the step of the base and the process's first one have in common."""
    if not process.records:
        return 0
    record = base.at(process.rank, step) or base.at(process.rank, step, last=True)
    return 0 if record is None else _common(record, process.records[0], kind)


def _common(one: Record, other: Record, kind: str) -> int:
    return sum(other.of(kind).get(name) == value for name, value in one.of(kind).items())

"""Runs of made-up records."""

from collections.abc import Mapping, Sequence

from swift.determinism.records import (
    BUFFERS,
    GRADIENTS,
    HYPERPARAMETERS,
    INPUTS,
    LOSS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    RNG,
    Begin,
    Process,
    Record,
    Run,
)


def digest(*of: object) -> str:
    """Of 32 hexadecimal digits, as a recorder's; different for different things."""
    return format(abs(hash(of)) % 16**32, "032x")


def record(step: int, rank: int = 0, **changed: Mapping[str, str]) -> Record:
    """A step of a run in which everything changes with each step. `changed`: by kind."""
    values = {
        HYPERPARAMETERS: {"lr": repr(1 / (step + 1))},
        PARAMETERS: {"w": digest("w", step), "frozen": digest("frozen")},
        OPTIMIZER: {"w.momentum": digest("m", step)},
        BUFFERS: {"mean": digest("mean", step)},
        RNG: {"torch": digest("torch", step), "numpy": digest("numpy")},
        INPUTS: {"input 0": digest("x", step, rank)},
        OUTPUTS: {"output 0": digest("y", step, rank)},
        LOSS: {"loss 0": digest("loss", step, rank)},
        GRADIENTS: {"w": digest("g", step)},
    }
    for kind, names in changed.items():
        values[kind] = {**values[kind], **names}
    return Record(step=step, values=values, norms={"w": 1.0}, settings={"threads": "2"})


def process(records: Sequence[Record], rank: int = 0, at: float = 0.0, hash: str = "1") -> Process:
    return Process(begin=Begin(rank=rank, at=at, hash=hash), records=tuple(records))


def run(*processes: Process) -> Run:
    return Run(processes=processes)


def whole(steps: int, ranks: int = 1) -> Run:
    """An uninterrupted run."""
    return run(*(process([record(step, rank) for step in range(steps)], rank) for rank in range(ranks)))

"""What a rank tells of a step, as lines of JSON, and the runs that consist of them. No torch, no I/O.

    {"begin": {"rank": 1, "at": 12.5, "rng": {...}, "hash": "…"}}     a process begins
    {"record": {"step": 7, "values": {"inputs": {...}, ...}, ...}}    one line for each step
    {"record": {..., "last": true}}                                   its state when it ends; it has no gradients

A value is a digest of every bit of a tensor, or a number or a string as it is. In a session, `step` is the version that
the step begins with. In a script of its own it counts the steps of the process, until `swift.determinism.alignment`
finds where the process has begun.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

ENV_RECORDS = "SWIFT_RECORDS"
"""The directory in which ranks leave their records."""
ENV_DIE_IN = "SWIFT_RECORDS_DIE_IN"
"""(script) RANK:STEP: this rank kills itself in this step of its process, before the update."""

HYPERPARAMETERS, PARAMETERS, OPTIMIZER, BUFFERS, OBJECTS, RNG, INPUTS, OUTPUTS, LOSS, GRADIENTS = (
    "hyperparameters",
    "parameters",
    "optimizer",
    "buffers",
    "objects",
    "rng",
    "inputs",
    "outputs",
    "loss",
    "gradients",
)
STATE = (HYPERPARAMETERS, PARAMETERS, OPTIMIZER, BUFFERS, OBJECTS, RNG)
"""What a step begins with."""
COMPUTED = (INPUTS, OUTPUTS, LOSS, GRADIENTS)
KINDS = (*STATE, *COMPUTED)
"""In the order in which one leads to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One step of one rank."""

    step: int
    values: Mapping[str, Mapping[str, str]]
    """By kind and name."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Euclidean norms of the gradients, by name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of torch, when the step began: threads, deterministic algorithms, precision."""
    unsaved: Sequence[str] = ()
    """Buffers that are registered with persistent=False."""
    replay: bool = False
    last: bool = False
    """No step: the state in which the process has ended."""

    def of(self, kind: str) -> Mapping[str, str]:
        """The values of a kind; empty: it has none."""
        return self.values.get(kind, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """What a process has begun with."""

    rank: int
    at: float
    """Seconds of the clock that all processes of the machine share."""
    rng: Mapping[str, str] = field(default_factory=dict)
    hash: str = ""
    """What Python's hash of a fixed string is: it depends on PYTHONHASHSEED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """All that one process has told."""

    begin: Begin
    records: tuple[Record, ...]

    @property
    def rank(self) -> int:
        return self.begin.rank

    @property
    def steps(self) -> tuple[Record, ...]:
        """Without the state at its end."""
        return tuple(record for record in self.records if not record.last)

    def moved(self, steps: int) -> "Process":
        """The same process, with so many steps before its first one."""
        records = tuple(replace(record, step=record.step + steps) for record in self.records)
        return replace(self, records=records)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The processes of a run, in the order in which they began."""

    processes: tuple[Process, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({process.rank for process in self.processes}))

    @property
    def num_steps(self) -> int:
        """One more than the last step that any rank has done."""
        return max((r.step + 1 for process in self.processes for r in process.steps), default=0)

    @cached_property
    def _placed(self) -> dict[tuple[int, int, bool], Record]:
        return {(p.rank, record.step, record.last): record for p in self.processes for record in p.records}

    def at(self, rank: int, step: int, *, last: bool = False) -> Record | None:
        """That step of that rank, as it was done for the last time; None: it was not."""
        return self._placed.get((rank, step, last))

    def history(self, rank: int) -> list[Record]:
        """Every step of that rank, by its number."""
        found = (self.at(rank, step) for step in range(self.num_steps))
        return [record for record in found if record is not None]


def line(what: Begin | Record) -> str:
    """One of a file."""
    word = "begin" if isinstance(what, Begin) else "record"
    return json.dumps({word: asdict(what)}) + "\n"


def processes_of(lines: Iterable[str]) -> list[Process]:
    """Of one file. A last line that is not whole (its writer was killed) is left out."""
    begun: list[tuple[Begin, list[Record]]] = []
    for text in lines:
        if not text.endswith("\n"):
            continue
        said: dict[str, Any] = json.loads(text)
        if "begin" in said:
            begun.append((Begin(**said["begin"]), []))
        else:
            begun[-1][1].append(Record(**said["record"]))
    return [Process(begin=begin, records=tuple(records)) for begin, records in begun]


def run_of(files: Iterable[Iterable[str]]) -> Run:
    """Of the files of all its processes."""
    processes = [process for lines in files for process in processes_of(lines)]
    return Run(processes=tuple(sorted(processes, key=lambda process: (process.begin.at, process.rank))))

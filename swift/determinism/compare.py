"""Two runs -> the first step in which they differ, and all that differs there. Pure.

The states of random generators count only where steps draw from them, and where two uninterrupted runs have them in
common: every process begins with a state of its own of a generator that nobody has seeded, and that nobody uses.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from swift.determinism.records import INPUTS, KINDS, LOSS, OUTPUTS, RNG, Process, Record, Run

ABSENT = "absent"
_OF_MICROBATCHES = (INPUTS, OUTPUTS, LOSS)
STEPS = "steps"
"""The kind of a difference: a step that one run has done and the other one has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value of one rank in one step."""

    rank: int
    kind: str
    name: str
    base: str
    """In the uninterrupted run."""
    other: str
    received: bool = False
    """An input that another rank has sent: it differs because something there does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first step in which two runs differ."""

    step: int
    last: bool
    """No step, but the state at the end."""
    differences: tuple[Difference, ...]
    """In the order in which one leads to the next."""
    process: Process
    """The process of the other run that did the step with the first of them."""
    record: Record
    """What it has told of the step."""
    base: Record | None
    """The same step in the uninterrupted run; None: it has not done it."""

    @property
    def first(self) -> Difference:
        return self.differences[0]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that differ, in order."""
        return tuple(dict.fromkeys(difference.kind for difference in self.differences))

    def of(self, kind: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind == kind]


def drawn(run: Run) -> set[str]:
    """The random generators whose state changes from one step to another, in some process."""
    names = set()
    for process in run.processes:
        for one, other in zip(process.records, process.records[1:]):
            names |= {name for name, state in other.of(RNG).items() if one.of(RNG).get(name) != state}
    return names


def unseeded(one: Run, other: Run) -> set[str]:
    """The generators that two uninterrupted runs do not have in common."""
    names = set()
    for rank in one.ranks:
        for mine, theirs in zip(one.history(rank), other.history(rank)):
            names |= {name for name, state in mine.of(RNG).items() if theirs.of(RNG).get(name) != state}
    return names


def diverge(
    base: Run,
    other: Run,
    *,
    apart: Collection[str] = (),
    may_lack: Callable[[int], bool] = lambda step: False,
    shared: bool = False,
) -> Divergence | None:
    """The first step, by its number, in which `other` differs from `base`; None: in none.

    `apart`: generators whose states may differ. `may_lack(step)`: `other` may not have this step.
    `shared`: ranks of `other` may compute microbatches of one another, so that what these take in and give is compared
    with that of all ranks. (One that nobody computes shows in the gradients.)
    """
    counted = drawn(base) - set(apart)
    found: dict[tuple[int, bool], list[tuple[Difference, Process, Record, Record | None]]] = {}
    for process in other.processes:
        for record in process.records:
            known = base.at(process.rank, record.step, last=record.last)
            for difference in _differences(base, process.rank, known, record, counted, shared=shared):
                found.setdefault((record.step, record.last), []).append((difference, process, record, known))
    if not found:
        return _missing(base, other, may_lack)
    step, last = min(found)
    here = sorted(found[step, last], key=lambda each: _rank_of(each[0]))
    return Divergence(
        step=step,
        last=last,
        differences=tuple(dict.fromkeys(each[0] for each in here)),
        process=here[0][1],
        record=here[0][2],
        base=here[0][3],
    )


def _rank_of(difference: Difference) -> tuple[int, int, int]:
    """Causes before what follows from them."""
    order = -1 if difference.kind == STEPS else KINDS.index(difference.kind)
    # What a peer has sent follows from the peer's outputs.
    return (KINDS.index(OUTPUTS) if difference.received else order, difference.received, difference.rank)


def _differences(
    base: Run,
    rank: int,
    known: Record | None,
    record: Record,
    counted: Collection[str],
    *,
    shared: bool,
) -> Iterator[Difference]:
    if known is None:
        # A state at the end is compared with that of a run that has ended at the same step.
        if not record.last:
            yield Difference(rank=rank, kind=STEPS, name="step", base=ABSENT, other=str(record.step))
        return
    sent = _all_of(base, record.step, OUTPUTS, but=rank)
    for kind in KINDS:
        mine, theirs = known.of(kind), record.of(kind)
        if shared and kind in _OF_MICROBATCHES:
            anybodys = _all_of(base, record.step, kind)
            theirs = {name: value for name, value in theirs.items() if value not in anybodys}
            mine = {name: mine.get(name, ABSENT) for name in theirs}
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            if kind == RNG and name not in counted:
                continue
            one, other = mine.get(name, ABSENT), theirs.get(name, ABSENT)
            if one != other:
                received = kind == INPUTS and one in sent
                yield Difference(rank=rank, kind=kind, name=name, base=one, other=other, received=received)


def _all_of(base: Run, step: int, kind: str, *, but: int | None = None) -> set[str]:
    """The values of all ranks."""
    records = [base.at(rank, step) for rank in base.ranks if rank != but]
    return {value for record in records if record is not None for value in record.of(kind).values()}


def _missing(base: Run, other: Run, may_lack: Callable[[int], bool]) -> Divergence | None:
    """A step that `other` has not done."""
    for rank in base.ranks:
        for record in base.history(rank):
            if other.at(rank, record.step) is None and not may_lack(record.step):
                lacking = Difference(rank=rank, kind=STEPS, name="step", base=str(record.step), other=ABSENT)
                process = next((p for p in reversed(other.processes) if p.rank == rank), base.processes[0])
                return Divergence(
                    step=record.step,
                    last=False,
                    differences=(lacking,),
                    process=process,
                    record=record,
                    base=record,
                )
    return None

"""Decides which runs are needed, and judges their records. The runs themselves are started by `Runs`.

uninterrupted, interrupted             equal: done
… differ: uninterrupted once more      this differs as well: the script is not deterministic, whatever interrupts it
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Protocol

from swift_ft.train import transcript
from swift_ft.train.transcript import (
    GRADIENT,
    INPUT,
    OUTPUT,
    STATE,
    Difference,
    Transcript,
    as_json,
    differences,
    from_json,
)

# Records of the ranks' steps, as lines of JSON, and the runs that they form. No torch, no I/O.
#
#     {"rank": 1, "step": 7, "last": false, "settings": {...}, "seen": [["state", 0, 0, 0, "buffer …", "…"], ...]}
#
# A line is a step's transcript (`swift_ft.train.transcript`); the last line of a file may be the final state of its
# process. With a session, `step` is the version at the step's start. Without one it counts the steps of the process,
# until `placed` finds the step at which the process began.

ENV_RECORDS = "SWIFT_RECORDS"
"""Directory to which ranks write their records."""
ENV_DIE_IN = "SWIFT_RECORDS_DIE_IN"
"""(script) RANK:STEP: the rank kills itself in this step of its process, before the update."""
PARAMETER, GENERATOR = "parameter ", "generator "
"""Prefixes of state names."""
_BESIDE = ("buffer", "optimizer")


@dataclass(frozen=True, slots=True)
class Record:
    """One step of one rank."""

    rank: int
    step: int
    seen: Transcript
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of torch when the step began: threads, deterministic algorithms, precision."""
    last: bool = False
    """True for the final state of a process, which is not a step."""

    def line(self) -> str:
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**told, "seen": as_json(self.seen)}) + "\n"

    def state(self, *words: str) -> dict[str, bytes]:
        """Returns the state at the step's start whose names start with one of these words."""
        return {
            seen.name: digest
            for seen, digest in self.seen.items()
            if seen.kind == STATE and seen.name.startswith(words)
        }


Process = Sequence[Record]
"""Records of one process, in order."""


@dataclass(frozen=True)
class Run:
    """The processes of a run, in the order in which they began."""

    processes: tuple[Process, ...]

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for process in self.processes for record in process})

    @property
    def num_steps(self) -> int:
        """One more than the last step that any rank did."""
        return max((r.step + 1 for process in self.processes for r in process if not r.last), default=0)

    @cached_property
    def _placed(self) -> dict[tuple[int, int, bool], Record]:
        return {(r.rank, r.step, r.last): r for process in self.processes for r in process}

    def at(self, rank: int, step: int, *, last: bool = False) -> Record | None:
        """Returns the last execution of that step of that rank; None if there is none."""
        return self._placed.get((rank, step, last))

    def history(self, rank: int) -> list[Record]:
        found = (self.at(rank, step) for step in range(self.num_steps))
        return [record for record in found if record is not None]


def run_of(files: Iterable[str]) -> Run:
    """Parses the files, one for each process. Ignores an incomplete last line, whose writer was killed."""
    processes = []
    for text in files:
        told = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        processes.append([Record(**{**record, "seen": from_json(record["seen"])}) for record in told])
    return Run(tuple(process for process in processes if process))


def placed(base: Run, started: Run) -> Run:
    """Renumbers the steps of one start to those of `base`, from the step that begins with the same parameters. If none
    does (they were not saved, or not with all bits), buffers and optimizer state decide; if these do not, the number of
    steps that were left to do."""
    by_count = max(0, base.num_steps - started.num_steps)

    def equal(step: int, *words: str) -> int:
        pairs = [
            (process[0].state(*words), found.state(*words))
            for process in started.processes
            if (found := base.at(process[0].rank, step) or base.at(process[0].rank, step, last=True))
        ]
        return sum(theirs.get(name) == value for mine, theirs in pairs for name, value in mine.items())

    first = max(
        range(base.num_steps + 1),
        key=lambda step: (equal(step, PARAMETER), equal(step, *_BESIDE), -abs(step - by_count)),
    )
    moved = [[replace(r, step=r.step + first) for r in process] for process in started.processes]
    return Run(tuple(moved))


# Two runs -> the first step in which they differ, and the values that differ there. Pure.
#
# States of random generators are compared only if steps draw from them, and if they are equal in two uninterrupted
# runs: an unseeded generator begins with another state in each process, even if it is never used.

_ORDER = {
    STATE: 0,
    INPUT: 1,
    transcript.ENTERS: 1,
    transcript.LEAVES: 2,
    OUTPUT: 2,
    transcript.LOSS: 3,
    GRADIENT: 4,
}
"""Causal order of a step's differences, within a rank and from one rank to another."""


@dataclass(frozen=True, slots=True)
class Divergence:
    record: Record
    """Record of the interrupted (or second) run, of the rank with the first difference."""
    base: Record | None
    """The step in the uninterrupted run; None: that run has not done it."""
    differences: tuple[Difference, ...] = ()
    """Differences of this rank. Empty: one of the runs has not done the step."""


def drawn(run: Run) -> set[str]:
    """Returns the random generators whose state changes between two steps in some process."""
    steps = [[record for record in process if not record.last] for process in run.processes]
    return _other_generators(pair for records in steps for pair in pairwise(records))


def unseeded(one: Run, other: Run) -> set[str]:
    """Returns the generators whose states differ between two uninterrupted runs."""
    return _other_generators(pair for r in one.ranks for pair in zip(one.history(r), other.history(r)))


def _other_generators(pairs: Iterable[tuple[Record, Record]]) -> set[str]:
    states = ((one.state(GENERATOR), other.state(GENERATOR)) for one, other in pairs)
    return {name for mine, theirs in states for name in mine if theirs.get(name) != mine[name]}


def diverge(base: Run, other: Run, *, apart: Collection[str] = (), shared: bool = False) -> Divergence | None:
    """Returns the first step, by number, in which `other` differs from `base`; None if they agree as far as `other`
    goes.

    `apart`: generators whose states may differ. `shared`: ranks of `other` may compute each other's microbatches. Then
    only states and gradients are compared; the gradients depend on all microbatches.
    """
    counted = drawn(base) - set(apart)

    def counts(record: Record, kind: str, name: str) -> bool:
        if kind == STATE and name.startswith(GENERATOR):
            return name in counted and not record.last
        return not shared or kind in (STATE, GRADIENT)

    found = []
    for record in (record for process in other.processes for record in process):
        known = base.at(record.rank, record.step, last=record.last)
        if known is None and not record.last:  # a final state is compared only with that of the same step
            found.append(Divergence(record, None))
        differing = differences(known.seen, record.seen) if known is not None else ()
        if those := tuple(each for each in differing if counts(record, each.seen.kind, each.seen.name)):
            found.append(Divergence(record, known, those))
    return min(found, key=lambda each: _place(base, each), default=None)


def _place(base: Run, found: Divergence) -> tuple[int, bool, int, bool, int]:
    """Returns a sort key: by step; within a step, causes before their effects."""
    rank, step = found.record.rank, found.record.step
    first = found.differences[0] if found.differences else None
    order = -1 if first is None else _ORDER[first.seen.kind]
    # An input received from a peer is an effect of the peer's output.
    others = [base.at(other, step) for other in base.ranks if other != rank]
    sent = {d for record in others if record for seen, d in record.seen.items() if seen.kind == OUTPUT}
    received = first is not None and order == _ORDER[INPUT] and first.before in sent
    return step, found.record.last, _ORDER[OUTPUT] if received else order, received, rank


# From the first differing values to their most likely cause, with the evidence for it. Pure.
#
# Two cases have separate causes: two uninterrupted runs differ (`of_chance`), or only the interrupted run does
# (`of_resumption`).

DATA = "data-position"
WORDS = {
    "unseeded-rng": "a random generator that is not seeded, or an order that nothing fixes",
    "unordered-reduction": "a reduction whose order is not fixed",
    "thread-count": "another number of threads",
    "setting": "another setting of torch",
    "rng-not-restored": "the state of a random generator is not restored",
    "parameters-not-saved": "parameters that are not saved, or not with all bits",
    "buffer-not-saved": "a buffer that is not saved",
    "optimizer-not-saved": "the optimizer's state is not saved, or given to other parameters",
    "scheduler-not-saved": "the scheduler is not saved, or a hyperparameter is not restored",
    "object-not-saved": "the state of a registered object is not restored",
    DATA: "the data position is not restored",
    "hidden-state": "something that a step depends on and that is neither parameter, buffer, optimizer state, input "
    "nor generator: an attribute, a target, a variable of the script",
    "other-steps": "another number of steps",
}
_OF_STATE = {
    GENERATOR: "rng-not-restored",
    PARAMETER: "parameters-not-saved",
    "buffer": "buffer-not-saved",
    "a buffer": "buffer-not-saved",
    "hyperparameter": "scheduler-not-saved",
    "optimizer": "optimizer-not-saved",
    "iterator": DATA,
    "register(": "object-not-saved",
    "": "hidden-state",
}
"""Prefix of a state's name -> cause."""
_KEYS = "the keys of "
_NAMED_MAX = 3
_ALL_BEFORE = "all that was recorded before it is equal"


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    evidence: tuple[str, ...]

    @property
    def words(self) -> str:
        return WORDS[self.name]


def of_chance(base: Run, found: Divergence, apart: Collection[str]) -> Cause:
    """Explains a difference between two uninterrupted runs. `apart`: generators whose states differ between them."""
    if not found.differences:
        return _steps(found)
    if generators := sorted(drawn(base) & set(apart)):
        names = ", ".join(name.removeprefix(GENERATOR) for name in generators)
        return Cause("unseeded-rng", (f"other states of {names}, which both runs draw from",))
    if found.differences[0].seen.kind not in (STATE, INPUT):
        return _settings(found) or Cause("unordered-reduction", (_ALL_BEFORE,))
    words = (
        "no default generator differs: a generator of the script's own, an order of files, or that of a set (two runs "
        "with PYTHONHASHSEED=0 would be equal)"
    )
    return Cause("unseeded-rng", (words,))


def of_resumption(base: Run, found: Divergence) -> list[Cause]:
    """Explains a difference caused by an interruption. The state at the step's start can have several causes; values
    computed from it have one."""
    if not found.differences:
        return [_steps(found)]
    named: dict[str, list[Difference]] = {}
    for difference in found.differences:
        if difference.seen.kind == STATE:
            named.setdefault(_of_state(difference.seen.name.removeprefix(_KEYS)), []).append(difference)
    entered = next((each for each in found.differences if each.seen.kind == INPUT), None)
    # Randomly drawn inputs are an effect of the generator's state.
    if entered is not None and (not named or _elsewhere(base, found, entered)):
        named.setdefault(DATA, []).append(entered)
    if named:
        return [Cause(name, _values(base, found, those)) for name, those in named.items()]
    return [_settings(found) or Cause("hidden-state", (_ALL_BEFORE,))]


def _of_state(name: str) -> str:
    if ".param_groups" in name:
        return "scheduler-not-saved"
    return next(cause for word, cause in _OF_STATE.items() if name.startswith(word))


def _values(base: Run, found: Divergence, those: list[Difference]) -> tuple[str, ...]:
    those = [each for each in those if not each.seen.name.startswith(_KEYS)] or those
    said = [f"{each.seen.what().rstrip(',')}: {_value(base, found, each)}" for each in those[:_NAMED_MAX]]
    return (*said, *([f"and {len(those) - _NAMED_MAX} more"] if len(those) > _NAMED_MAX else ()))


def _value(base: Run, found: Divergence, difference: Difference) -> str:
    if difference.now is None:
        return "absent"
    if difference.before is None:
        return "absent in the uninterrupted run"
    return _elsewhere(base, found, difference) or "a value that it has in no step of the uninterrupted run"


def _elsewhere(base: Run, found: Divergence, difference: Difference) -> str:
    """Returns where else this rank had the value in the uninterrupted run; empty if nowhere."""
    for record in base.history(found.record.rank):
        if record.seen.get(difference.seen) == difference.now:
            return f"the value of step {record.step} of the uninterrupted run"
    states = found.base.state("") if found.base is not None and difference.seen.kind == STATE else {}
    return next((f"that of {name}, uninterrupted" for name, v in states.items() if v == difference.now), "")


def _settings(found: Divergence) -> Cause | None:
    mine, theirs = found.base.settings if found.base is not None else {}, found.record.settings
    other = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    evidence = [f"{name}: {mine.get(name)} uninterrupted, {theirs.get(name)} otherwise" for name in other]
    return Cause("thread-count" if "threads" in other else "setting", tuple(evidence)) if other else None


def _steps(found: Divergence) -> Cause:
    who = "the other run" if found.base is None else "the uninterrupted run"
    return Cause("other-steps", (f"only {who} has done step {found.record.step}",))


EQUAL, DIFFERS, NOT_DETERMINISTIC, INCONCLUSIVE = "EQUAL", "DIFFERS", "NOT DETERMINISTIC", "INCONCLUSIVE"
EXIT_CODES = {EQUAL: 0, DIFFERS: 1, NOT_DETERMINISTIC: 1, INCONCLUSIVE: 3}


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An interrupted run, with the step numbers of the uninterrupted one."""

    run: Run
    step: int
    """Step in which a rank was killed."""
    started: Sequence[Process]
    """Processes that replaced lost ones."""
    session: bool
    """True for a run with a session, which continues even without a replacement process."""
    shared: bool = False
    """Ranks computed microbatches of a lost one."""

    @property
    def resumed_at(self) -> int | None:
        """First step that was repeated or continued; None: no step was done by a replacement process."""
        return min((record.step for process in self.started for record in process), default=None)

    def diverges(self, base: Run, apart: Collection[str] = ()) -> Divergence | None:
        found = diverge(base, self.run, apart=apart, shared=self.shared)
        if found is None and self.run.num_steps < base.num_steps:
            lacking = next(record for rank in base.ranks for record in base.history(rank)[-1:])
            return Divergence(lacking, lacking)
        return found

    def before(self) -> Run:
        """Returns the steps of each rank's first process before the interruption."""
        first = {process[0].rank: process for process in reversed(self.run.processes)}.values()
        # Repeated steps follow later in the same process.
        return Run(tuple([r for n, r in enumerate(process) if r.step == n < self.step] for process in first))


class Runs(Protocol):
    """Starts a run and waits for its end. Raises SwiftError if it fails."""

    def uninterrupted(self, name: str) -> Run: ...

    def interrupted(self, base: Run) -> Interrupted: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    word: str
    base: Run
    interrupted: Interrupted
    found: Divergence | None = None
    """None: no difference."""
    causes: Sequence[Cause] = ()
    """Likely causes in that step; the first one is that of the first difference."""
    apart: Sequence[str] = ()
    """Unseeded generators, which differ between two uninterrupted runs, and on which no recorded value depends."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


def verify(runs: Runs) -> Verdict:
    """Executes the runs and compares them. Raises the errors of `runs`."""
    base = runs.uninterrupted("first")
    interrupted = runs.interrupted(base)
    verdict = partial(Verdict, base=base, interrupted=interrupted)
    if interrupted.resumed_at is None and not interrupted.session:
        return verdict(word=INCONCLUSIVE)
    if interrupted.diverges(base) is None:
        began_anew = interrupted.resumed_at == 0 and interrupted.step > 0
        return verdict(word=INCONCLUSIVE if began_anew else EQUAL)
    again = runs.uninterrupted("second")
    apart = sorted(unseeded(base, again))
    chance = diverge(base, again, apart=apart) or diverge(base, interrupted.before(), apart=apart)
    found = chance or interrupted.diverges(base, apart)
    if found is None:
        return verdict(word=EQUAL, apart=apart)
    return verdict(
        word=NOT_DETERMINISTIC if chance else DIFFERS,
        found=found,
        causes=[of_chance(base, found, apart)] if chance else of_resumption(base, found),
        apart=() if chance else apart,
    )

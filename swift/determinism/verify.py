"""Which runs are needed, and what comes of them. It starts nothing itself: `Runs` does.

uninterrupted, interrupted             equal: that is all
… differ: uninterrupted once more      this differs as well: the script is not deterministic, whatever interrupts it
… then two with one hash seed, and two with one thread, if that may be the cause: it is, if these are equal
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swift.determinism import causes
from swift.determinism.causes import Cause
from swift.determinism.compare import Divergence, diverge, unseeded
from swift.determinism.records import Process, Record, Run

EQUAL, DIFFERS, NOT_DETERMINISTIC, INCONCLUSIVE = "EQUAL", "DIFFERS", "NOT DETERMINISTIC", "INCONCLUSIVE"
EXIT_CODES = {EQUAL: 0, DIFFERS: 1, NOT_DETERMINISTIC: 1, INCONCLUSIVE: 3}

FIXED: Mapping[str, Mapping[str, str]] = {
    causes.HASH: {"PYTHONHASHSEED": "0"},
    causes.THREADS: {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
"""What takes a cause away, as variables of the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A run that was interrupted, with the step numbers of the uninterrupted one."""

    run: Run
    step: int
    """In which a rank was killed."""
    resumed_at: int | None
    """The first step that was done again, or next; None: no process was started for it."""
    session: bool
    """Ranks may have left steps out: a replacement copies a state, or a rank is not replaced."""

    shared: bool = False
    """Ranks have computed microbatches of one that was lost."""

    inexact: str = ""
    """The flags that were given, if what they ask for promises no bits."""

    def may_lack(self, step: int) -> bool:
        """Also without a session, a rank that was not killed may have saved the step that another one was killed in."""
        return self.session or step == self.step


class Runs(Protocol):
    """Starts a run and waits for its end. Raises SwiftError if there is none."""

    def uninterrupted(self, name: str, environment: Mapping[str, str]) -> Run: ...

    def interrupted(self, base: Run) -> Interrupted: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the runs have shown."""

    word: str
    base: Run
    interrupted: Interrupted
    found: Divergence | None = None
    """None: nothing differs."""
    causes: Sequence[Cause] = ()
    """The first one is that of the first difference."""
    apart: Sequence[str] = ()
    """Generators that two uninterrupted runs do not have in common, and on which nothing depends."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


def verify(runs: Runs) -> Verdict:
    """Raises what `runs` does."""
    base = runs.uninterrupted("first", {})
    interrupted = runs.interrupted(base)
    if interrupted.resumed_at is None and not interrupted.session:
        return Verdict(word=INCONCLUSIVE, base=base, interrupted=interrupted)
    found = diverge(base, interrupted.run, may_lack=interrupted.may_lack, shared=interrupted.shared)
    if found is None:
        began_anew = interrupted.resumed_at == 0 and interrupted.step > 0
        return Verdict(word=INCONCLUSIVE if began_anew else EQUAL, base=base, interrupted=interrupted)
    again = runs.uninterrupted("second", {})
    apart = sorted(unseeded(base, again))
    chance = diverge(base, again, apart=apart) or diverge(
        base, before(interrupted.run, interrupted.step), apart=apart, may_lack=lambda _: True
    )
    if chance is not None:
        cause = causes.of_chance(base, chance, fixed_by=_fixed_by(runs, base, chance))
        return Verdict(
            word=NOT_DETERMINISTIC, base=base, interrupted=interrupted, found=chance, causes=[cause]
        )
    found = diverge(
        base, interrupted.run, apart=apart, may_lack=interrupted.may_lack, shared=interrupted.shared
    )
    if found is None:
        return Verdict(word=EQUAL, base=base, interrupted=interrupted, apart=apart)
    named = causes.of_resumption(base, found, inexact=interrupted.inexact)
    return Verdict(word=DIFFERS, base=base, interrupted=interrupted, found=found, causes=named, apart=apart)


def before(run: Run, step: int) -> Run:
    """What the first process of each rank has done before `step`."""
    first: dict[int, Process] = {}
    for process in run.processes:
        first.setdefault(process.rank, process)
    kept = []
    for process in first.values():
        records: list[Record] = []
        for record in process.records:
            if record.step >= step or record.last or (records and record.step <= records[-1].step):
                break  # steps that are done again are behind the interruption
            records.append(record)
        kept.append(Process(begin=process.begin, records=tuple(records)))
    return Run(processes=tuple(kept))


def _fixed_by(runs: Runs, base: Run, chance: Divergence) -> list[str]:
    """Causes without which two uninterrupted runs are equal. Only those are tried that may be it."""
    fixed = []
    for cause in causes.candidates(base, chance):
        one, other = (runs.uninterrupted(f"{cause}-{n}", FIXED[cause]) for n in (1, 2))
        if diverge(one, other, apart=unseeded(one, other)) is None:
            fixed.append(cause)
            break
    return fixed
